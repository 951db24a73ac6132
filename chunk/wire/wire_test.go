package wire_test

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

var update = flag.Bool("update", false, "write the golden files anew")

func key(n uint64) ids.ChunkKey {
	return ids.ChunkKey{Block: ids.MakeBlockID(3, 1, 0x1122334455, n), Index: 4}
}

func openMessage() wire.Open {
	return wire.Open{
		Disk: 7, Key: key(9), Layout: ids.RS(4, 2), Ino: 0x1234, FileOff: 64 << 20, Reserve: 16 << 20, Granule: 16,
		Siblings: []ids.DiskID{1, 2, 3, 4, 7, 300},
	}
}

func requests() []*wire.Request {
	open := openMessage()
	return []*wire.Request{
		{Op: wire.OpPing},
		{Op: wire.OpOpen, Class: wire.ClassForeground, Left: 1500 * time.Millisecond, Body: &open},
		{Op: wire.OpPut, Class: wire.ClassBackground, Body: &wire.Put{Disk: 7, Key: key(9), Off: 1 << 19, Sums: []uint64{11, 12}}, Payload: [][]byte{make([]byte, 65536), make([]byte, 4096)}},
		{Op: wire.OpSeal, Body: &wire.Seal{Disk: 7, Key: key(9), Length: 12288, Digest: 0xdeadbeef}},
		{Op: wire.OpStore, Body: &wire.Store{Open: open, Sums: []uint64{13}}, Payload: [][]byte{make([]byte, 4096)}},
		{Op: wire.OpAbort, Body: &wire.ChunkRef{Disk: 7, Key: key(9)}},
		{Op: wire.OpRead, Class: wire.ClassRepair, Body: &wire.Read{Disk: 7, Key: key(9), Off: 65536, Len: 1 << 20}},
		{Op: wire.OpStat, Body: &wire.ChunkRef{Disk: 7, Key: key(10)}},
		{Op: wire.OpCancel, Body: &wire.Cancel{Request: 77}},
	}
}

type replyCase struct {
	op      wire.Op
	resp    wire.Response
	payload int
}

func replies() []replyCase {
	ms := time.Millisecond
	return []replyCase{
		{wire.OpPing, wire.Response{QueueDelay: 3 * ms}, 0},
		{wire.OpOpen, wire.Response{Body: &wire.Grant{Credit: 1 << 21}}, 0},
		{wire.OpOpen, wire.Response{Status: errkind.Busy, Text: "all buffers are granted", Body: &wire.Grant{RetryAfter: 40}}, 0},
		{wire.OpPut, wire.Response{Body: &wire.Grant{Credit: 3 << 20}}, 0},
		{wire.OpPut, wire.Response{Status: errkind.Corrupt, Text: "granule at 65536"}, 0},
		{wire.OpSeal, wire.Response{Body: &wire.Sealed{Digest: 5}}, 0},
		{wire.OpStore, wire.Response{Body: &wire.Sealed{Digest: 6}}, 0},
		{wire.OpAbort, wire.Response{}, 0},
		{wire.OpRead, wire.Response{Body: &wire.Data{Length: 1 << 24, Granule: 16, Digest: 8, Sums: []uint64{1, 2}}}, 131072},
		{wire.OpStat, wire.Response{Body: &wire.Stat{State: 2, Length: 4096, Digest: 9, Granule: 12, Sums: []uint64{3}}}, 0},
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name+".hex")
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(hex.EncodeToString(got)+"\n"), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, strings.TrimSpace(string(want)), hex.EncodeToString(got), "the protocol has changed; raise its version")
}

