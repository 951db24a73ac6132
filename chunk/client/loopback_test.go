package client_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/store"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/stretchr/testify/require"
)

var (
	testCluster = ids.UUID{1, 2, 3}
	quiet       = slog.New(slog.DiscardHandler)
)

// bed is six chunk servers on loopback, each with a disk in memory.
type bed struct {
	m       cluster.Map
	shells  []*server.Shell
	client  *client.Client
	counter uint64
}

func newBed(t testing.TB) *bed {
	b := &bed{m: cluster.Map{Version: 1, Cluster: testCluster}}
	for i := range 6 {
		st := newStore(t, i)
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		id := i + 1
		srv := server.New(server.Config{
			Cluster: testCluster, Boot: uint64(id), Sched: new(sched.Real), Log: quiet,
			Disks: []server.Disk{{ID: ids.DiskID(id), Store: st}},
		})
		b.shells = append(b.shells, server.Serve(srv, lis, server.ShellConfig{Log: quiet}))
		b.m.Servers = append(b.m.Servers, cluster.Server{ID: ids.ServerID(id), Addr: lis.Addr().String(), Host: lis.Addr().String(), Up: true})
		b.m.Disks = append(b.m.Disks, cluster.Disk{ID: ids.DiskID(id), Server: ids.ServerID(id), Capacity: 1 << 30, Free: 1 << 29})
	}
	tr := transport.New(transport.Config{Cluster: testCluster, Sched: new(sched.Real)})
	b.client = client.New(client.Config{Transport: tr, Map: func() *cluster.Map { return &b.m }, Sched: new(sched.Real)})
	t.Cleanup(func() {
		b.client.Close()
		tr.Close()
		for _, s := range b.shells {
			_ = s.Close(time.Second)
		}
	})
	return b
}

func (b *bed) nextID() ids.BlockID {
	b.counter++
	return ids.MakeBlockID(0, 1, 1, b.counter)
}

// TestLoopback writes a block over real sockets to real stores, kills a
// server, reads the block back, and writes another.
func TestLoopback(t *testing.T) {
	b := newBed(t)
	data := bytes.Repeat([]byte("0123456789abcde\n"), 9<<20/16)
	ctx := context.Background()

	write := func() ids.Block {
		w, err := b.client.NewBlock(ctx, chunk.BlockSpec{NextID: b.nextID, Layout: ids.RS(4, 2), Ino: 5})
		require.NoError(t, err)
		var released sync.WaitGroup
		n := w.Layout().StripeData()
		for off := 0; off < len(data); off += n {
			released.Add(1)
			require.NoError(t, w.Append(ctx, data[off:min(off+n, len(data))], func(ok bool) {
				defer released.Done()
				if !ok {
					t.Error("a stripe was refused")
				}
			}))
		}
		blk, err := w.Seal(ctx)
		require.NoError(t, err)
		released.Wait()
		w.Committed()
		require.Equal(t, len(data), int(blk.Length))
		return blk
	}
	read := func(blk ids.Block) {
		got := make([]byte, len(data))
		require.NoError(t, b.client.ReadBlock(ctx, &blk, 0, got))
		require.True(t, bytes.Equal(data, got))
		part := make([]byte, 12345)
		require.NoError(t, b.client.ReadBlock(ctx, &blk, 4_000_001, part))
		require.True(t, bytes.Equal(data[4_000_001:4_000_001+len(part)], part))
	}

	first := write()
	read(first)
	small, w, err := b.client.WriteBlock(ctx, chunk.BlockSpec{NextID: b.nextID, Layout: ids.RS(4, 2)}, data[:5000])
	require.NoError(t, err)
	w.Committed()

	require.NoError(t, b.shells[2].Close(time.Second))
	read(first)
	got := make([]byte, 5000)
	require.NoError(t, b.client.ReadBlock(ctx, &small, 0, got))
	require.True(t, bytes.Equal(data[:5000], got))
	second := write()
	require.Equal(t, uint8(2), second.Layout.M)
	read(second)
}

// newStore makes an empty store in memory.
func newStore(t testing.TB, i int) chunk.Store {
	mem := vfs.NewMem()
	mem.SetCapacity(8 << 30)
	require.NoError(t, store.Format(mem, store.Identity{Cluster: testCluster, Disk: ids.UUID{byte(i + 1)}}))
	st, err := store.Open(store.Config{FS: mem, Sched: new(sched.Real), Log: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = st.Close() })
	return st
}

// BenchmarkLoopback writes and reads blocks of 64 MiB through six servers in
// this process; the processor time covers both ends and the stores in memory.
func BenchmarkLoopback(b *testing.B) {
	bed := newBed(b)
	l, ctx := ids.RS(4, 2), context.Background()
	data := bytes.Repeat([]byte("0123456789abcde\n"), l.MaxBlockData()/16)
	write := func() ids.Block {
		w, err := bed.client.NewBlock(ctx, chunk.BlockSpec{NextID: bed.nextID, Layout: l, Ino: 5})
		require.NoError(b, err)
		for off := 0; off < len(data); off += w.Layout().StripeData() {
			require.NoError(b, w.Append(ctx, data[off:off+w.Layout().StripeData()], func(bool) {}))
		}
		blk, err := w.Seal(ctx)
		require.NoError(b, err)
		w.Committed()
		return blk
	}
	b.Run("write", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			write()
		}
	})
	b.Run("read", func(b *testing.B) {
		blk, got := write(), make([]byte, len(data))
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			require.NoError(b, bed.client.ReadBlock(ctx, &blk, 0, got))
		}
	})
}
