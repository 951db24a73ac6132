package replica

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
)

func TestOneMemberServesAtOnce(t *testing.T) {
	g := newGroup(t, 1, 1, nil)
	g.run(50*time.Millisecond, func() bool { return g.leader() != nil })
	g.run(time.Second, g.load("a", 100))
	require.Len(t, g.acked, 100)
	passed := false
	g.members[0].replica.Barrier(func(err error) { require.NoError(t, err); passed = true })
	g.run(time.Second, func() bool { return passed })
	g.settle()
	g.close()
	require.False(t, g.members[0].leading)
	require.ErrorIs(t, g.members[0].replica.View(func(kv.Reader) error { return nil }), nil)
	g.members[0].replica.Propose(nil, func(_ []byte, err error) { require.ErrorIs(t, err, errkind.Unavailable) })
}

// What one member acknowledged is there after the power went at any operation
// of its disk.
func TestOneMemberCrashes(t *testing.T) {
	for seed := range uint64(60) {
		g := newGroup(t, seed, 1, nil)
		m := g.members[0]
		for round := range 4 {
			g.run(time.Minute, func() bool { return g.leader() != nil })
			g.crashAt(m, g.rng.IntN(60)+1)
			done := g.load(fmt.Sprintf("%d.%d", seed, round), 60+g.rng.IntN(200))
			g.run(time.Hour, func() bool { return done() || m.replica == nil })
			g.crash(m)
			require.NoError(t, g.start(m))
		}
		g.settle()
		g.close()
		g.world.Close()
	}
}

// Three members under loss, delay, duplication, reordering, partitions and
// crashes: nothing that was acknowledged is lost, and all end up equal.
func TestThreeMembersUnderFaults(t *testing.T) {
	for seed := range uint64(12) {
		storm(t, seed)
	}
}

func storm(t *testing.T, seed uint64) uint64 {
	g := newGroup(t, seed, 3, nil)
	for round := range 6 {
		g.loss = g.rng.Float64() * 0.2
		done := g.load(fmt.Sprintf("%d.%d", seed, round), 100)
		for !done() {
			g.trouble()
			g.sleep(time.Duration(g.rng.IntN(int(3 * time.Second))))
			g.repair()
		}
	}
	g.settle()
	require.NotEmpty(t, g.acked)
	g.close()
	hash := g.world.TraceHash()
	g.world.Close()
	return hash
}

func (g *group) trouble() {
	m := g.members[g.rng.IntN(len(g.members))]
	switch g.rng.IntN(4) {
	case 0:
		g.crash(m)
	case 1:
		if m.replica != nil {
			g.crashAt(m, g.rng.IntN(100)+1)
		}
	case 2:
		for _, o := range g.members {
			g.cut[[2]uint64{m.id, o.id}], g.cut[[2]uint64{o.id, m.id}] = true, true
		}
	case 3:
		g.cut[[2]uint64{m.id, m.id%3 + 1}] = true
	}
}

func (g *group) repair() {
	if g.rng.IntN(2) == 0 {
		clear(g.cut)
	}
	for _, m := range g.members {
		if m.replica == nil && (g.up() < 2 || g.rng.IntN(2) == 0) {
			require.NoError(g.t, g.start(m))
		}
	}
}

func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	a, b := storm(t, 77), storm(t, 77)
	require.Equal(t, a, b)
	require.NotEqual(t, a, storm(t, 78))
}

