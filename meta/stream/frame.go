// Package stream is the transport of the metadata service: one bidirectional
// stream for each mount, chunk server or command, which carries framed
// requests, replies and pushes. Client and server share it. A Conn carries
// messages; over gRPC in production, in memory in the simulation and in tests.
// Documented byte by byte in docs/protocol-metadata.md.
package stream

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Type says what a frame is. Part of the protocol: only ever append.
type Type uint8

// The types of frame.
const (
	// TypeHello is the first frame in each direction; its body is a Hello or a HelloReply.
	TypeHello Type = iota + 1
	// TypeRequest carries an api.Header and a request; the id is the sender's choice.
	TypeRequest
	// TypeReply carries an api.Reply and its body: the final answer to the request of the same id.
	TypeReply
	// TypeRefuse carries a Refusal: this server did not answer the request of
	// the same id, whether or not its mutation was applied. Ask again: there, or later.
	TypeRefuse
	// TypePush carries an api.Pushed; the id is its api.Kind.
	TypePush
	// TypeCancel has no body: the sender gives up on its request of the same id.
	TypeCancel
	types
)

// FrameVersion is the version of the frame layout.
const FrameVersion = 1

// Sizes, in bytes.
const (
	HeaderSize = 20
	// MaxBody is the largest body of one frame.
	MaxBody = 4 << 20
	// MaxBatch is how large a message of several frames may become; a single
	// frame may be larger.
	MaxBatch = 256 << 10
	// MaxMessage is the largest message.
	MaxMessage = MaxBody + HeaderSize
)

// Frame is one decoded frame. Body aliases the message that it came in.
type Frame struct {
	Type Type
	ID   uint64
	Body []byte
}

// castagnoli is read-only.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Begin appends room for a frame's header to dst. The caller appends the body
// and calls Finish with the offset at which the frame began.
func Begin(dst []byte) []byte {
	return append(dst, make([]byte, HeaderSize)...)
}

// Finish fills in the header of the frame that begins at offset start of p and
// ends at its end.
func Finish(p []byte, start int, t Type, id uint64) {
	f := p[start:]
	binary.LittleEndian.PutUint32(f[0:], uint32(len(f)-HeaderSize))
	f[4] = FrameVersion
	f[5] = byte(t)
	f[6], f[7] = 0, 0
	binary.LittleEndian.PutUint64(f[8:], id)
	binary.LittleEndian.PutUint32(f[16:], sum(f))
}

// Append appends a whole frame to dst.
func Append(dst []byte, t Type, id uint64, body []byte) []byte {
	start := len(dst)
	dst = append(Begin(dst), body...)
	Finish(dst, start, t, id)
	return dst
}

func sum(frame []byte) uint32 {
	return crc32.Update(crc32.Checksum(frame[:16], castagnoli), castagnoli, frame[HeaderSize:])
}

// Next takes the first frame off a message and returns what follows. Errors
// are of kind errkind.Corrupt, or errkind.Version for an unknown frame layout.
func Next(msg []byte) (Frame, []byte, error) {
	if len(msg) < HeaderSize {
		return Frame{}, nil, errkind.Corrupt.Wrap("read frame: %d bytes, a header has %d", len(msg), HeaderSize)
	}
	if msg[4] != FrameVersion {
		return Frame{}, nil, errkind.Version.Wrap("read frame of layout version %d, this side speaks %d", msg[4], FrameVersion)
	}
	n := binary.LittleEndian.Uint32(msg)
	if n > MaxBody || int(n) > len(msg)-HeaderSize {
		return Frame{}, nil, errkind.Corrupt.Wrap("read frame: body of %d bytes in a message with %d left", n, len(msg)-HeaderSize)
	}
	f := msg[: HeaderSize+n : HeaderSize+n]
	if got, want := sum(f), binary.LittleEndian.Uint32(f[16:]); got != want {
		return Frame{}, nil, errkind.Corrupt.Wrap("read frame: checksum %08x, header says %08x", got, want)
	}
	t := Type(f[5])
	if t == 0 || t >= types || f[6]|f[7] != 0 {
		return Frame{}, nil, errkind.Corrupt.Wrap("read frame: type %d, flags %d", t, binary.LittleEndian.Uint16(f[6:]))
	}
	return Frame{Type: t, ID: binary.LittleEndian.Uint64(f[8:]), Body: f[HeaderSize:]}, msg[HeaderSize+n:], nil
}
