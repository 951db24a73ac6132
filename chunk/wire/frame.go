package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// ErrFrame is the kind of every framing error. After one, nothing that follows
// on the connection can be trusted: close it.
var ErrFrame = errors.New("wire: bad frame")

// HeaderSize is the length of a frame header, in bytes.
const HeaderSize = 64

// Magic starts every frame.
const Magic uint32 = 0x444b4346 // "FCKD" as little-endian bytes

// Version is the one protocol version that this code speaks.
const Version = 1

// FlagReply marks a reply.
const FlagReply = 1

// SumXXH3 says that the payload's sums in the body are XXH3-64, one a granule.
const SumXXH3 = 1

// Header starts every frame: body and payload follow it, in this order.
type Header struct {
	Version uint8
	Op      Op
	Flags   uint8
	Class   Class
	SumKind uint8
	Status  errkind.Kind // replies
	Request uint64
	// Left is how long the sender of a request still waits, in whole
	// milliseconds; zero means no bound.
	Left time.Duration
	// QueueDelay of a reply, in whole microseconds.
	QueueDelay time.Duration
	BodyLen    uint32
	BodySum    uint32 // CRC32C of the body
	PayloadLen uint32
	Token      [16]byte // room for an access token of the request; zero in this version
}

// Reply reports whether the frame is a reply.
func (h *Header) Reply() bool { return h.Flags&FlagReply != 0 }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Append appends the HeaderSize bytes of h.
func (h *Header) Append(dst []byte) []byte {
	start := len(dst)
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, Magic)
	dst = append(dst, h.Version, byte(h.Op), h.Flags, byte(h.Class))
	dst = le.AppendUint64(dst, h.Request)
	dst = le.AppendUint32(dst, inUnits(h.Left, time.Millisecond))
	dst = le.AppendUint32(dst, inUnits(h.QueueDelay, time.Microsecond))
	dst = le.AppendUint16(dst, uint16(h.Status))
	dst = append(dst, h.SumKind, 0)
	dst = le.AppendUint32(dst, h.BodyLen)
	dst = le.AppendUint32(dst, h.BodySum)
	dst = le.AppendUint32(dst, h.PayloadLen)
	dst = append(dst, h.Token[:]...)
	dst = le.AppendUint32(dst, 0)
	return le.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// inUnits counts d in units, rounding up so that a short bound never becomes
// none, and saturating.
func inUnits(d, unit time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(min((d-1)/unit+1, math.MaxUint32))
}

// ParseHeader reads a header from the HeaderSize bytes of p.
// Every error wraps ErrFrame.
func ParseHeader(p []byte) (Header, error) {
	bad := func(format string, args ...any) (Header, error) {
		return Header{}, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrFrame)
	}
	if len(p) < HeaderSize {
		return bad("header of %d bytes, want %d", len(p), HeaderSize)
	}
	le := binary.LittleEndian
	if m := le.Uint32(p); m != Magic {
		return bad("magic %08x, want %08x: the peer does not speak the data protocol", m, Magic)
	}
	if sum := crc32.Checksum(p[:60], castagnoli); sum != le.Uint32(p[60:]) {
		return bad("header checksum %08x, want %08x", le.Uint32(p[60:]), sum)
	}
	h := Header{
		Version: p[4], Op: Op(p[5]), Flags: p[6], Class: Class(p[7]),
		Request:    le.Uint64(p[8:]),
		Left:       time.Duration(le.Uint32(p[16:])) * time.Millisecond,
		QueueDelay: time.Duration(le.Uint32(p[20:])) * time.Microsecond,
		Status:     errkind.Kind(le.Uint16(p[24:])),
		SumKind:    p[26],
		BodyLen:    le.Uint32(p[28:]), BodySum: le.Uint32(p[32:]), PayloadLen: le.Uint32(p[36:]),
		Token: [16]byte(p[40:56]),
	}
	switch {
	case h.Version != Version:
		return bad("frame of protocol version %d, agreed was %d", h.Version, Version)
	case h.BodyLen > MaxBody:
		return bad("body of %d bytes, at most %d are allowed", h.BodyLen, MaxBody)
	case h.PayloadLen > MaxPayload:
		return bad("payload of %d bytes, at most %d are allowed", h.PayloadLen, MaxPayload)
	case h.PayloadLen > 0 && h.SumKind != SumXXH3:
		return bad("payload with checksums of unknown kind %d", h.SumKind)
	case h.Class > ClassRepair:
		return bad("class %d", h.Class)
	}
	return h, nil
}

// CheckBody compares the body with the header's checksum.
func (h *Header) CheckBody(body []byte) error {
	if sum := crc32.Checksum(body, castagnoli); sum != h.BodySum || len(body) != int(h.BodyLen) {
		return fmt.Errorf("op %d, request %d: body checksum %08x, want %08x: %w", h.Op, h.Request, h.BodySum, sum, ErrFrame)
	}
	return nil
}

