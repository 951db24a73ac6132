package client

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/stretchr/testify/require"
)

func (f *fakeNet) chunks() int {
	n := 0
	for _, s := range f.list {
		n += len(s.chunks)
	}
	return n
}

func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	trace := func(seed uint64) (uint64, []part) {
		f := newNet(seed, 8)
		f.list[3].lag = 300 * time.Millisecond
		f.w.AfterFunc(3*time.Millisecond, func() { f.list[5].silent = true })
		x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 3<<20)}
		require.NoError(t, f.run(t, func() error { return errors.Join(x.save(), x.check(70_000)) }))
		return f.w.TraceHash(), x.parts
	}
	h1, p1 := trace(11)
	h2, p2 := trace(11)
	require.Equal(t, h1, h2)
	require.Equal(t, p1, p2)
	h3, _ := trace(12)
	require.NotEqual(t, h1, h3)
}

func TestEmptyBlockLeavesNothing(t *testing.T) {
	f := newNet(1, 7)
	require.NoError(t, f.run(t, func() error {
		w, err := f.c.NewBlock(ctx, f.spec(ids.RS(4, 2)))
		if err != nil {
			return err
		}
		b, err := w.Seal(ctx)
		if err != nil || b.Length != 0 {
			return fmt.Errorf("sealed %d bytes: %w", b.Length, err)
		}
		w.Committed()
		f.settle(time.Second)
		return nil
	}))
	require.Zero(t, f.chunks())
}

func TestAbandonReleasesAndForgets(t *testing.T) {
	f := newNet(1, 6)
	l := small64(ids.RS(4, 2))
	released := 0
	require.NoError(t, f.run(t, func() error {
		w, err := f.c.NewBlock(ctx, f.spec(l))
		if err != nil {
			return err
		}
		for _, s := range f.list {
			s.lag = time.Second
		}
		for range 3 {
			if err := w.Append(ctx, make([]byte, l.StripeData()), func(ok bool) {
				if !ok {
					released++
				}
			}); err != nil {
				return err
			}
		}
		w.Abandon()
		f.settle(10 * time.Second)
		err = w.Append(ctx, make([]byte, l.StripeData()), func(bool) { released++ })
		if !errors.Is(err, errkind.Invalid) {
			return fmt.Errorf("append to an abandoned block: %w", err)
		}
		f.settle(time.Second)
		return nil
	}))
	require.Equal(t, 4, released)
	require.Zero(t, f.chunks())
}

func TestFullLatePoolDropsTheOldest(t *testing.T) {
	f := newNet(2, 6)
	f.c.late.mu.budget = 200 << 10
	x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 8<<20)}
	require.NoError(t, f.run(t, func() error {
		f.w.AfterFunc(3*time.Millisecond, func() { f.list[0].lag = 3 * time.Second })
		if err := x.save(); err != nil {
			return err
		}
		f.settle(time.Minute)
		return errors.Join(x.quorums(), x.check(1<<20))
	}))
	require.Greater(t, len(x.parts), 1, "the block goes on in another one")
	require.Zero(t, f.c.late.usedBytes())
}

func TestShortCreditIsAskedForAgain(t *testing.T) {
	f := newNet(2, 6)
	for _, s := range f.list {
		s.grows = 24 << 10 // less than a cell
	}
	x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 1<<20)}
	require.NoError(t, f.run(t, func() error { return errors.Join(x.save(), x.check(1<<20)) }))
	require.Greater(t, f.sent[wire.OpOpen], 7)
}

func TestOutageOfAllServersIsWaitedOut(t *testing.T) {
	f := newNet(2, 6)
	for _, s := range f.list {
		s.silent = true
	}
	f.w.AfterFunc(3*time.Second, func() {
		for _, s := range f.list {
			s.silent = false
		}
	})
	x := &file{f: f, spec: f.spec(ids.RS(4, 2)), data: random(f, 1<<20)}
	require.NoError(t, f.run(t, func() error { return errors.Join(x.save(), x.check(1<<20)) }))
}

// TestSealSurvivesAPartition cuts the mount off from all servers between its
// last stripe and the seal.
func TestSealSurvivesAPartition(t *testing.T) {
	f := newNet(2, 6)
	l := small64(ids.RS(4, 2))
	x := &file{f: f, spec: f.spec(l), data: random(f, l.StripeData())}
	require.NoError(t, f.run(t, func() error {
		w, err := f.c.NewBlock(ctx, x.spec)
		if err != nil {
			return err
		}
		if err := w.Append(ctx, x.data, func(bool) {}); err != nil {
			return err
		}
		f.settle(time.Second)
		for _, s := range f.list {
			s.silent = true
			f.w.AfterFunc(15*time.Second, func() { s.silent = false })
		}
		b, err := w.Seal(ctx)
		x.parts = []part{{0, b}}
		return errors.Join(err, x.check(1<<20), x.quorums())
	}))
}

func TestPlacementSetsAreFollowed(t *testing.T) {
	f := newNet(4, 12)
	f.m.Sets = []cluster.PlacementSet{
		{Disks: []ids.DiskID{1, 3, 5, 7, 9, 11}, Weight: 1},
		{Disks: []ids.DiskID{2, 4, 6, 8, 10, 12}, Weight: 0},
	}
	f.list[1].lag = time.Millisecond
	require.NoError(t, f.run(t, func() error {
		p := f.c.place(f.m, 6, nil)
		for _, want := range f.m.Sets[0].Disks {
			if got, ok := p.next(); !ok || got.disk != want {
				return fmt.Errorf("disk %d instead of %d", got.disk, want)
			}
		}
		spare, ok := p.next()
		if !ok || spare.disk%2 == 1 {
			return fmt.Errorf("spare on disk %d", spare.disk)
		}
		return nil
	}))
}

