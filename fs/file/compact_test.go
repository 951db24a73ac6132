package file_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/meta/api"
)

// blocksOf sums up what a file refers to: bytes of extents, and of blocks.
func blocksOf(t require.TestingT, s *session, ino ids.Ino) (live, held uint64, extents int) {
	seen := map[ids.BlockID]bool{}
	for at := uint64(0); at < api.MaxFileSize; {
		var m api.Mapped
		require.NoError(t, s.Do(ctx, &api.GetMap{Ino: ino, Off: at, End: api.MaxFileSize, Max: 4096}, &m))
		for _, x := range m.Map.Extents {
			live += x.Len
		}
		for _, b := range m.Map.Blocks {
			if !seen[b.ID] {
				held += uint64(b.Logical)
			}
			seen[b.ID] = true
		}
		extents += len(m.Map.Extents)
		at = m.Map.End
	}
	return live, held, extents
}

const (
	pageBytes  = 4096
	largeBytes = 256 << 20
)

// pages is a large sparse file whose pages are rewritten at random.
type pages struct {
	rng  *rand.Rand
	spot []int // the pages that are ever written
	sum  map[int]uint64
	seed uint64
}

func newPages(seed uint64, count int) *pages {
	p := &pages{rng: rand.New(rand.NewPCG(seed, 5)), sum: map[int]uint64{}}
	p.spot = p.rng.Perm(largeBytes / pageBytes)[:count]
	return p
}

// rewrite writes pages and syncs after each 64.
func (p *pages) rewrite(h *file.Handle, flushes int) error {
	for range flushes {
		for range 64 {
			at := p.spot[p.rng.IntN(len(p.spot))]
			p.seed++
			p.sum[at] = p.seed
			if _, err := h.WriteAt(ctx, random(p.seed, pageBytes), int64(at)*pageBytes, file.WriteFlags{}); err != nil {
				return err
			}
		}
		if err := h.Sync(ctx); err != nil {
			return err
		}
	}
	return nil
}

// check reads every page back through another engine.
func (p *pages) check(t *testing.T, r *rig, ino ids.Ino) {
	t.Helper()
	h, err := r.Open(ctx, ino, file.OpenFlags{})
	require.NoError(t, err)
	defer h.Release()
	got := make([]byte, pageBytes)
	for at, seed := range p.sum {
		_, err := h.ReadAt(ctx, got, int64(at)*pageBytes)
		require.NoError(t, err)
		require.Equal(t, random(seed, pageBytes), got, "page %d", at)
	}
}

// TestRandomRewritesKeepTwiceTheLiveBytes rewrites a sparse file of 256 MiB
// with a commit after each 64 pages, and counts what its blocks hold.
func TestRandomRewritesKeepTwiceTheLiveBytes(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "db")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	_, err := p.a.Truncate(ctx, attr.Ino, largeBytes)
	require.NoError(t, err)
	pg := newPages(1, 4000)
	bound := func() {
		require.Eventually(t, func() bool { return !p.a.Compacting() }, time.Minute, time.Millisecond)
		live, held, extents := blocksOf(t, p.a.s, attr.Ino)
		t.Logf("%d bytes are live, blocks hold %d, %d extents, %d bytes written", live, held, extents, p.blocks.mu.written)
		require.LessOrEqual(t, held, 2*live+2<<20)
	}
	for range 8 {
		require.NoError(t, pg.rewrite(h, 40))
		bound()
	}
	wrote := 8 * 40 * 64 * pageBytes
	require.Less(t, p.blocks.mu.written, int64(3*wrote), "copies cost less than twice what is written")
	h.Release()
	pg.check(t, p.b, attr.Ino)
}

// TestCompactionUnderWrites runs two writers on one file in the simulation,
// one of them on another mount, so that compaction meets commits at any moment.
func TestCompactionUnderWrites(t *testing.T) {
	for seed := range uint64(6) {
		world := sim.NewWorld(seed)
		v := newService(t, world)
		blocks := newBlocks(world)
		blocks.faults = faults{spill: 10, maxDelay: 3 * time.Millisecond}
		a := newEngine(newSession(t, v, 1), blocks, world, 16<<20)
		b := newEngine(newSession(t, v, 2), blocks, world, 16<<20)
		attr := a.s.create(t, "db")
		pg := newPages(seed, 900)
		var err error
		done := false
		world.Go("test", func() {
			err = rewriteByTurns(pg, a, b, attr, seed%2 == 0)
			done = true
		})
		require.NoError(t, world.Run(time.Hour, func() bool { return done }))
		require.NoError(t, err)
		checked := false
		world.Go("check", func() {
			pg.check(t, b, attr.Ino)
			checked = true
		})
		require.NoError(t, world.Run(time.Hour, func() bool { return checked && !a.Compacting() && !b.Compacting() }))
		live, held, _ := blocksOf(t, a.s, attr.Ino)
		t.Logf("seed %d: %d bytes are live, blocks hold %d", seed, live, held)
		if seed%2 == 0 {
			require.LessOrEqual(t, held, 2*live+2<<20)
		}
		require.Empty(t, blocks.violations())
		closed := false
		world.Go("close", func() {
			err = a.Close(ctx)
			_ = b.Close(ctx) // it has written nothing since its flush
			closed = true
		})
		require.NoError(t, world.Run(time.Hour, func() bool { return closed }))
		require.NoError(t, err)
		world.Close()
	}
}

// rewriteByTurns lets the first mount write, the second one now and then, too.
func rewriteByTurns(pg *pages, a, b *rig, attr api.Attr, alone bool) error {
	h := a.OpenCreated(attr, file.OpenFlags{Write: true})
	defer h.Release()
	for i := range 120 {
		if err := pg.rewrite(h, 1); err != nil {
			return err
		}
		if alone || i%10 != 0 {
			continue
		}
		other, err := b.Open(ctx, attr.Ino, file.OpenFlags{Write: true})
		if err != nil {
			return err
		}
		err = pg.rewrite(other, 1)
		other.Release()
		if err != nil {
			return err
		}
	}
	return nil
}
