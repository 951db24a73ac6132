package peer

import (
	"encoding/binary"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// version of the protocol between metadata servers.
const version = 1

const helloMagic = 0x4d524b43 // "CKRM"

// Purposes of a stream.
const (
	purposeMessages uint8 = 1
	purposeCopy     uint8 = 2
)

// hello is the first message of a stream, from the dialling side.
type hello struct {
	magic    uint32
	min, max uint16   // versions that the sender speaks
	cluster  ids.UUID // zero before the founding
	from, to uint64
	purpose  uint8
}

// Code encodes or decodes the message.
func (h *hello) Code(c *codec.Coder) {
	c.U32(&h.magic)
	if c.Reading() && h.magic != helloMagic {
		c.Fail("not a metadata server's greeting")
		return
	}
	c.U16(&h.min)
	c.U16(&h.max)
	c.UUID(&h.cluster)
	c.U64(&h.from)
	c.U64(&h.to)
	c.U8(&h.purpose)
}

// welcome answers hello, and the end of a copy. An error ends the stream.
type welcome struct {
	kind    uint16 // errkind.Kind
	text    string
	version uint16
}

// Code encodes or decodes the message.
func (w *welcome) Code(c *codec.Coder) {
	c.U16(&w.kind)
	c.String(&w.text)
	c.U16(&w.version)
}

func (w *welcome) err() error {
	if k := errkind.Kind(w.kind); k != errkind.OK {
		return k.Wrap("%s", w.text)
	}
	return nil
}

func refusal(err error) *welcome {
	if err == nil {
		return &welcome{version: version}
	}
	return &welcome{kind: uint16(errkind.Of(err)), text: err.Error()}
}

// A batch of messages is each with its length before it.
func appendMessage(batch, msg []byte) []byte {
	batch = binary.AppendUvarint(batch, uint64(len(msg)))
	return append(batch, msg...)
}

func splitBatch(batch []byte, fn func(msg []byte) error) error {
	for len(batch) > 0 {
		n, w := binary.Uvarint(batch)
		if w <= 0 || n > uint64(len(batch)-w) {
			return errkind.Invalid.Wrap("a batch of messages is cut short")
		}
		end := w + int(n)
		if err := fn(batch[w:end:end]); err != nil {
			return err
		}
		batch = batch[end:]
	}
	return nil
}
