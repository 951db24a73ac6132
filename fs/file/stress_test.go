package file_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

func TestManyWritersStayWithinTheBudget(t *testing.T) {
	p := newPair(t, 8<<20)
	p.blocks.faults.maxDelay = time.Millisecond
	const writers, size = 64, 700_000
	done := make(chan error, writers)
	attrs := make([]api.Attr, writers)
	for i := range writers {
		attrs[i] = p.a.s.create(t, fmt.Sprint("w", i))
		p.sc.Go("writer", func() {
			h := p.a.OpenCreated(attrs[i], file.OpenFlags{Write: true})
			defer h.Release()
			data := random(uint64(i), size)
			for off := 0; off < size; off += 90_000 {
				if _, err := h.WriteAt(ctx, data[off:min(size, off+90_000)], int64(off), file.WriteFlags{}); err != nil {
					done <- err
					return
				}
			}
			done <- h.Flush(ctx)
		})
	}
	for range writers {
		require.NoError(t, <-done)
	}
	peak, limit, _ := p.a.WriteMemory()
	require.LessOrEqual(t, peak, limit)
	for i := range writers {
		p.expect(t, attrs[i], random(uint64(i), size))
	}
}

func TestParallelWritersAndReadersOfOneFile(t *testing.T) {
	p := newPair(t, 8<<20)
	p.blocks.faults = faults{refuse: 10, deny: 5, narrow: 30, maxDelay: time.Millisecond}
	attr := p.a.s.create(t, "shared")
	const parts, part = 8, 1 << 20
	done := make(chan error, 2*parts)
	want := random(9, parts*part)
	for i := range parts {
		h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
		p.sc.Go("writer", func() {
			defer h.Release()
			for off := i * part; off < (i+1)*part; off += 128 << 10 {
				if _, err := h.WriteAt(ctx, want[off:off+128<<10], int64(off), file.WriteFlags{}); err != nil {
					done <- err
					return
				}
				// One's own bytes are there at once, wherever they are by now.
				got := make([]byte, 128<<10)
				n, err := h.ReadAt(ctx, got, int64(off))
				if err == nil && !bytes.Equal(got[:n], want[off:off+128<<10]) {
					err = errors.New("reads something else than was written")
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- h.Sync(ctx)
		})
	}
	for range parts {
		require.NoError(t, <-done)
	}
	p.expect(t, attr, want)
}

func TestChangesElsewhereAreSeenAtOpenAndAfterStat(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	ha := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, ha, random(1, 300_000), 0)
	require.NoError(t, ha.Flush(ctx))

	hb, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	require.False(t, hb.KeepCache(), "never seen before")
	hb.Release()
	hb, err = p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	require.True(t, hb.KeepCache(), "unchanged since the last close")

	write(t, ha, random(2, 500_000), 0)
	require.NoError(t, ha.Flush(ctx))
	var e api.Entry
	require.NoError(t, p.b.s.Do(ctx, &api.GetAttr{Ino: attr.Ino}, &e))
	p.b.Overlay(&e.Attr)
	got, err := readAll(hb, 500_000)
	require.NoError(t, err)
	require.True(t, bytes.Equal(random(2, 500_000), got), "the open handle sees what stat has shown")
	hb.Release()
	hb, err = p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	require.False(t, hb.KeepCache(), "the kernel may hold pages of both versions")
	hb.Release()
	ha.Release()
	ha, err = p.a.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	require.True(t, ha.KeepCache(), "its own writes are in its own kernel's pages")
	ha.Release()
}

func TestOverlayShowsWhatIsUncommitted(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	_, err := h.WriteAt(ctx, random(1, 10_000), 0, file.WriteFlags{KillPriv: true})
	require.NoError(t, err)
	a := attr
	p.a.Overlay(&a)
	require.Equal(t, uint64(10_000), a.Size)
	require.Equal(t, uint64(10_000), a.Stored)
	require.Greater(t, a.Mtime, attr.Mtime)
	require.Zero(t, a.Mode&api.ModeSetuid)
	require.Equal(t, []ids.Ino{attr.Ino}, p.a.DirtyInos())
	require.Equal(t, []ids.Ino{attr.Ino}, p.a.OpenInos())
	require.NoError(t, p.a.FlushIno(ctx, attr.Ino))
	require.Empty(t, p.a.DirtyInos())
	require.Zero(t, h.Attr().Mode&api.ModeSetuid)
	h.Release()
}

func TestTruncateWithoutAHandle(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 300_000), 0)
	require.NoError(t, h.Flush(ctx))
	h.Release()
	a, err := p.b.Truncate(ctx, attr.Ino, 1000)
	require.NoError(t, err)
	require.Equal(t, uint64(1000), a.Size)
	_, err = p.b.Truncate(ctx, attr.Ino, 2000)
	require.NoError(t, err)
	p.expect(t, attr, append(random(1, 300_000)[:1000], make([]byte, 1000)...))
	require.Zero(t, p.b.Inodes())
}