func TestGoldenRequests(t *testing.T) {
	for i, r := range requests() {
		frame, err := wire.AppendRequest(nil, uint64(100+i), r)
		require.NoError(t, err)
		golden(t, "request-"+r.Op.String(), frame)
		h, err := wire.ParseHeader(frame)
		require.NoError(t, err)
		require.Equal(t, uint64(100+i), h.Request)
		require.Equal(t, r.PayloadLen(), int(h.PayloadLen))
		got, err := wire.DecodeRequest(&h, frame[wire.HeaderSize:])
		require.NoError(t, err)
		want := *r
		want.Payload = nil
		require.Equal(t, &want, got)
	}
}

func TestGoldenReplies(t *testing.T) {
	for i, c := range replies() {
		frame, err := wire.AppendReply(nil, c.op, uint64(200+i), &c.resp, c.payload)
		require.NoError(t, err)
		golden(t, fmt.Sprintf("reply-%s-%d", c.op, c.resp.Status), frame)
		h, err := wire.ParseHeader(frame)
		require.NoError(t, err)
		require.Equal(t, c.payload, int(h.PayloadLen))
		got, err := wire.DecodeReply(&h, frame[wire.HeaderSize:])
		require.NoError(t, err)
		require.Equal(t, &c.resp, got)
	}
}

func hello() wire.Hello {
	return wire.Hello{
		MinVersion: 1, MaxVersion: 1, Features: 5, Cluster: ids.UUID{1, 2, 3}, Client: 99, Kind: wire.KindBulk,
		MaxPayload: wire.MaxPayload, Token: []byte("token"),
	}
}

func TestGoldenHandshake(t *testing.T) {
	h := hello()
	golden(t, "hello", wire.AppendHello(nil, &h))
	w := wire.Answer(&h, wire.Welcome{Cluster: h.Cluster, Boot: 42, StoreCredit: 1 << 20})
	require.Equal(t, errkind.OK, w.Status)
	golden(t, "welcome", wire.AppendHello(nil, &w))
	require.NoError(t, w.Check(&h))
}

// TestHandshakeRefusals: both ends learn why there is no connection.
func TestHandshakeRefusals(t *testing.T) {
	cluster := ids.UUID{1, 2, 3}
	for name, c := range map[string]struct {
		change func(*wire.Hello)
		kind   errkind.Kind
		says   string
	}{
		"newer client":  {func(h *wire.Hello) { h.MinVersion, h.MaxVersion = 2, 3 }, errkind.Version, "upgrade the older"},
		"older client":  {func(h *wire.Hello) { h.MinVersion, h.MaxVersion = 0, 0 }, errkind.Version, "upgrade the older"},
		"wrong cluster": {func(h *wire.Hello) { h.Cluster[0]++ }, errkind.WrongCluster, "check the address"},
		"small frames":  {func(h *wire.Hello) { h.MaxPayload = 4096 }, errkind.Invalid, "4096"},
		"unknown kind":  {func(h *wire.Hello) { h.Kind = 9 }, errkind.Invalid, "kind"},
	} {
		t.Run(name, func(t *testing.T) {
			h := hello()
			c.change(&h)
			w := wire.Answer(&h, wire.Welcome{Cluster: cluster, Boot: 1})
			require.Equal(t, c.kind, w.Status)
			err := w.Check(&h)
			require.ErrorIs(t, err, c.kind)
			require.ErrorContains(t, err, c.says)
		})
	}
	h := hello()
	sloppy := wire.Welcome{Cluster: ids.UUID{9}, Version: 1, MaxPayload: wire.MaxPayload}
	require.ErrorIs(t, sloppy.Check(&h), errkind.WrongCluster)
	sloppy = wire.Welcome{Cluster: cluster, Version: 7, MaxPayload: wire.MaxPayload}
	require.ErrorIs(t, sloppy.Check(&h), errkind.Version)
}

// TestHandshakeGrows: a later version may add fields behind the known ones.
func TestHandshakeGrows(t *testing.T) {
	h := hello()
	var got wire.Hello
	require.NoError(t, wire.ReadHello(bytes.NewReader(wire.AppendHello(nil, &later{h})), &got))
	require.Equal(t, h, got)
}

