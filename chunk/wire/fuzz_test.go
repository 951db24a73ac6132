package wire_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// later is a hello of a later version, with a field more.
type later struct{ wire.Hello }

func (m *later) Code(c *codec.Coder) {
	m.Hello.Code(c)
	extra := uint64(1)
	c.U64(&extra)
}

// raw is a message whose encoding is the bytes themselves.
type raw []byte

func (m raw) Code(c *codec.Coder) { c.Fixed(m) }

func kind(n uint16) errkind.Kind { return errkind.Kind(n) }

// FuzzFrame decodes arbitrary bytes as a frame.
func FuzzFrame(f *testing.F) {
	for i, r := range requests() {
		frame, err := wire.AppendRequest(nil, uint64(i), r)
		require.NoError(f, err)
		f.Add(frame)
	}
	for i, c := range replies() {
		frame, err := wire.AppendReply(nil, c.op, uint64(i), &c.resp, c.payload)
		require.NoError(f, err)
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		h, err := wire.ParseHeader(p)
		if err != nil {
			require.ErrorIs(t, err, wire.ErrFrame)
			return
		}
		body := p[wire.HeaderSize:]
		body = body[:min(len(body), int(h.BodyLen))]
		if h.Reply() {
			_, err = wire.DecodeReply(&h, body)
		} else {
			_, err = wire.DecodeRequest(&h, body)
		}
		if err != nil {
			require.ErrorIs(t, err, wire.ErrFrame)
		}
	})
}

// FuzzBody decodes arbitrary bytes as the body of each message: checksums, which
// a fuzzer cannot guess, are made right first.
func FuzzBody(f *testing.F) {
	for _, r := range requests() {
		if r.Body != nil {
			f.Add(byte(r.Op), uint16(0), codec.Encode(nil, r.Body))
		}
	}
	for _, c := range replies() {
		frame, err := wire.AppendReply(nil, c.op, 1, &c.resp, 0)
		require.NoError(f, err)
		f.Add(byte(c.op)|0x80, uint16(c.resp.Status), frame[wire.HeaderSize:])
	}
	f.Fuzz(func(t *testing.T, op byte, status uint16, body []byte) {
		if len(body) > wire.MaxBody {
			return
		}
		// A request whose body is the raw bytes has a header with the right sums.
		frame, err := wire.AppendRequest(nil, 1, &wire.Request{Op: wire.Op(op & 0x7f), Body: raw(body)})
		require.NoError(t, err)
		h, err := wire.ParseHeader(frame)
		require.NoError(t, err)
		if op&0x80 == 0 {
			req, err := wire.DecodeRequest(&h, body)
			if err != nil {
				require.ErrorIs(t, err, wire.ErrFrame)
				return
			}
			again, err := wire.AppendRequest(nil, 1, req)
			require.NoError(t, err)
			require.LessOrEqual(t, len(again), len(frame))
			return
		}
		h.Flags, h.Status = wire.FlagReply, kind(status)
		resp, err := wire.DecodeReply(&h, body)
		if err != nil {
			require.ErrorIs(t, err, wire.ErrFrame)
			return
		}
		again, err := wire.AppendReply(nil, h.Op, 1, resp, 0)
		require.NoError(t, err)
		require.LessOrEqual(t, len(again), len(frame))
	})
}

// FuzzHello reads arbitrary bytes as a handshake.
func FuzzHello(f *testing.F) {
	h := hello()
	f.Add(wire.AppendHello(nil, &h))
	w := wire.Answer(&h, wire.Welcome{Cluster: h.Cluster, Boot: 42})
	f.Add(wire.AppendHello(nil, &w))
	f.Add(wire.AppendHello(nil, raw("short")))
	f.Fuzz(func(t *testing.T, p []byte) {
		var h wire.Hello
		if err := wire.ReadHello(bytes.NewReader(p), &h); err == nil {
			var again wire.Hello
			require.NoError(t, wire.ReadHello(bytes.NewReader(wire.AppendHello(nil, &h)), &again))
			require.Equal(t, h, again)
		}
		var w wire.Welcome
		_ = wire.ReadHello(bytes.NewReader(p), &w)
		// The body alone, with its sum made right.
		_ = wire.ReadHello(bytes.NewReader(wire.AppendHello(nil, raw(p))), &h)
		_ = wire.ReadHello(bytes.NewReader(wire.AppendHello(nil, raw(p))), &w)
	})
}