func TestDisksAsDomainsSpreadOverHosts(t *testing.T) {
	f := newNet(4, 6)
	f.m.DiskDomains = true
	for i := range f.m.Servers {
		f.m.Servers[i].Host = []string{"a", "a", "a", "a", "b", "b"}[i]
	}
	require.NoError(t, f.run(t, func() error {
		p, n := f.c.place(f.m, 6, nil), map[string]int{}
		for {
			got, ok := p.next()
			if !ok {
				break
			}
			n[got.host]++
		}
		if n["a"] != 3 || n["b"] != 2 {
			return fmt.Errorf("chunks per host: %v", n)
		}
		return nil
	}))
}

// slowRead saves a block, makes the server of chunk 0 slow, and returns how
// long reading it takes on the simulated clock.
func slowRead(t *testing.T, tokens int64, slow func(*fakeServer)) (took time.Duration, puts int) {
	f := newNet(6, 6)
	x := &file{f: f, spec: f.spec(small64(ids.RS(4, 2))), data: random(f, 1<<20)}
	require.NoError(t, f.run(t, func() error {
		if err := x.save(); err != nil {
			return err
		}
		slow(f.list[x.parts[0].block.Disks[0]-1])
		f.c.hedges.tokens = tokens
		start := f.w.Now()
		err := x.check(len(x.data))
		took = f.w.Now() - start
		return err
	}))
	return took, f.sent[wire.OpRead]
}

func TestSlowServerIsHedgedWithinTheBudget(t *testing.T) {
	lag := func(s *fakeServer) { s.lag = 3 * time.Second }
	took, _ := slowRead(t, hedgeBurst, lag)
	require.Less(t, took, time.Second)
	silent, _ := slowRead(t, 0, func(s *fakeServer) { s.silent = true })
	require.Less(t, silent, time.Second, "a server that is out needs no budget")
}

// deaf never answers; it lets go of a request when it is cancelled.
type deaf struct{}

func (deaf) Send(_ string, _ *wire.Request, done func(*wire.Response, error)) func() {
	fired := make(chan struct{}, 1)
	return func() {
		select {
		case fired <- struct{}{}:
			go done(nil, errkind.Interrupted.Wrap("cancelled"))
		default:
		}
	}
}

func TestCancelEndsEveryWait(t *testing.T) {
	f := newNet(1, 6)
	c := New(Config{Transport: deaf{}, Map: func() *cluster.Map { return f.m }, Sched: new(sched.Real)})
	defer c.Close()
	cctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	b := ids.Block{
		ID: ids.MakeBlockID(0, 1, 1, 1), Layout: ids.RS(2, 1), Length: 100, Logical: 100, Granule: 12,
		Disks: []ids.DiskID{1, 2, 3}, Digests: make([]uint64, 3),
	}
	require.ErrorIs(t, c.ReadBlock(cctx, &b, 0, make([]byte, 100)), errkind.Interrupted)
	_, err := c.NewBlock(cctx, f.spec(ids.RS(4, 2)))
	require.ErrorIs(t, err, errkind.Interrupted)
	_, _, err = c.WriteBlock(cctx, f.spec(ids.RS(4, 2)), []byte("x"))
	require.ErrorIs(t, err, errkind.Interrupted)
}

func TestBadRecordsAreRefused(t *testing.T) {
	f := newNet(1, 6)
	require.NoError(t, f.run(t, func() error {
		b := ids.Block{Layout: ids.RS(2, 1), Length: 100, Granule: 12, Disks: make([]ids.DiskID, 3), Digests: make([]uint64, 3)}
		for _, c := range []struct {
			change func(*ids.Block)
			want   errkind.Kind
		}{
			{func(b *ids.Block) { b.Length = 10 }, errkind.Range},
			{func(b *ids.Block) { b.Codec = 9 }, errkind.Unsupported},
			{func(b *ids.Block) { b.Layout.K = 99 }, errkind.Unsupported},
			{func(b *ids.Block) { b.Disks = b.Disks[1:] }, errkind.Corrupt},
			{func(*ids.Block) {}, errkind.NoChunk},
		} {
			bad := cloneBlock(b)
			c.change(&bad)
			if err := f.c.ReadBlock(ctx, &bad, 0, make([]byte, 100)); !errors.Is(err, c.want) {
				return fmt.Errorf("want %w: %w", c.want, err)
			}
		}
		return nil
	}))
}

// A closed client pings nobody, so servers that are out stay out: a writer that
// is left must fail at once instead of looking again and again.
func TestWritersOfAClosedClientFail(t *testing.T) {
	for name, open := range map[string]func(f *fakeNet) error{
		"coded": func(f *fakeNet) error {
			_, err := f.c.NewBlock(ctx, f.spec(ids.RS(4, 2)))
			return err
		},
		"small": func(f *fakeNet) error {
			_, _, err := f.c.WriteBlock(ctx, f.spec(ids.RS(4, 2)), random(f, 1000))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newNet(1, 7)
			for _, s := range f.list {
				s.refuse = true
			}
			err := f.run(t, func() error {
				f.w.AfterFunc(time.Second, f.c.Close)
				return open(f)
			})
			require.ErrorIs(t, err, errkind.Unavailable)
		})
	}
}