func TestFollowerCatchesUpByACopy(t *testing.T) {
	for seed := range uint64(6) {
		g := newGroup(t, 100+seed, 3, nil)
		g.run(time.Minute, func() bool { return g.leader() != nil })
		g.run(time.Minute, g.load("a", 50))
		behind := g.followers()[0]
		g.crash(behind)
		pad := strings.Repeat("z", 3000)
		g.run(time.Hour, g.load("b"+pad, 200))
		first := func() uint64 { return g.leader().replica.Status().LogFirst }
		g.run(time.Minute, func() bool { return first() > 60 })
		if seed%2 == 1 {
			g.loss = 0.3 // the transfer breaks now and then
		}
		if seed%3 == 2 {
			behind.disk, behind.store = vfs.NewMem(), kv.NewMem() // a new disk
		}
		require.NoError(t, g.start(behind))
		if seed > 3 {
			g.sleep(time.Duration(g.rng.IntN(int(time.Second))))
			g.crashAt(behind, g.rng.IntN(20)+1)
			g.sleep(3 * time.Second)
		}
		g.settle()
		require.Greater(t, behind.replica.Status().LogFirst, uint64(2), "it was copied, not replayed")
		g.run(time.Minute, g.load("c", 20))
		g.settle()
		g.close()
		g.world.Close()
	}
}

