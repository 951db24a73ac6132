package stream_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write the golden files anew")

// golden are frames of every type.
func golden() map[string][]byte {
	cluster := ids.UUID{0xc1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	enc := func(m codec.Message) []byte { return codec.Encode(nil, m) }
	request := api.EncodeRequest(&api.Header{Session: 9, Place: 3, Seq: 7}, &api.GetAttr{Ino: 1})
	return map[string][]byte{
		"hello":       stream.Append(nil, stream.TypeHello, 0, enc(&stream.Hello{MinVersion: 1, MaxVersion: 2, Cluster: cluster, Features: 5, Name: "/mnt"})),
		"hello-reply": stream.Append(nil, stream.TypeHello, 0, enc(&stream.HelloReply{Version: 1, Cluster: cluster, Features: 4, Leader: "10.0.0.1:7000"})),
		"request":     stream.Append(nil, stream.TypeRequest, 1<<40, request),
		"reply":       stream.Append(nil, stream.TypeReply, 1<<40, api.EncodeReply(&api.Reply{Epoch: 1}, &api.Empty{})),
		"refuse":      stream.Append(nil, stream.TypeRefuse, 2, enc(&stream.Refusal{Err: errkind.NotLeader, Text: "no", Leader: "a:1"})),
		"push":        stream.Append(nil, stream.TypePush, uint64(api.PushClusterChanged), enc(&api.Pushed{Version: 300})),
		"cancel":      stream.Append(nil, stream.TypeCancel, 77, nil),
	}
}

func TestGoldenFrames(t *testing.T) {
	for name, frame := range golden() {
		path := filepath.Join("testdata", "frame-"+name+".hex")
		if *update {
			require.NoError(t, os.MkdirAll("testdata", 0o755))
			require.NoError(t, os.WriteFile(path, []byte(hex.EncodeToString(frame)+"\n"), 0o644))
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, strings.TrimSpace(string(text)), hex.EncodeToString(frame), name)
		f, rest, err := stream.Next(frame)
		require.NoError(t, err)
		require.Empty(t, rest)
		require.Equal(t, frame, stream.Append(nil, f.Type, f.ID, f.Body))
	}
}

func TestEveryFlippedBitIsFound(t *testing.T) {
	frame := golden()["hello"]
	for bit := range len(frame) * 8 {
		bad := bytes.Clone(frame)
		bad[bit/8] ^= 1 << (bit % 8)
		_, _, err := stream.Next(bad)
		require.Error(t, err, "bit %d", bit)
	}
	for n := range frame {
		_, _, err := stream.Next(frame[:n])
		require.ErrorIs(t, err, errkind.Corrupt)
	}
}

func TestSeveralFramesInOneMessage(t *testing.T) {
	var msg []byte
	for id := range uint64(100) {
		msg = stream.Append(msg, stream.TypeReply, id, bytes.Repeat([]byte{byte(id)}, int(id)))
	}
	for id := range uint64(100) {
		f, rest, err := stream.Next(msg)
		require.NoError(t, err)
		require.Equal(t, id, f.ID)
		require.Len(t, f.Body, int(id))
		msg = rest
	}
	require.Empty(t, msg)
}

func FuzzNext(f *testing.F) {
	for _, frame := range golden() {
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		fr, rest, err := stream.Next(msg)
		if err != nil {
			return
		}
		require.Equal(t, msg[:len(msg)-len(rest)], stream.Append(nil, fr.Type, fr.ID, fr.Body))
	})
}

func FuzzHello(f *testing.F) {
	f.Add(codec.Encode(nil, &stream.Hello{MinVersion: 1, MaxVersion: 1, Name: "x"}))
	f.Fuzz(func(t *testing.T, p []byte) {
		for _, m := range []codec.Message{new(stream.Hello), new(stream.HelloReply), new(stream.Refusal)} {
			if codec.Decode(p, m) == nil {
				again := codec.Encode(nil, m)
				require.NoError(t, codec.Decode(again, m))
			}
		}
	})
}

func TestAnswer(t *testing.T) {
	ours, other := ids.UUID{1}, ids.UUID{2}
	hello := stream.Hello{MinVersion: 1, MaxVersion: 9}
	require.Equal(t, stream.HelloReply{Version: 1, Cluster: ours}, stream.Answer(&hello, ours), "the highest common version")
	hello.Cluster = other
	r := stream.Answer(&hello, ours)
	require.ErrorIs(t, r.Failure(), errkind.WrongCluster)
	r = stream.Answer(&hello, ids.UUID{})
	require.NoError(t, r.Failure(), "a server that does not know its cluster yet refuses nobody")
	r = stream.Answer(&stream.Hello{MinVersion: 2, MaxVersion: 1}, ours)
	require.ErrorIs(t, r.Failure(), errkind.Version)
}

// echo sends back what comes.
func echo(c stream.Conn) {
	for {
		msg, err := c.Recv()
		if err != nil || c.Send(msg) != nil {
			return
		}
	}
}

func exercise(t *testing.T, c stream.Conn) {
	t.Helper()
	for n := 1; n <= 1<<20; n *= 4 {
		want := bytes.Repeat([]byte{byte(n)}, n)
		msg := append(stream.NewBuffer(n), want...)
		require.NoError(t, c.Send(msg))
		got, err := c.Recv()
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "%d bytes", n)
	}
}

func TestGRPC(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(stream.ServerOptions()...)
	ended := make(chan struct{}, 1)
	stream.Register(s, func(c stream.Conn) { echo(c); ended <- struct{}{} })
	go func() { _ = s.Serve(lis) }()
	defer s.Stop()
	c, err := stream.GRPC{}.Connect(context.Background(), lis.Addr().String())
	require.NoError(t, err)
	exercise(t, c)
	c.Close()
	c.Close()
	<-ended
	require.Error(t, c.Send([]byte("x")))
	_, err = c.Recv()
	require.Error(t, err)
}

func TestGRPCServerCloses(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(stream.ServerOptions()...)
	stream.Register(s, func(c stream.Conn) { _ = c.Send([]byte("bye")) })
	go func() { _ = s.Serve(lis) }()
	defer s.Stop()
	c, err := stream.GRPC{}.Connect(context.Background(), lis.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	msg, err := c.Recv()
	require.NoError(t, err)
	require.Equal(t, "bye", string(msg))
	_, err = c.Recv()
	require.Error(t, err)
}

func TestGRPCNobodyThere(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := lis.Addr().String()
	require.NoError(t, lis.Close())
	c, err := stream.GRPC{}.Connect(context.Background(), addr)
	if err == nil {
		defer c.Close()
		_, err = c.Recv()
	}
	require.Error(t, err)
}

func TestPipe(t *testing.T) {
	var s sched.Real
	client, server := stream.Pipe(&s)
	s.Go("echo", func() { echo(server) })
	exercise(t, client)
	client.Close()
	require.Error(t, client.Send([]byte("x")))
	s.Wait()
	a, b := stream.Pipe(&s)
	require.NoError(t, a.Send([]byte("last")))
	a.Close()
	msg, err := b.Recv()
	require.NoError(t, err, "what was sent before the end arrives")
	require.Equal(t, "last", string(msg))
	_, err = b.Recv()
	require.ErrorIs(t, err, errkind.Unavailable)
}
