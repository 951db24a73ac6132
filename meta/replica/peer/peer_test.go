package peer

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type lister struct{}

func (lister) Apply(t kv.Txn, _ uint64, cmd []byte) ([]byte, error) {
	t.Set(cmd, cmd)
	return cmd, nil
}

// server is one metadata server over real sockets.
type server struct {
	id      uint64
	cluster ids.UUID
	disk    *vfs.Mem
	store   *kv.Mem
	replica *replica.Replica
	peers   *Transport
	grpc    *grpc.Server
	leads   atomic.Bool
}

func (s *server) start(t *testing.T, lis net.Listener, peers map[uint64]string) {
	s.peers = New(Config{
		ID: s.id, Peers: peers, Cluster: func() ids.UUID { return s.cluster }, Log: slog.New(slog.DiscardHandler),
		Dial: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	r, err := replica.Open(replica.Config{
		ID: s.id, Peers: peers, FS: s.disk, Store: s.store, Machine: lister{}, Sched: &sched.Real{}, Transport: s.peers,
		Fatal: func(err error) { t.Error(err) }, OnLeader: func(on bool, _ uint64) { s.leads.Store(on) },
		Tick: 10 * time.Millisecond, FlushEvery: 50 * time.Millisecond, SegmentSize: 64 << 10, RetainLog: 1,
	})
	require.NoError(t, err)
	s.replica = r
	s.grpc = grpc.NewServer()
	s.peers.Register(s.grpc)
	s.peers.Serve(r)
	go s.grpc.Serve(lis)
}

func (s *server) stop(t *testing.T) {
	require.NoError(t, s.replica.Close(context.Background()))
	s.peers.Close()
	s.grpc.Stop()
}

func listen(t *testing.T, addr string) net.Listener {
	lis, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	return lis
}

func leader(t *testing.T, servers []*server) (lead *server) {
	require.Eventually(t, func() bool {
		for _, s := range servers {
			if s.leads.Load() {
				lead = s
			}
		}
		return lead != nil
	}, time.Minute, time.Millisecond)
	return lead
}

func propose(t *testing.T, servers []*server, cmd string) {
	require.Eventually(t, func() bool {
		got := make(chan error, 1)
		leader(t, servers).replica.Propose([]byte(cmd), func(_ []byte, err error) { got <- err })
		return <-got == nil
	}, time.Minute, time.Millisecond)
}

// Three servers agree over loopback; one that was away longer than the log
// reaches gets a streamed copy.
func TestThreeServersOverGRPC(t *testing.T) {
	peers := map[uint64]string{}
	var servers []*server
	var listeners []net.Listener
	for id := range uint64(3) {
		lis := listen(t, "127.0.0.1:0")
		listeners = append(listeners, lis)
		peers[id+1] = lis.Addr().String()
		servers = append(servers, &server{id: id + 1, disk: vfs.NewMem(), store: kv.NewMem()})
	}
	for i, s := range servers {
		s.start(t, listeners[i], peers)
	}
	propose(t, servers, "first")
	away := servers[2]
	away.stop(t)
	away.leads.Store(false)
	rest := servers[:2]
	for i := range 60 {
		propose(t, rest, fmt.Sprintf("%03d-%s", i, strings.Repeat("x", 20000)))
	}
	require.Eventually(t, func() bool { return leader(t, rest).replica.Status().LogFirst > 10 }, time.Minute, time.Millisecond)
	away.start(t, listen(t, peers[3]), peers)
	require.Eventually(t, func() bool {
		a, b := away.replica.Status(), leader(t, rest).replica.Status()
		return a.Applied == b.Applied && a.Hash == b.Hash
	}, time.Minute, time.Millisecond)
	require.Greater(t, away.replica.Status().LogFirst, uint64(10))
	for _, s := range servers {
		s.stop(t)
	}
}

func TestStrangersAreRefused(t *testing.T) {
	ours := ids.UUID{1}
	tr := New(Config{ID: 1, Peers: map[uint64]string{1: "a", 2: "b"}, Cluster: func() ids.UUID { return ours }, Log: slog.New(slog.DiscardHandler)})
	good := hello{magic: helloMagic, min: 1, max: 3, cluster: ours, from: 2, to: 1, purpose: purposeMessages}
	require.ErrorIs(t, tr.check(&good), errkind.Unavailable, "nothing to hand messages to yet")
	tr.mu.handler = &replica.Replica{}
	require.NoError(t, tr.check(&good))
	for _, c := range []struct {
		change func(*hello)
		want   errkind.Kind
	}{
		{func(h *hello) { h.cluster = ids.UUID{} }, errkind.OK},
		{func(h *hello) { h.cluster = ids.UUID{2} }, errkind.WrongCluster},
		{func(h *hello) { h.min = 2 }, errkind.Version},
		{func(h *hello) { h.from = 3 }, errkind.Invalid},
		{func(h *hello) { h.from = 1 }, errkind.Invalid},
		{func(h *hello) { h.to = 2 }, errkind.Invalid},
		{func(h *hello) { h.purpose = 9 }, errkind.Unsupported},
	} {
		h := good
		c.change(&h)
		err := tr.check(&h)
		require.Equal(t, c.want, errkind.Of(err))
		var w welcome
		require.NoError(t, codec.Decode(codec.Encode(nil, refusal(err)), &w))
		require.Equal(t, c.want, errkind.Of(w.err()))
	}
}

func TestTheQueueIsBounded(t *testing.T) {
	tr := New(Config{ID: 1, Peers: map[uint64]string{1: "a", 2: "b"}})
	msg := make([]byte, 3<<20)
	for range 20 {
		tr.Send(2, [][]byte{msg})
		tr.Send(7, [][]byte{msg})
	}
	require.LessOrEqual(t, tr.links[2].mu.bytes, maxQueue)
	require.Len(t, tr.links[2].mu.queue, maxQueue/len(msg))
	tr.Close()
	var got error
	tr.SendSnapshot(2, func(send func([]byte) error) error { got = send(nil); return got })
	require.ErrorIs(t, got, errkind.Unavailable)
}

func TestHelloGolden(t *testing.T) {
	h := &hello{magic: helloMagic, min: 1, max: 2, cluster: ids.UUID{1, 2, 3}, from: 4, to: 5, purpose: purposeCopy}
	w := refusal(errkind.Busy.Wrap("later"))
	got := hex.EncodeToString(codec.Encode(nil, h)) + "\n" + hex.EncodeToString(codec.Encode(nil, w)) + "\n" +
		hex.EncodeToString(appendMessage(appendMessage(nil, []byte("one")), []byte("two"))) + "\n"
	want, err := os.ReadFile("testdata/peer.golden")
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func FuzzDecode(f *testing.F) {
	f.Add(codec.Encode(nil, &hello{magic: helloMagic, min: 1, max: 2}))
	f.Add(codec.Encode(nil, refusal(errors.New("x"))))
	f.Add(appendMessage(nil, []byte("one")))
	f.Fuzz(func(t *testing.T, p []byte) {
		var h hello
		if codec.Decode(p, &h) == nil {
			require.Equal(t, p, codec.Encode(nil, &h))
		}
		var w welcome
		_ = codec.Decode(p, &w)
		n := 0
		if splitBatch(p, func(m []byte) error { n += len(m); return nil }) == nil {
			require.LessOrEqual(t, n, len(p))
		}
	})
}