// finish writes the header into the room left for it at start, in front of the
// body that was encoded behind it.
func (h *Header) finish(buf []byte, start int) ([]byte, error) {
	body := buf[start+HeaderSize:]
	if len(body) > MaxBody || h.PayloadLen > MaxPayload {
		return buf[:start], errkind.Invalid.Wrap("frame of op %d with a body of %d and a payload of %d bytes: more than a frame may carry", h.Op, len(body), h.PayloadLen)
	}
	h.Version = Version
	h.BodyLen, h.BodySum = uint32(len(body)), crc32.Checksum(body, castagnoli)
	if h.PayloadLen > 0 {
		h.SumKind = SumXXH3
	}
	h.Append(buf[start:start])
	return buf, nil
}

var headerRoom [HeaderSize]byte

// PayloadLen is the number of payload bytes of r.
func (r *Request) PayloadLen() int {
	n := 0
	for _, p := range r.Payload {
		n += len(p)
	}
	return n
}

// AppendRequest appends header and body of r; the payload follows on the
// connection. errkind.Invalid when the frame would be too large.
func AppendRequest(dst []byte, id uint64, r *Request) ([]byte, error) {
	start := len(dst)
	n := r.PayloadLen()
	if n > MaxPayload {
		return dst, errkind.Invalid.Wrap("request of op %d with a payload of %d bytes, at most %d are allowed", r.Op, n, MaxPayload)
	}
	dst = append(dst, headerRoom[:]...)
	if r.Body != nil {
		dst = codec.Encode(dst, r.Body)
	}
	h := Header{Op: r.Op, Class: r.Class, Request: id, Left: r.Left, PayloadLen: uint32(n)}
	return h.finish(dst, start)
}

// AppendReply appends header and body of the reply to request id of op;
// payload bytes follow on the connection.
func AppendReply(dst []byte, op Op, id uint64, r *Response, payload int) ([]byte, error) {
	start := len(dst)
	dst = append(dst, headerRoom[:]...)
	dst = codec.Encode(dst, &replyBody{text: r.Text, body: r.Body})
	h := Header{Op: op, Flags: FlagReply, Request: id, Status: r.Status, QueueDelay: r.QueueDelay, PayloadLen: uint32(payload)}
	return h.finish(dst, start)
}

// DecodeRequest makes a request of a frame's header and body, without its
// payload. Nothing in it aliases body. Errors wrap ErrFrame.
func DecodeRequest(h *Header, body []byte) (*Request, error) {
	if err := h.CheckBody(body); err != nil {
		return nil, err
	}
	m, err := RequestBody(h.Op)
	if err != nil || h.Reply() {
		return nil, fmt.Errorf("op %d, flags %x is no request: %w", h.Op, h.Flags, ErrFrame)
	}
	if m == nil && len(body) > 0 {
		return nil, fmt.Errorf("op %d with a body of %d bytes, want none: %w", h.Op, len(body), ErrFrame)
	}
	if h.PayloadLen > 0 && h.Op != OpPut && h.Op != OpStore {
		return nil, fmt.Errorf("request of op %d with a payload: %w", h.Op, ErrFrame)
	}
	if m != nil {
		if err := codec.Decode(body, m); err != nil {
			return nil, fmt.Errorf("request of op %d: %w: %w", h.Op, ErrFrame, err)
		}
	}
	return &Request{Op: h.Op, Class: h.Class, Left: h.Left, Body: m}, nil
}

// DecodeReply makes a response of a frame's header and body, without its
// payload. Nothing in it aliases body. Errors wrap ErrFrame.
func DecodeReply(h *Header, body []byte) (*Response, error) {
	if err := h.CheckBody(body); err != nil {
		return nil, err
	}
	m, err := ReplyBody(h.Op, h.Status)
	if err != nil || !h.Reply() {
		return nil, fmt.Errorf("op %d, flags %x is no reply: %w", h.Op, h.Flags, ErrFrame)
	}
	if h.PayloadLen > 0 && (h.Op != OpRead || h.Status != errkind.OK) {
		return nil, fmt.Errorf("reply of op %d with a payload: %w", h.Op, ErrFrame)
	}
	rb := replyBody{body: m}
	if err := codec.Decode(body, &rb); err != nil {
		return nil, fmt.Errorf("reply of op %d: %w: %w", h.Op, ErrFrame, err)
	}
	return &Response{Status: h.Status, Text: rb.text, QueueDelay: h.QueueDelay, Body: m}, nil
}

// replyBody is the body of a reply: a text for people, then the message, if
// op and status have one.
type replyBody struct {
	text string
	body codec.Message
}

func (b *replyBody) Code(c *codec.Coder) {
	c.String(&b.text)
	if b.body != nil {
		b.body.Code(c)
	}
}