func TestReadsFollowAMovedBlockAndReportALostOne(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 300_000), 0)
	require.NoError(t, h.Flush(ctx))
	hb, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	write(t, h, random(2, 300_000), 0)
	require.NoError(t, h.Flush(ctx))
	var old ids.BlockID
	p.blocks.faults.read = func(id ids.BlockID) error {
		if old.IsZero() {
			old = id
		}
		if id == old {
			return errkind.NoChunk.Wrap("block %s", id)
		}
		return nil
	}
	got, err := readAll(hb, 300_000)
	require.NoError(t, err)
	require.True(t, bytes.Equal(random(2, 300_000), got))
	p.blocks.faults.read = func(id ids.BlockID) error { return errkind.NoChunk.Wrap("block %s", id) }
	_, err = hb.ReadAt(ctx, make([]byte, 10), 250_000)
	require.NoError(t, err, "what is cached need not be fetched")
	hc, err := p.a.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	_, err = hc.ReadAt(ctx, make([]byte, 10), 250_000)
	require.ErrorIs(t, err, errkind.NoChunk)
	p.blocks.faults.read = nil
	h.Release()
	hb.Release()
	hc.Release()
}

func TestIdenticalReadsAreFetchedOnce(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	const size = 8 << 20
	for off := 0; off < size; off += 1 << 20 {
		write(t, h, random(uint64(off>>20), 1<<20), int64(off))
	}
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.blocks.faults.maxDelay = time.Millisecond
	done := make(chan error, 8)
	for range 8 {
		p.sc.Go("reader", func() {
			h, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
			if err == nil {
				_, err = readAll(h, size)
				h.Release()
			}
			done <- err
		})
	}
	for range 8 {
		require.NoError(t, <-done)
	}
	p.blocks.mu.Lock()
	defer p.blocks.mu.Unlock()
	require.LessOrEqual(t, p.blocks.mu.reads, size/(1<<20), "one read a piece for all of them")
}

func TestRandomRewritesAreCompacted(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "db")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	want := random(1, 4<<20)
	for off := 0; off < len(want); off += 1 << 20 {
		write(t, h, want[off:off+1<<20], int64(off))
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 12 {
		for range 300 {
			off := r.IntN(1024) * 4096
			p := random(r.Uint64(), 4096)
			write(t, h, p, int64(off))
			copy(want[off:], p)
		}
		require.NoError(t, h.Flush(ctx))
	}
	live := func() (held int64, extents int) {
		var m api.Mapped
		require.NoError(t, p.b.s.Do(ctx, &api.GetMap{Ino: attr.Ino, End: api.MaxFileSize, Max: 4096}, &m))
		for _, b := range m.Map.Blocks {
			held += int64(b.Logical)
		}
		return held, len(m.Map.Extents)
	}
	require.Eventually(t, func() bool {
		held, extents := live()
		return held <= 2*int64(len(want))+(1<<20) && extents <= 1024
	}, 20*time.Second, 10*time.Millisecond)
	p.expect(t, attr, want)
	h.Release()
}

