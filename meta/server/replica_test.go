package server_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica"
	"github.com/ckptfs/ckptfs/meta/server"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// voter is one real metadata server, alone: replica, leader, gRPC.
type voter struct {
	sched sched.Real
	rep   *replica.Replica
	srv   *server.Server
	grpc  *grpc.Server
	addr  string
}

func startVoter(t testing.TB, fs vfs.FS, store kv.Store) *voter {
	t.Helper()
	v := &voter{}
	ready := make(chan struct{})
	var err error
	v.rep, err = replica.Open(replica.Config{
		ID: 1, FS: fs, Store: store, Machine: meta.New(), Sched: &v.sched,
		Fatal: func(err error) { t.Errorf("the replica gave up: %v", err) },
		OnLeader: func(leading bool, term uint64) {
			<-ready
			v.srv.OnLeader(leading, term)
		},
	})
	require.NoError(t, err)
	v.srv = server.New(server.Config{Replica: v.rep, Sched: &v.sched, Layout: ids.RS(4, 2)})
	close(ready)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	v.grpc, v.addr = grpc.NewServer(stream.ServerOptions()...), lis.Addr().String()
	stream.Register(v.grpc, v.srv.Serve)
	v.sched.Go("grpc", func() { _ = v.grpc.Serve(lis) })
	return v
}

func (v *voter) stop(t testing.TB) {
	t.Helper()
	v.srv.Close()
	v.grpc.Stop()
	require.NoError(t, v.rep.Close(context.Background()))
	v.sched.Wait()
}

func TestOneRealVoter(t *testing.T) {
	fs, store := vfs.NewMem(), kv.NewMem()
	v := startVoter(t, fs, store)
	cfg := client.Config{Addrs: []string{v.addr}, Name: "a", Sched: &v.sched, OpTimeout: time.Minute}
	cl, err := client.Dial(bg, cfg)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for w := range 100 {
		wg.Go(func() {
			for i := range 5 {
				_, err := create(cl, fmt.Sprintf("f%d-%d", w, i), false)
				require.NoError(t, err)
			}
		})
	}
	wg.Wait()
	cluster := cl.Cluster()
	require.NoError(t, cl.Close(bg))
	v.stop(t)

	v = startVoter(t, fs, store)
	cfg.Addrs, cfg.Sched, cfg.Cluster = []string{v.addr}, &v.sched, cluster
	cl, err = client.Dial(bg, cfg)
	require.NoError(t, err)
	require.Len(t, listing(t, cl), 500)
	require.NoError(t, cl.Close(bg))
	v.stop(t)
}
