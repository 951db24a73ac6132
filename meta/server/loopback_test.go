package server_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// loopback runs a member behind gRPC and dials it.
func loopback(t testing.TB) *client.Client {
	t.Helper()
	s := new(sched.Real)
	g := newGroup(s, 1)
	g.lead(0)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gs := grpc.NewServer(stream.ServerOptions()...)
	stream.Register(gs, g.members[0].srv.Serve)
	go func() { _ = gs.Serve(lis) }()
	cl, err := client.Dial(bg, client.Config{
		Addrs: []string{lis.Addr().String()}, Name: "loop", Sched: s, OpTimeout: time.Minute,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, cl.Close(bg))
		g.close()
		gs.Stop()
		s.Wait()
	})
	return cl
}

func TestLoopback(t *testing.T) {
	cl := loopback(t)
	var wg sync.WaitGroup
	const callers, each = 1000, 5
	for w := range callers {
		wg.Go(func() {
			for i := range each {
				name := fmt.Sprintf("f%d-%d", w, i)
				ino, err := create(cl, name, i%2 == 0)
				require.NoError(t, err)
				var e api.Entry
				require.NoError(t, cl.Do(bg, &api.Lookup{Parent: ids.RootIno, Name: []byte(name)}, &e))
				require.Equal(t, ino, e.Attr.Ino)
			}
		})
	}
	wg.Wait()
	require.Len(t, listing(t, cl), callers*each)
}

func TestCancelledContextOnRealTime(t *testing.T) {
	cl := loopback(t)
	ino, err := create(cl, "f", false)
	require.NoError(t, err)
	require.NoError(t, cl.Do(bg, lock(ino, api.WriteLock, 1, false), nil))
	ctx, cancel := context.WithCancel(bg)
	time.AfterFunc(10*time.Millisecond, cancel)
	require.ErrorIs(t, cl.Do(ctx, lock(ino, api.WriteLock, 2, true), nil), errkind.Interrupted)
}

func BenchmarkCreate(b *testing.B) {
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("memory/callers=%d", callers), func(b *testing.B) { bench(b, loopback(b), callers) })
		b.Run(fmt.Sprintf("voter/callers=%d", callers), func(b *testing.B) {
			v := startVoter(b, vfs.NewMem(), kv.NewMem())
			defer v.stop(b)
			cl, err := client.Dial(bg, client.Config{Addrs: []string{v.addr}, Name: "b", Sched: &v.sched, OpTimeout: time.Minute})
			require.NoError(b, err)
			bench(b, cl, callers)
			require.NoError(b, cl.Close(bg))
		})
	}
}

func bench(b *testing.B, cl *client.Client, callers int) {
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for range callers {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				if _, err := create(cl, fmt.Sprintf("f%d", i), false); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}
