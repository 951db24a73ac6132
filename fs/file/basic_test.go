package file_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

var ctx = context.Background()

// pair is two engines on one metadata service and one set of servers.
type pair struct {
	sc     *sched.Real
	v      *service
	blocks *memBlocks
	a, b   *rig
}

func newPair(t *testing.T, budget int64) *pair {
	p := &pair{sc: &sched.Real{}}
	p.v = newService(t, p.sc)
	p.blocks = newBlocks(p.sc)
	p.a = newEngine(newSession(t, p.v, 1), p.blocks, p.sc, budget)
	p.b = newEngine(newSession(t, p.v, 2), p.blocks, p.sc, budget)
	t.Cleanup(func() {
		require.NoError(t, p.a.Close(ctx))
		require.NoError(t, p.b.Close(ctx))
		p.sc.Wait()
		require.Empty(t, p.blocks.violations())
		require.Zero(t, p.blocks.openWriters(), "every block writer is ended once")
		_, _, used := p.a.WriteMemory()
		require.Zero(t, used, "all buffers are back")
		require.Zero(t, p.a.OutstandingIDs())
	})
	return p
}

func random(seed uint64, n int) []byte {
	p := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = r.Read(p)
	return p
}

func write(t *testing.T, h *file.Handle, p []byte, off int64) {
	t.Helper()
	n, err := h.WriteAt(ctx, p, off, file.WriteFlags{})
	require.NoError(t, err)
	require.Equal(t, len(p), n)
}

func (p *pair) expect(t *testing.T, attr api.Attr, want []byte) {
	t.Helper()
	h, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	defer h.Release()
	require.Equal(t, uint64(len(want)), h.Attr().Size)
	got, err := readAll(h, len(want))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "content differs at %d", differ(want, got))
}

func differ(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func TestSizesFromInlineToSeveralBlocks(t *testing.T) {
	p := newPair(t, 64<<20)
	for _, size := range []int{0, 1, 4096, 4097, 100_000, 128 << 10, 256 << 10, 300_000, 5 << 20, 70 << 20} {
		attr := p.a.s.create(t, time.Duration(size).String())
		h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
		want := random(uint64(size), size)
		for off := 0; off < size; off += 1 << 20 {
			write(t, h, want[off:min(size, off+1<<20)], int64(off))
		}
		require.NoError(t, h.Flush(ctx))
		require.Equal(t, uint64(size), h.Attr().Size)
		p.expect(t, attr, want)
		h.Release()
	}
}

func TestSmallFileCostsOneCommitAndNoBlock(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "small")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 4096), 0)
	require.NoError(t, h.Flush(ctx))
	require.NoError(t, h.Flush(ctx))
	require.Equal(t, 1, p.a.s.commits())
	require.Zero(t, p.blocks.mu.written)
	h.Release()
	p.expect(t, attr, random(1, 4096))
}

func TestErrorsReachEveryHandleOnce(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "bad")
	h1 := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	h2, err := p.a.Open(ctx, attr.Ino, file.OpenFlags{Write: true})
	require.NoError(t, err)
	p.a.s.before = func(r api.Request) error {
		if r.Kind() == api.KindCommit {
			return errkind.Quota.Wrap("full")
		}
		return nil
	}
	write(t, h1, random(1, 300_000), 0)
	require.ErrorIs(t, h1.Flush(ctx), errkind.Quota)
	require.NoError(t, h1.Flush(ctx))
	_, err = h2.WriteAt(ctx, []byte("x"), 0, file.WriteFlags{})
	require.ErrorIs(t, err, errkind.Quota)
	require.NoError(t, h2.Sync(ctx))
	require.Zero(t, h2.Attr().Size, "dropped bytes are not shown")
	p.a.s.before = nil
	write(t, h2, []byte("again"), 0)
	require.NoError(t, h2.Flush(ctx))
	h1.Release()
	h2.Release()
	p.expect(t, attr, []byte("again"))
}

func TestErrorAfterTheLastCloseMeetsTheNextOpen(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "bad")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	p.a.s.before = func(r api.Request) error {
		if r.Kind() == api.KindCommit {
			return errkind.NoSpace.Wrap("full")
		}
		return nil
	}
	write(t, h, []byte("mapped"), 0)
	h.Release()
	require.Eventually(t, func() bool { return p.a.Inodes() == 0 }, 10*time.Second, time.Millisecond)
	h, err := p.a.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	require.ErrorIs(t, h.Sync(ctx), errkind.NoSpace)
	h.Release()
}

func TestAppendersOfTwoMountsLoseNothing(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "log")
	ha := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	hb, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{Write: true})
	require.NoError(t, err)
	done := make(chan error, 2)
	record := func(who byte, i int) []byte {
		return bytes.Repeat([]byte{who, byte(i)}, 500+i*37)
	}
	run := func(h *file.Handle, who byte) {
		for i := range 60 {
			if _, err := h.WriteAt(ctx, record(who, i), 0, file.WriteFlags{Append: true}); err != nil {
				done <- err
				return
			}
			if i%7 == 0 {
				if err := h.Sync(ctx); err != nil {
					done <- err
					return
				}
			}
		}
		done <- h.Flush(ctx)
	}
	p.sc.Go("a", func() { run(ha, 'a') })
	p.sc.Go("b", func() { run(hb, 'b') })
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	ha.Release()
	hb.Release()
	h, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	got, err := readAll(h, int(h.Attr().Size))
	require.NoError(t, err)
	h.Release()
	next := map[byte]int{}
	for len(got) > 0 {
		who := got[0]
		want := record(who, next[who])
		require.GreaterOrEqual(t, len(got), len(want))
		require.True(t, bytes.Equal(want, got[:len(want)]), "record %d of %c", next[who], who)
		next[who]++
		got = got[len(want):]
	}
	require.Equal(t, map[byte]int{'a': 60, 'b': 60}, next)
}
