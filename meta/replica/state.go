package replica

import (
	"encoding/binary"
	"fmt"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// stateKey holds the replica's own record in the store.
var stateKey = []byte("\x00replica")

const stateVersion = 1

// state says what a flush contains. It is written in the flush's transaction.
type state struct {
	version  uint8
	index    uint64 // of the last log entry whose effect is in the store
	term     uint64 // of that entry
	position uint64 // commands applied
	hash     uint64 // over all records
	voters   []uint64
	// newborn: this member started empty and has not yet caught up with the
	// group. See Node.newborn.
	newborn bool
}

// Code encodes or decodes the record.
func (s *state) Code(c *codec.Coder) {
	c.U8(&s.version)
	if c.Reading() && s.version != stateVersion {
		c.Fail("replica state of version %d, this program knows %d", s.version, stateVersion)
		return
	}
	c.U64(&s.index)
	c.U64(&s.term)
	c.U64(&s.position)
	c.U64(&s.hash)
	codec.Slice(c, &s.voters, func(c *codec.Coder, v *uint64) { codec.VarInt(c, v) })
	c.Bool(&s.newborn)
}

func (s *state) encode() []byte {
	s.version = stateVersion
	return codec.Encode(nil, s)
}

func (s *state) marker() log.Marker {
	return log.Marker{Index: s.index, Term: s.term, Voters: s.voters}
}

// readState returns the store's state, nil when it has none.
func readState(r kv.Reader) (*state, error) {
	p, err := r.Get(stateKey)
	if err != nil || p == nil {
		return nil, err
	}
	var s state
	if err := codec.Decode(p, &s); err != nil {
		return nil, errkind.Corrupt.Wrap("replica state in the metadata store: %v", err)
	}
	return &s, nil
}

// entryVersion starts the data of every log entry; the commands follow, each
// with its length.
const entryVersion = 1

func appendCommand(data, cmd []byte) []byte {
	if len(data) == 0 {
		data = append(data, entryVersion)
	}
	data = binary.AppendUvarint(data, uint64(len(cmd)))
	return append(data, cmd...)
}

// decodeCommands splits an entry's data. The commands alias it.
func decodeCommands(data []byte) ([][]byte, error) {
	if len(data) == 0 {
		return nil, nil // a new leader's empty entry
	}
	if data[0] != entryVersion {
		return nil, fmt.Errorf("log entry of version %d, this program knows %d: %w", data[0], entryVersion, codec.ErrCorrupt)
	}
	var cmds [][]byte
	for data = data[1:]; len(data) > 0; {
		n, w := binary.Uvarint(data)
		if w <= 0 || n > uint64(len(data)-w) {
			return nil, fmt.Errorf("command %d of a log entry is cut short: %w", len(cmds), codec.ErrCorrupt)
		}
		end := w + int(n)
		cmds = append(cmds, data[w:end:end])
		data = data[end:]
	}
	return cmds, nil
}
