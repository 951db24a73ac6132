package client

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func small64(l ids.Layout) ids.Layout {
	l.CellLog = ids.MinCellLog
	return l
}

func TestSaveAndLoad(t *testing.T) {
	for _, l := range []ids.Layout{ids.RS(4, 2), ids.RS(2, 1), ids.Copies(3), ids.Copies(1), ids.RS(3, 2)} {
		t.Run(l.String(), func(t *testing.T) {
			f := newNet(1, 7)
			x := &file{f: f, spec: f.spec(small64(l)), data: random(f, 2_345_678)}
			require.NoError(t, f.run(t, func() error {
				return errors.Join(x.save(), x.check(100_000), x.check(len(x.data)), x.quorums())
			}))
			require.Len(t, x.parts, 1)
			require.NotContains(t, x.parts[0].block.Disks, ids.DiskID(0))
		})
	}
}

// TestFaults is the promise of the whole package: whatever up to M servers do,
// bytes that were saved read back equal, or saving said that it failed.
func TestFaults(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := small64(rapid.SampledFrom([]ids.Layout{ids.RS(4, 2), ids.RS(2, 2), ids.RS(3, 1), ids.Copies(3)}).Draw(t, "layout"))
		// Enough hosts that M+1 domains are left when M servers fail.
		f := newNet(rapid.Uint64().Draw(t, "seed"), max(l.Width(), 2*int(l.M)+1)+rapid.IntRange(0, 3).Draw(t, "spares"))
		for _, s := range f.list {
			s.credit = rapid.SampledFrom([]int{0, 64 << 10, 200 << 10}).Draw(t, "credit")
		}
		bad := rapid.Permutation(f.list).Draw(t, "order")[:rapid.IntRange(0, int(l.M)).Draw(t, "faults")]
		for _, s := range bad {
			fault := drawFault(t)
			f.w.AfterFunc(time.Duration(rapid.IntRange(0, 40).Draw(t, "at"))*time.Millisecond, func() { fault(f, s) })
		}
		x := &file{f: f, spec: f.spec(l), data: random(f, rapid.IntRange(1, 20*l.StripeData()).Draw(t, "length"))}
		step := rapid.IntRange(20_000, 2<<20).Draw(t, "step")
		err := f.run(t, func() error {
			if err := x.save(); err != nil {
				return fmt.Errorf("save: %w", err)
			}
			if err := errors.Join(x.quorums(), x.check(step)); err != nil {
				return err
			}
			f.settle(30 * time.Second)
			return x.check(step)
		})
		// Saving never fails here: M+1 domains are always there.
		require.NoError(t, err)
		require.Zero(t, f.c.late.usedBytes())
	})
}

// drawFault draws what happens to a server.
func drawFault(t *rapid.T) func(*fakeNet, *fakeServer) {
	switch rapid.IntRange(0, 8).Draw(t, "fault") {
	case 0:
		return func(_ *fakeNet, s *fakeServer) { s.refuse = true }
	case 1:
		return func(_ *fakeNet, s *fakeServer) { s.silent = true }
	case 2:
		lag := time.Duration(rapid.IntRange(1, 3000).Draw(t, "lag")) * time.Millisecond
		return func(_ *fakeNet, s *fakeServer) { s.lag = lag }
	case 3:
		return func(_ *fakeNet, s *fakeServer) { s.full = true }
	case 4:
		return func(_ *fakeNet, s *fakeServer) { s.busy = 50 }
	case 5:
		return func(_ *fakeNet, s *fakeServer) { s.garble = true }
	case 6:
		return func(_ *fakeNet, s *fakeServer) { s.forge = true }
	case 7:
		return func(_ *fakeNet, s *fakeServer) { s.crashAt = s.puts + 3 }
	}
	back := time.Duration(rapid.IntRange(1, 5000).Draw(t, "outage")) * time.Millisecond
	return func(f *fakeNet, s *fakeServer) {
		s.silent = true
		f.w.AfterFunc(back, func() { s.silent = false })
	}
}

func TestSmallBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := rapid.SampledFrom([]ids.Layout{ids.RS(4, 2), ids.RS(4, 1), ids.Copies(3)}).Draw(t, "layout")
		f := newNet(rapid.Uint64().Draw(t, "seed"), int(l.M)+1+rapid.IntRange(int(l.M), 4).Draw(t, "spares"))
		bad := rapid.Permutation(f.list).Draw(t, "order")[:rapid.IntRange(0, int(l.M)).Draw(t, "faults")]
		for _, s := range bad {
			drawFault(t)(f, s)
		}
		x := &file{f: f, data: random(f, rapid.IntRange(1, 128<<10).Draw(t, "length"))}
		require.NoError(t, f.run(t, func() error {
			b, w, err := f.c.WriteBlock(ctx, f.spec(l), x.data)
			if err != nil {
				return err
			}
			x.parts = []part{{0, b}}
			w.Committed()
			f.settle(30 * time.Second)
			return errors.Join(x.quorums(), x.check(5000))
		}))
		require.Zero(t, f.c.late.usedBytes())
	})
}

func TestNarrowsWhenDomainsAreMissing(t *testing.T) {
	for _, c := range []struct {
		down int
		want string
	}{{0, "rs-4-2"}, {1, "rs-3-2"}, {2, "rs-2-2"}, {3, "copies-3"}} {
		f := newNet(3, 6)
		for i := range c.down {
			f.list[i].silent = true
		}
		x := &file{f: f, spec: f.spec(ids.RS(4, 2)), data: random(f, 3<<20)}
		require.NoError(t, f.run(t, func() error { return errors.Join(x.save(), x.check(1<<20), x.quorums()) }))
		l := x.parts[0].block.Layout
		l.CellLog = ids.DefaultCellLog
		require.Equal(t, c.want, l.String())
	}
}

func TestTooFewDisksIsNoSpace(t *testing.T) {
	f := newNet(3, 6)
	for _, s := range f.list[2:] {
		s.full = true
	}
	err := f.run(t, func() error {
		_, err := f.c.NewBlock(ctx, f.spec(ids.RS(4, 2)))
		return err
	})
	require.ErrorIs(t, err, errkind.NoSpace)
	require.ErrorContains(t, err, "2 hosts give space, 3 are needed at least")
}

func TestBusyNeverNarrows(t *testing.T) {
	f := newNet(3, 6)
	for _, s := range f.list {
		s.busy = 20
	}
	x := &file{f: f, spec: f.spec(ids.RS(4, 2)), data: random(f, 3<<20)}
	require.NoError(t, f.run(t, x.save))
	require.Equal(t, ids.RS(4, 2), x.parts[0].block.Layout)
}

func TestOneHostWithSixDisks(t *testing.T) {
	f := newNet(3, 6)
	f.m.DiskDomains = true
	for i := range f.m.Servers {
		f.m.Servers[i].Host = "one"
	}
	x := &file{f: f, spec: f.spec(ids.RS(4, 2)), data: random(f, 3<<20)}
	require.NoError(t, f.run(t, func() error { return errors.Join(x.save(), x.check(1<<20), x.quorums()) }))
	require.Equal(t, ids.RS(4, 2), x.parts[0].block.Layout)
}

// TestRewriteSpills loses two of six servers when most of a large block is
// written: what they hold goes into several narrower blocks.
func TestRewriteSpills(t *testing.T) {
	f := newNet(5, 6)
	x := &file{f: f, spec: f.spec(ids.RS(4, 2)), data: random(f, 60<<20)}
	f.list[0].crashAt, f.list[1].crashAt = 27, 27
	err := f.run(t, func() error {
		f.w.Go("crash", func() {
			for f.list[0].puts < 25 {
				f.w.Sleep(time.Millisecond)
			}
			f.list[0].refuse, f.list[1].refuse = true, true
		})
		return errors.Join(x.save(), x.check(8<<20), x.quorums())
	})
	require.NoError(t, err)
	require.Positive(t, x.spilt)
	for _, p := range x.parts {
		require.Equal(t, uint8(2), p.block.Layout.M)
	}
}

func TestLateChunkIsFinished(t *testing.T) {
	f := newNet(7, 8)
	x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 2<<20)}
	require.NoError(t, f.run(t, func() error {
		f.w.Go("stall", func() {
			for f.sent[wire.OpPut] < 12 {
				f.w.Sleep(100 * time.Microsecond)
			}
			for _, s := range f.list {
				if s.puts > 0 {
					s.silent = true // for good: the chunk must go elsewhere
					return
				}
			}
		})
		if err := x.save(); err != nil {
			return err
		}
		f.settle(60 * time.Second)
		return nil
	}))
	b := x.parts[0].block
	missing := 0
	for i, d := range b.Disks {
		if d == 0 {
			missing++
			key := ids.ChunkKey{Block: b.ID, Index: uint8(i)}
			disk := f.placed[key]
			require.NotZero(t, disk, "late chunk was not placed")
			require.NotContains(t, b.Disks, disk)
			require.Equal(t, b.Digests[i], f.list[disk-1].chunks[key].digest)
		}
	}
	require.Equal(t, 1, missing)
}

