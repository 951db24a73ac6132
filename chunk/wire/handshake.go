package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// The bounds of a handshake message, in bytes.
const (
	helloPrefix = 16
	maxHello    = 4 << 10
	maxToken    = 1 << 10
	maxText     = 1 << 10
)

var helloMagic = [8]byte{'c', 'k', 'p', 't', 'f', 's', '\r', '\n'}

// Kind of a connection: the two that a client keeps to a server.
type Kind uint8

// The kinds of connection.
const (
	KindSmall Kind = iota + 1 // short messages, and payloads up to SmallPayload
	KindBulk
)

// SmallPayload is the largest payload, in bytes, that goes over the small
// connection, in either direction.
const SmallPayload = 64 << 10

// Hello is the client's first message on a connection.
type Hello struct {
	MinVersion, MaxVersion uint16
	Features               uint64 // what the client can do; none is defined yet
	Cluster                ids.UUID
	Client                 uint64 // random, the same on all connections of one client
	Kind                   Kind
	MaxPayload             uint32 // the largest payload that the client takes, in bytes
	Token                  []byte // access token, may be empty
}

// Code encodes or decodes the message.
func (m *Hello) Code(c *codec.Coder) {
	c.U16(&m.MinVersion)
	c.U16(&m.MaxVersion)
	c.U64(&m.Features)
	c.UUID(&m.Cluster)
	c.U64(&m.Client)
	codec.U8As(c, &m.Kind)
	c.U32(&m.MaxPayload)
	c.Bytes(&m.Token)
	if len(m.Token) > maxToken {
		c.Fail("access token of %d bytes", len(m.Token))
	}
}

// Welcome is the server's answer. After any Status but OK it closes the connection.
type Welcome struct {
	Status                 errkind.Kind
	Text                   string // what failed, for people
	MinVersion, MaxVersion uint16 // what the server speaks
	Version                uint16 // what this connection speaks
	Features               uint64 // those of the client that the server has too
	Cluster                ids.UUID
	Boot                   uint64 // changes with each start of the server
	MaxPayload             uint32 // the largest payload of a frame, in bytes
	// StoreCredit is how many bytes of OpStore payload may be in flight on this
	// connection: sent, and not yet answered.
	StoreCredit uint32
}

// Code encodes or decodes the message.
func (m *Welcome) Code(c *codec.Coder) {
	c.U16((*uint16)(&m.Status))
	c.String(&m.Text)
	c.U16(&m.MinVersion)
	c.U16(&m.MaxVersion)
	c.U16(&m.Version)
	c.U64(&m.Features)
	c.UUID(&m.Cluster)
	c.U64(&m.Boot)
	c.U32(&m.MaxPayload)
	c.U32(&m.StoreCredit)
	if len(m.Text) > maxText {
		c.Fail("text of %d bytes", len(m.Text))
	}
}

// WriteHello sends a handshake message, a Hello or a Welcome.
func WriteHello(w io.Writer, m codec.Message) error {
	if _, err := w.Write(AppendHello(nil, m)); err != nil {
		return fmt.Errorf("send handshake: %w", err)
	}
	return nil
}

// AppendHello appends the bytes of a handshake message.
func AppendHello(dst []byte, m codec.Message) []byte {
	body := codec.Encode(nil, m)
	dst = append(dst, helloMagic[:]...)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(body)))
	dst = binary.LittleEndian.AppendUint32(dst, crc32.Checksum(body, castagnoli))
	return append(dst, body...)
}

// ReadHello receives a handshake message into m. What a later version added
// behind the known fields is ignored. Errors wrap ErrFrame when the peer sent
// something else, or the reader's error.
func ReadHello(r io.Reader, m codec.Message) error {
	var prefix [helloPrefix]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return helloEOF(err)
	}
	if [8]byte(prefix[:8]) != helloMagic {
		return fmt.Errorf("handshake starts with %q: the peer does not speak the data protocol: %w", prefix[:8], ErrFrame)
	}
	n := binary.LittleEndian.Uint32(prefix[8:])
	if n > maxHello {
		return fmt.Errorf("handshake of %d bytes, at most %d are allowed: %w", n, maxHello, ErrFrame)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return helloEOF(err)
	}
	if sum := crc32.Checksum(body, castagnoli); sum != binary.LittleEndian.Uint32(prefix[12:]) {
		return fmt.Errorf("handshake checksum %08x, want %08x: %w", binary.LittleEndian.Uint32(prefix[12:]), sum, ErrFrame)
	}
	if _, err := codec.DecodePrefix(body, m); err != nil {
		return fmt.Errorf("handshake: %w: %w", ErrFrame, err)
	}
	return nil
}

func helloEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("receive handshake: the peer closed the connection: %w", io.ErrUnexpectedEOF)
	}
	return fmt.Errorf("receive handshake: %w", err)
}

// Answer is the server's decision about a hello. It fills in what base leaves
// open; base holds the server's Cluster, Boot and StoreCredit.
func Answer(h *Hello, base Welcome) Welcome {
	w := base
	w.MinVersion, w.MaxVersion, w.MaxPayload, w.Features = Version, Version, MaxPayload, 0
	refuse := func(k errkind.Kind, format string, args ...any) Welcome {
		w.Status, w.Text = k, fmt.Sprintf(format, args...)
		return w
	}
	switch {
	case h.MaxVersion < Version || h.MinVersion > Version:
		return refuse(errkind.Version, "the client speaks data protocol %d to %d, this server %d to %d: upgrade the older of the two",
			h.MinVersion, h.MaxVersion, Version, Version)
	case h.Cluster != base.Cluster:
		return refuse(errkind.WrongCluster, "the client belongs to cluster %s, this server to %s: check the address", h.Cluster, base.Cluster)
	case h.Kind != KindSmall && h.Kind != KindBulk:
		return refuse(errkind.Invalid, "unknown kind of connection %d", h.Kind)
	case h.MaxPayload < MaxPayload:
		return refuse(errkind.Invalid, "the client takes payloads of %d bytes, this version needs %d", h.MaxPayload, MaxPayload)
	}
	w.Version = Version
	return w
}

// Check is the client's verdict on a welcome: an error wraps the server's
// Status, or Version or WrongCluster when the server did not notice.
func (m *Welcome) Check(h *Hello) error {
	switch {
	case m.Status != errkind.OK:
		return m.Status.Wrap("refused by the server: %s", m.Text)
	case m.Cluster != h.Cluster:
		return errkind.WrongCluster.Wrap("the server belongs to cluster %s, want %s: check the address", m.Cluster, h.Cluster)
	case m.Version < h.MinVersion || m.Version > h.MaxVersion:
		return errkind.Version.Wrap("the server chose data protocol %d of %d to %d, want %d to %d", m.Version, m.MinVersion, m.MaxVersion, h.MinVersion, h.MaxVersion)
	case m.MaxPayload < MaxPayload:
		return errkind.Version.Wrap("the server takes payloads of %d bytes, this version needs %d", m.MaxPayload, MaxPayload)
	}
	return nil
}
