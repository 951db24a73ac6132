package file_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// instant takes every stripe at once and keeps nothing: what is left is the
// engine's own cost.
type instant struct{}

type instantWriter struct {
	id     ids.BlockID
	layout ids.Layout
	n      int
}

func (instant) NewBlock(_ context.Context, spec chunk.BlockSpec) (chunk.BlockWriter, error) {
	return &instantWriter{id: spec.NextID(), layout: spec.Layout}, nil
}

func (instant) WriteBlock(_ context.Context, spec chunk.BlockSpec, data []byte) (ids.Block, chunk.BlockWriter, error) {
	w := &instantWriter{id: spec.NextID(), layout: spec.Layout.Small(), n: len(data)}
	return w.block(), w, nil
}

func (instant) ReadBlock(_ context.Context, b *ids.Block, off int, dst []byte) error {
	dst[0], dst[len(dst)-1] = byte(off), byte(b.Length)
	return nil
}

func (w *instantWriter) Layout() ids.Layout { return w.layout }

func (w *instantWriter) Append(_ context.Context, data []byte, release func(bool)) error {
	w.n += len(data)
	release(true)
	return nil
}

func (w *instantWriter) Seal(context.Context) (ids.Block, error) { return w.block(), nil }
func (w *instantWriter) Committed()                              {}
func (w *instantWriter) Abandon()                                {}

func (w *instantWriter) block() ids.Block {
	b := ids.Block{
		ID: w.id, Layout: w.layout, Length: uint32(w.n), Logical: uint32(w.n), Granule: 16,
		Disks: make([]ids.DiskID, w.layout.Width()), Digests: make([]uint64, w.layout.Width()),
	}
	for i := range b.Disks {
		b.Disks[i] = ids.DiskID(i + 1)
	}
	return b
}

type bench struct {
	sc sched.Real
	s  *session
	e  *rig
}

func newBench(b *testing.B) *bench {
	x := &bench{}
	x.s = newSession(b, newService(b, &x.sc), 1)
	x.e = newEngine(x.s, instant{}, &x.sc, 256<<20)
	b.Cleanup(func() {
		require.NoError(b, x.e.Close(ctx))
		x.sc.Wait()
	})
	return x
}

const benchFile = 128 << 20

func BenchmarkSequentialWrite(b *testing.B) {
	x := newBench(b)
	buf := random(1, 1<<20)
	b.SetBytes(benchFile)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		h := x.e.OpenCreated(x.s.create(b, fmt.Sprint("f", i)), file.OpenFlags{Write: true})
		for off := int64(0); off < benchFile; off += int64(len(buf)) {
			if _, err := h.WriteAt(ctx, buf, off, file.WriteFlags{}); err != nil {
				b.Fatal(err)
			}
		}
		require.NoError(b, h.Flush(ctx))
		h.Release()
	}
}

func BenchmarkSequentialRead(b *testing.B) {
	x := newBench(b)
	attr := x.s.create(b, "f")
	h := x.e.OpenCreated(attr, file.OpenFlags{Write: true})
	buf := random(1, 1<<20)
	for off := int64(0); off < benchFile; off += int64(len(buf)) {
		_, err := h.WriteAt(ctx, buf, off, file.WriteFlags{})
		require.NoError(b, err)
	}
	require.NoError(b, h.Flush(ctx))
	h.Release()
	b.SetBytes(benchFile)
	b.ReportAllocs()
	for b.Loop() {
		h, err := x.e.Open(ctx, attr.Ino, file.OpenFlags{})
		require.NoError(b, err)
		for off := int64(0); off < benchFile; off += int64(len(buf)) {
			if _, err := h.ReadAt(ctx, buf, off); err != nil {
				b.Fatal(err)
			}
		}
		h.Release()
	}
}

// BenchmarkSmallFiles creates, writes 4 KiB and flushes, from 8 tasks; the
// state machine's own cost is in it.
func BenchmarkSmallFiles(b *testing.B) {
	x := newBench(b)
	buf := random(1, 4096)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		var wg sync.WaitGroup
		for k := range 8 {
			wg.Go(func() {
				h := x.e.OpenCreated(x.s.create(b, fmt.Sprint(k, "-", i)), file.OpenFlags{Write: true})
				if _, err := h.WriteAt(ctx, buf, 0, file.WriteFlags{}); err != nil {
					b.Error(err)
				}
				if err := h.Flush(ctx); err != nil {
					b.Error(err)
				}
				h.Release()
			})
		}
		wg.Wait()
	}
	b.ReportMetric(float64(8*i)/b.Elapsed().Seconds(), "files/s")
}