func TestDamageIsReportedAndRepaired(t *testing.T) {
	f := newNet(9, 6)
	x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 2<<20)}
	require.NoError(t, f.run(t, func() error {
		if err := x.save(); err != nil {
			return err
		}
		b := x.parts[0].block
		f.list[b.Disks[0]-1].garble = true
		f.list[b.Disks[1]-1].chunks = nil
		if err := x.check(300_000); err != nil {
			return err
		}
		f.settle(time.Second)
		if len(f.damaged) != 2 {
			return fmt.Errorf("reported %v", f.damaged)
		}
		f.list[b.Disks[2]-1].forge = true
		f.c.tables = newTables(1 << 20)
		err := x.check(300_000)
		if !errors.Is(err, errkind.Corrupt) {
			return fmt.Errorf("read of a block with 3 of 6 chunks left: %w", err)
		}
		return nil
	}))
}

// TestDamageIsOfARange spreads damage so that more than M chunks of the block
// have some, but no stripe more than M: nothing is lost, and every chunk can be
// rebuilt, its own undamaged parts included.
func TestDamageIsOfARange(t *testing.T) {
	f := newNet(11, 6)
	l := small64(ids.RS(4, 2))
	x := &file{f: f, spec: f.spec(l), data: random(f, 4*l.StripeData())}
	require.NoError(t, f.run(t, func() error {
		if err := x.save(); err != nil {
			return err
		}
		b := x.parts[0].block
		want := map[int][]byte{}
		damage := func(i int, rows ...int) {
			c := f.list[b.Disks[i]-1].chunks[ids.ChunkKey{Block: b.ID, Index: uint8(i)}]
			want[i] = slices.Clone(c.data)
			for _, row := range rows {
				c.data[row*l.CellSize()+100] ^= 1
			}
		}
		damage(1, 0, 1, 2, 3)
		damage(3, 0)
		damage(4, 2)
		if err := x.check(300_000); err != nil {
			return err
		}
		for _, i := range []int{1, 3, 4} {
			var got []byte
			err := f.c.RebuildChunk(ctx, &b, i, func(_ uint32, data []byte, _ []uint64) error {
				got = append(got, data...)
				return nil
			})
			if err != nil || string(got) != string(want[i]) {
				return fmt.Errorf("rebuild chunk %d: %w", i, err)
			}
		}
		damage(5, 2)
		if err := x.check(300_000); !errors.Is(err, errkind.Corrupt) {
			return fmt.Errorf("a stripe with 3 damaged cells: %w", err)
		}
		return nil
	}))
}

func TestRebuildChunk(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := small64(rapid.SampledFrom([]ids.Layout{ids.RS(4, 2), ids.RS(2, 1), ids.Copies(2)}).Draw(t, "layout"))
		f := newNet(rapid.Uint64().Draw(t, "seed"), l.Width())
		x := &file{f: f, spec: f.spec(l), data: random(f, rapid.IntRange(1, 5*l.StripeData()).Draw(t, "length"))}
		i := rapid.IntRange(0, l.Width()-1).Draw(t, "chunk")
		require.NoError(t, f.run(t, func() error {
			if err := x.save(); err != nil {
				return err
			}
			b := x.parts[0].block
			key := ids.ChunkKey{Block: b.ID, Index: uint8(i)}
			want := f.list[b.Disks[i]-1].chunks[key].data
			delete(f.list[b.Disks[i]-1].chunks, key)
			var got []byte
			err := f.c.RebuildChunk(ctx, &b, i, func(off uint32, data []byte, _ []uint64) error {
				if int(off) != len(got) {
					return fmt.Errorf("piece at %d behind %d bytes", off, len(got))
				}
				got = append(got, data...)
				return nil
			})
			if err != nil || string(got) != string(want) {
				return fmt.Errorf("rebuilt %d of %d bytes: %w", len(got), len(want), err)
			}
			b.Digests[i]++
			err = f.c.RebuildChunk(ctx, &b, i, func(uint32, []byte, []uint64) error { return nil })
			if !errors.Is(err, errkind.Corrupt) {
				return fmt.Errorf("wrong digest: %w", err)
			}
			return nil
		}))
	})
}