func TestFlippedBitsAreFound(t *testing.T) {
	r := requests()[1]
	frame, err := wire.AppendRequest(nil, 5, r)
	require.NoError(t, err)
	for bit := range 8 * len(frame) {
		bad := bytes.Clone(frame)
		bad[bit/8] ^= 1 << (bit % 8)
		h, err := wire.ParseHeader(bad)
		if err == nil {
			_, err = wire.DecodeRequest(&h, bad[wire.HeaderSize:])
		}
		require.ErrorIs(t, err, wire.ErrFrame, "bit %d", bit)
	}
}

func TestTooLarge(t *testing.T) {
	_, err := wire.AppendRequest(nil, 1, &wire.Request{Op: wire.OpPut, Body: &wire.Put{}, Payload: [][]byte{make([]byte, wire.MaxPayload), {1}}})
	require.ErrorIs(t, err, errkind.Invalid)
	_, err = wire.AppendRequest(nil, 1, &wire.Request{Op: wire.OpPut, Body: &wire.Put{Sums: make([]uint64, wire.MaxBody/8)}})
	require.ErrorIs(t, err, errkind.Invalid)
}

// TestLeftRoundsUp: a short bound must not become "no bound".
func TestLeftRoundsUp(t *testing.T) {
	for in, want := range map[time.Duration]time.Duration{1: time.Millisecond, time.Millisecond: time.Millisecond, -1: 0, 1 << 62: (1<<32 - 1) * time.Millisecond} {
		frame := (&wire.Header{Version: wire.Version, Op: wire.OpPing, Left: in}).Append(nil)
		h, err := wire.ParseHeader(frame)
		require.NoError(t, err)
		require.Equal(t, want, h.Left)
	}
}

// TestReader takes frames off streams that deliver their bytes in any pieces.
func TestReader(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type sent struct {
			body, payload []byte
			keep          bool
		}
		var stream bytes.Buffer
		var want []sent
		for range rapid.IntRange(1, 5).Draw(t, "frames") {
			f := sent{
				body:    bytes.Repeat([]byte{byte(len(want))}, rapid.SampledFrom([]int{0, 1, 100, 4096, 5000, 60000}).Draw(t, "body")),
				payload: bytes.Repeat([]byte{byte(100 + len(want))}, rapid.SampledFrom([]int{0, 1, 4000, 70000}).Draw(t, "payload")),
				keep:    rapid.Bool().Draw(t, "keep"),
			}
			h := wire.Header{Version: wire.Version, Op: wire.OpPut, SumKind: wire.SumXXH3, BodyLen: uint32(len(f.body)), PayloadLen: uint32(len(f.payload))}
			stream.Write(h.Append(nil))
			stream.Write(f.body)
			stream.Write(f.payload)
			want = append(want, f)
		}
		src := io.Reader(&stream)
		switch rapid.IntRange(0, 2).Draw(t, "pieces") {
		case 0:
			src = iotest.OneByteReader(src)
		case 1:
			src = iotest.HalfReader(src)
		}
		r := wire.NewReader(src)
		for _, f := range want {
			h, err := r.Header()
			require.NoError(t, err)
			body, err := r.Body(&h)
			require.NoError(t, err)
			require.True(t, bytes.Equal(f.body, body))
			if f.keep {
				got := make([]byte, h.PayloadLen)
				require.NoError(t, r.Payload(got))
				require.True(t, bytes.Equal(f.payload, got))
			} else {
				require.NoError(t, r.Discard(int(h.PayloadLen)))
			}
		}
		_, err := r.Header()
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestReaderCutOff(t *testing.T) {
	frame, err := wire.AppendRequest(nil, 1, requests()[3])
	require.NoError(t, err)
	for n := 1; n < len(frame); n++ {
		r := wire.NewReader(bytes.NewReader(frame[:n]))
		h, err := r.Header()
		if err == nil {
			_, err = r.Body(&h)
		}
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	}
}
