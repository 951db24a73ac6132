package replica

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/kv/bolt"
)

// counted counts the syncs of files.
type counted struct {
	vfs.FS
	syncs atomic.Int64
}

func (c *counted) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return countedFile{f, c}, nil
}

func (c *counted) Create(name string) (vfs.File, error) { return c.wrap(c.FS.Create(name)) }
func (c *counted) Open(name string) (vfs.File, error)   { return c.wrap(c.FS.Open(name)) }

type countedFile struct {
	vfs.File
	c *counted
}

func (f countedFile) Sync() error {
	f.c.syncs.Add(1)
	return f.File.Sync()
}

// small writes two records of 24 + 200 bytes a command, as a create does.
type small struct{}

func (s *small) Apply(t kv.Txn, index uint64, cmd []byte) ([]byte, error) {
	for _, prefix := range []string{"a", "b"} {
		key := fmt.Appendf(nil, "%s%023d", prefix, index*0x9e3779b97f4a7c15%1_000_000_007)
		if _, err := t.Get(key); err != nil {
			return nil, err
		}
		t.Set(key, cmd)
	}
	return cmd[:8], nil
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPropose measures one voter on a real disk: run it with TMPDIR on
// the disk in question.
func BenchmarkPropose(b *testing.B) {
	for _, clients := range []int{1, 8, 1000} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) { benchPropose(b, clients) })
	}
}

func benchPropose(b *testing.B, clients int) {
	dir := b.TempDir()
	osfs, err := vfs.NewOS(dir)
	require.NoError(b, err)
	fs := &counted{FS: osfs}
	store, err := bolt.Open(filepath.Join(dir, "meta.db"))
	require.NoError(b, err)
	leads := make(chan struct{}, 1)
	r, err := Open(Config{
		ID: 1, FS: fs, Store: store, Machine: &small{}, Sched: &sched.Real{}, Fatal: func(err error) { b.Error(err) },
		OnLeader: func(on bool, _ uint64) {
			if on {
				leads <- struct{}{}
			}
		},
	})
	require.NoError(b, err)
	<-leads
	cmd := make([]byte, 200)
	var next atomic.Int64
	var wg sync.WaitGroup
	syncs, used := fs.syncs.Load(), cpu()
	b.ResetTimer()
	for range clients {
		wg.Go(func() {
			got := make(chan error, 1)
			for next.Add(1) <= int64(b.N) {
				r.Propose(cmd, func(_ []byte, err error) { got <- err })
				if err := <-got; err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	n := float64(b.N)
	b.ReportMetric(n/b.Elapsed().Seconds(), "proposals/s")
	b.ReportMetric(float64(fs.syncs.Load()-syncs)/n, "syncs/proposal")
	b.ReportMetric(float64((cpu()-used).Nanoseconds())/n, "cpu-ns/proposal")
	require.NoError(b, r.Close(context.Background()))
	require.NoError(b, store.Close())
}