func TestAnInterruptedFlushGoesOn(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 300_000), 0)
	gate := make(chan struct{})
	p.a.s.before = func(r api.Request) error {
		if r.Kind() == api.KindCommit {
			<-gate
		}
		return nil
	}
	short, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, h.Flush(short), errkind.Interrupted)
	n, err := h.WriteAt(short, []byte("x"), 0, file.WriteFlags{})
	require.ErrorIs(t, err, errkind.Interrupted)
	require.Zero(t, n, "a write takes all of its bytes or none")
	close(gate)
	h.Release()
	require.Eventually(t, func() bool { return p.a.Inodes() == 0 }, 10*time.Second, time.Millisecond)
	p.expect(t, attr, random(1, 300_000))
}

func TestBytesThatCannotBeStoredAreGivenUpInTime(t *testing.T) {
	sc := &sched.Real{}
	v := newService(t, sc)
	blocks := newBlocks(sc)
	blocks.faults.deny = 100
	s := newSession(t, v, 1)
	lost := make(chan error, 4)
	e := newEngineWith(s, blocks, file.Config{
		Sched: sc, Budget: 8 << 20, OpTimeout: 300 * time.Millisecond,
		Invalidate: func(_ ids.Ino, _ uint64, err error) { lost <- err },
	})
	h := e.OpenCreated(s.create(t, "f"), file.OpenFlags{Write: true})
	write(t, h, random(1, 1<<20), 0)
	require.ErrorIs(t, h.Flush(ctx), errkind.Unavailable)
	require.ErrorIs(t, <-lost, errkind.Unavailable)
	h.Release()
	require.NoError(t, e.Close(ctx))
	sc.Wait()
	_, _, used := e.WriteMemory()
	require.Zero(t, used)
	require.Empty(t, blocks.violations())
	require.Zero(t, blocks.openWriters())
}

// TestAnUnansweredCommitKeepsItsBlocks: nobody knows whether it happened, so
// the blocks must survive, and their ids must hold the session's floor down.
func TestAnUnansweredCommitKeepsItsBlocks(t *testing.T) {
	sc := &sched.Real{}
	v := newService(t, sc)
	blocks := newBlocks(sc)
	s := newSession(t, v, 1)
	e := newEngine(s, blocks, sc, 8<<20)
	attr := s.create(t, "f")
	h := e.OpenCreated(attr, file.OpenFlags{Write: true})
	s.after = func(r api.Request) error {
		if r.Kind() == api.KindCommit {
			return errkind.Timeout.Wrap("no answer")
		}
		return nil
	}
	write(t, h, random(1, 300_000), 0)
	require.ErrorIs(t, h.Flush(ctx), errkind.Timeout)
	s.after = nil
	require.Equal(t, uint64(1), e.Floor())
	h2, err := e.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	got, err := readAll(h2, 300_000)
	require.NoError(t, err)
	require.True(t, bytes.Equal(random(1, 300_000), got), "it had happened")
	h.Release()
	h2.Release()
	require.NoError(t, e.Close(ctx))
	require.False(t, v.registered(s.id, attr.Ino))
	sc.Wait()
	require.Empty(t, blocks.violations())
	require.Zero(t, blocks.openWriters())
}

func TestASealThatFailsFailsTheFlush(t *testing.T) {
	p := newPair(t, 8<<20)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	p.blocks.faults.seal = func(ids.BlockID) error { return errkind.Corrupt.Wrap("too few chunks") }
	write(t, h, random(1, 1<<20), 0)
	require.ErrorIs(t, h.Flush(ctx), errkind.Corrupt)
	p.blocks.faults.seal = nil
	write(t, h, random(2, 1<<20), 0)
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.expect(t, attr, random(2, 1<<20))
}