// The power goes when the copy is in the store's place and the log does not
// say so yet.
func TestInstallIsFinishedAfterACrash(t *testing.T) {
	g := newGroup(t, 200, 3, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	behind := g.followers()[0]
	g.crash(behind)
	g.run(time.Hour, g.load("b"+strings.Repeat("z", 3000), 200))
	g.run(time.Minute, func() bool { return g.leader().replica.Status().LogFirst > 60 })
	require.NoError(t, g.start(behind))
	r, between := behind.replica, false
	behind.disk.SetHook(func(vfs.Call) error {
		intent := r.storage.Intent()
		if intent == nil {
			return nil
		}
		_ = behind.store.View(func(v kv.Reader) error {
			st, err := readState(v)
			between = err == nil && st.index == intent.Index
			return err
		})
		if between {
			g.down(behind, r)
			return errPowerCut
		}
		return nil
	})
	g.run(time.Minute, func() bool { return behind.replica == nil })
	require.True(t, between)
	g.settle()
	g.close()
}

func TestHungDiskCostsLeadership(t *testing.T) {
	g := newGroup(t, 5, 3, func(c *Config) {
		if c.ID == 1 {
			c.ElectionTicks = 3 // so that member 1 leads first
		}
	})
	g.run(time.Minute, func() bool { return g.leader() != nil })
	old := g.leader()
	g.run(time.Minute, g.load("a", 20))
	hung := true
	lock := g.world.NewCond(noLock{})
	old.disk.SetHook(func(c vfs.Call) error {
		for hung && c.Op == vfs.OpSync {
			lock.Wait()
		}
		return nil
	})
	var outcome error
	answered := false
	g.propose(old, "stuck", func(err error) { outcome, answered = err, true })
	g.run(time.Minute, func() bool { l := g.leader(); return l != nil && l != old })
	require.False(t, old.leading)
	g.run(time.Minute, func() bool { return answered })
	require.Error(t, outcome)
	g.run(time.Minute, g.load("b", 20))
	hung = false
	lock.Broadcast()
	g.settle()
	g.close()
}

type noLock struct{}

func (noLock) Lock()   {}
func (noLock) Unlock() {}

func TestAPanicChangesNothing(t *testing.T) {
	g := newGroup(t, 6, 3, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	var got error
	answered := 0
	g.propose(g.leader(), "before", func(err error) { require.NoError(t, err); answered++ })
	g.propose(g.leader(), "panic", func(err error) { got = err; answered++ })
	g.propose(g.leader(), "after", func(err error) { require.NoError(t, err); answered++ })
	g.run(time.Minute, func() bool { return answered == 3 })
	require.ErrorIs(t, got, errkind.Internal)
	g.settle()
	require.EqualValues(t, 1, g.acked["before"])
	require.EqualValues(t, 3, g.acked["after"])
	require.NoError(t, g.members[0].replica.View(func(r kv.Reader) error {
		v, err := r.Get(positionKey(2))
		require.Nil(t, v)
		return err
	}))
	g.close()
}

func TestNotLeaderNamesTheLeader(t *testing.T) {
	g := newGroup(t, 7, 3, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	g.sleep(time.Second)
	lead := g.leader()
	var errs []error
	f := g.followers()[0].replica
	f.Propose([]byte("x"), func(_ []byte, err error) { errs = append(errs, err) })
	f.Barrier(func(err error) { errs = append(errs, err) })
	g.run(time.Second, func() bool { return len(errs) == 2 })
	for _, err := range errs {
		require.ErrorIs(t, err, errkind.NotLeader)
		require.ErrorContains(t, err, fmt.Sprintf("meta%d", lead.id))
	}
	require.Equal(t, fmt.Sprintf("meta%d", lead.id), f.Status().LeaderAddr)
	g.close()
}

// A leader that is cut off answers no barrier: someone else may lead.
func TestBarrierNeedsLeadership(t *testing.T) {
	g := newGroup(t, 8, 3, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	old := g.leader()
	passed := 0
	old.replica.Barrier(func(err error) { require.NoError(t, err); passed++ })
	g.run(time.Second, func() bool { return passed == 1 })
	for _, m := range g.members {
		g.cut[[2]uint64{old.id, m.id}], g.cut[[2]uint64{m.id, old.id}] = true, true
	}
	var got error
	old.replica.Barrier(func(err error) { got = err })
	g.run(time.Minute, func() bool { return got != nil })
	require.Error(t, got)
	g.run(time.Minute, func() bool { l := g.leader(); return l != nil && l != old })
	g.settle()
	g.close()
}

func TestRefusesWhatDoesNotFit(t *testing.T) {
	build := func(seed uint64) (*group, *member) {
		g := newGroup(t, seed, 1, nil)
		g.run(time.Minute, func() bool { return g.leader() != nil })
		g.run(time.Minute, g.load("a", 30))
		g.settle()
		g.close()
		return g, g.members[0]
	}
	g, m := build(20)
	m.disk = vfs.NewMem()
	require.ErrorIs(t, g.start(m), errkind.Corrupt, "the log is gone")
	g, m = build(21)
	require.NoError(t, m.store.Update(func(txn kv.Txn) error { txn.Delete(stateKey); return nil }))
	require.ErrorIs(t, g.start(m), errkind.Corrupt, "a store of something else")
	g, m = build(22)
	st := state{index: 5000, term: 9, voters: []uint64{1}}
	require.NoError(t, m.store.Update(func(txn kv.Txn) error { txn.Set(stateKey, st.encode()); return nil }))
	require.ErrorIs(t, g.start(m), errkind.Corrupt, "a store that is ahead of the log")
	g, m = build(23)
	g.members = append(g.members, &member{id: 2})
	require.ErrorIs(t, g.start(m), errkind.Invalid, "other peers than founded with")
}

func TestADifferentStateIsFound(t *testing.T) {
	var fatal []error
	g := newGroup(t, 30, 3, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	g.run(time.Minute, g.load("a", 10))
	g.settle()
	odd := g.followers()[0]
	g.crash(odd)
	require.NoError(t, odd.store.Update(func(txn kv.Txn) error {
		st, err := readState(txn)
		require.NoError(t, err)
		st.hash++
		txn.Set(stateKey, st.encode())
		return nil
	}))
	g.tweak = func(c *Config) {
		c.Fatal = func(err error) { fatal = append(fatal, err) }
	}
	require.NoError(t, g.start(odd))
	done := g.load("b", 10)
	g.run(time.Minute, func() bool { return done() && len(fatal) > 0 })
	require.ErrorIs(t, fatal[0], errkind.Corrupt)
	require.NotNil(t, g.leader())
}

func TestCloseHonoursItsContext(t *testing.T) {
	g := newGroup(t, 31, 1, nil)
	g.run(time.Minute, func() bool { return g.leader() != nil })
	m := g.members[0]
	lock := g.world.NewCond(noLock{})
	m.disk.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpSync {
			lock.Wait()
		}
		return nil
	})
	var got error
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	g.world.Go("close", func() { got = m.replica.Close(ctx) })
	g.run(time.Minute, func() bool { return got != nil })
	require.ErrorIs(t, got, context.Canceled)
}
