package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
)

func (c *simulated) sessionState(id ids.Session) meta.SessionState {
	c.t.Helper()
	state := meta.SessionEnded
	c.g.view(c.t, func(r kv.Reader) error {
		x, ok, err := meta.ReadSession(r, id)
		if ok {
			state = x.State
		}
		return err
	})
	return state
}

// unreachable takes the network from clients, or gives it back.
func (c *simulated) unreachable(down bool) {
	c.net.mu.Lock()
	for _, m := range c.g.members {
		c.net.mu.down[m.addr] = down
	}
	c.net.mu.Unlock()
	if down {
		c.net.cut()
	}
}

func TestSilentSessionIsSuspectAndResumes(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		id := cl.Session()
		c.Sleep(time.Minute)
		require.True(t, cl.Valid())
		require.Equal(t, meta.SessionLive, c.sessionState(id))
		c.unreachable(true)
		c.Sleep(5 * time.Second)
		require.True(t, cl.Valid(), "the term is longer")
		c.Sleep(10 * time.Second)
		require.False(t, cl.Valid())
		require.Equal(t, meta.SessionSuspect, c.sessionState(id))
		c.unreachable(false)
		c.Sleep(5 * time.Second)
		require.True(t, cl.Valid())
		require.Equal(t, id, cl.Session())
		require.Equal(t, meta.SessionLive, c.sessionState(id))
		require.NoError(t, cl.Close(bg))
	})
}

func TestLongSilentSessionEndsAndIsReplaced(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cfg := c.config("a")
		var lost, opened []ids.Session
		cfg.OnLost = func(s ids.Session) { lost = append(lost, s) }
		cfg.OnSession = func(s ids.Session) { opened = append(opened, s) }
		cl, err := client.Dial(bg, cfg)
		require.NoError(t, err)
		old, secret := cl.Session(), cl.Secret()
		block := cl.NextBlockID(0)
		require.Equal(t, old, block.Session())
		c.unreachable(true)
		c.Sleep(11 * time.Minute)
		require.Equal(t, meta.SessionEnded, c.sessionState(old))
		c.unreachable(false)
		c.Sleep(5 * time.Second)
		require.Equal(t, []ids.Session{old}, lost)
		require.Len(t, opened, 1)
		require.Equal(t, opened[0], cl.Session())
		require.NotEqual(t, old, cl.Session())
		require.NotEqual(t, secret, cl.Secret())
		require.True(t, cl.Valid())
		ino, err := create(cl, "f", false)
		require.NoError(t, err)
		err = cl.Do(bg, &api.Commit{Ino: ino, Blocks: []ids.Block{{ID: block}}}, nil)
		require.ErrorIs(t, err, errkind.Expired, "what the old session wrote is garbage")
		next := cl.NextBlockID(0)
		require.Equal(t, cl.Session(), next.Session())
		require.Greater(t, next.Counter(), block.Counter())
		require.NoError(t, cl.Close(bg))
	})
}

func TestSecretEndsThePredecessor(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a := c.dial("a")
		cfg := c.config("a")
		cfg.Replaces = a.Secret()
		b, err := client.Dial(bg, cfg)
		require.NoError(t, err)
		require.Equal(t, meta.SessionEnded, c.sessionState(a.Session()))
		require.Equal(t, meta.SessionLive, c.sessionState(b.Session()))
		require.NoError(t, b.Close(bg))
		require.NoError(t, a.Close(bg))
	})
}

func TestNewLeaderGrantsAFullTerm(t *testing.T) {
	simulate(t, 3, func(c *simulated) {
		cl := c.dial("a")
		id := cl.Session()
		c.unreachable(true)
		for n := range 5 {
			c.Sleep(8 * time.Second)
			c.g.lead((n + 1) % 3)
		}
		c.Sleep(8 * time.Second)
		require.Equal(t, meta.SessionLive, c.sessionState(id))
		c.Sleep(5 * time.Second)
		require.Equal(t, meta.SessionSuspect, c.sessionState(id))
		c.unreachable(false)
		c.Sleep(5 * time.Second)
		require.NoError(t, cl.Close(bg))
	})
}

func TestRenewalNeedsALeadershipCheck(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		c.g.mu.broken = errkind.Unavailable.Wrap("no quorum")
		c.Sleep(15 * time.Second)
		require.False(t, cl.Valid(), "a leader that cannot prove itself must not extend a term")
		c.g.mu.broken = nil
		c.Sleep(5 * time.Second)
		require.True(t, cl.Valid())
		require.NoError(t, cl.Close(bg))
	})
}

func orphans(c *simulated) int {
	n := 0
	c.g.view(c.t, func(r kv.Reader) error {
		list, err := meta.ReadOrphans(r, 0, 100)
		n = len(list)
		return err
	})
	return n
}

func TestUnlinkedFileLivesWhileItIsOpen(t *testing.T) {
	simulate(t, 3, func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		c.Sleep(11 * time.Second) // past the first term
		ino, err := create(a, "f", true)
		require.NoError(t, err)
		gone, err := create(a, "g", false)
		require.NoError(t, err)
		require.NoError(t, unlink(b, "f"))
		require.NoError(t, unlink(b, "g"))
		c.Sleep(5 * time.Second)
		require.Equal(t, 1, orphans(c))
		require.ErrorIs(t, b.Do(bg, &api.GetAttr{Ino: gone}, nil), errkind.Stale)
		for n := range 3 { // the open is registered again with each leader
			c.g.lead(n)
			c.Sleep(15 * time.Second)
			require.NoError(t, b.Do(bg, &api.GetAttr{Ino: ino}, nil))
		}
		var o api.Opened
		require.NoError(t, b.Do(bg, &api.Open{Ino: ino}, &o))
		require.NoError(t, a.Do(bg, &api.Release{Inos: []ids.Ino{ino}}, nil))
		c.Sleep(5 * time.Second)
		require.Equal(t, 1, orphans(c), "the other has it open")
		require.NoError(t, b.Do(bg, &api.Release{Inos: []ids.Ino{ino}}, nil))
		c.Sleep(5 * time.Second)
		require.Zero(t, orphans(c))
		c.g.view(t, func(r kv.Reader) error {
			i, err := meta.ReadInfo(r)
			require.Zero(t, i.Counts.Freeing)
			return err
		})
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

func TestNoReapingBeforeAllHaveRegistered(t *testing.T) {
	simulate(t, 2, func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		ino, err := create(a, "f", true)
		require.NoError(t, err)
		require.NoError(t, unlink(b, "f"))
		c.unreachable(true)
		c.g.lead(1)
		c.Sleep(2 * time.Minute) // both are suspect, neither could tell what it has open
		require.Equal(t, 1, orphans(c))
		c.unreachable(false)
		c.Sleep(20 * time.Second)
		require.NoError(t, a.Do(bg, &api.GetAttr{Ino: ino}, nil))
		require.NoError(t, a.Close(bg)) // the end of the session releases it
		c.Sleep(5 * time.Second)
		require.Zero(t, orphans(c))
		require.NoError(t, b.Close(bg))
	})
}

func lock(ino ids.Ino, kind api.LockType, owner uint64, wait bool) *api.Lock {
	return &api.Lock{Ino: ino, Space: api.LockPOSIX, Type: kind, Owner: owner, Start: 0, End: 1<<63 - 1, Wait: wait}
}

func TestLockWaitersAreServedInTurn(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a := c.dial("a")
		ino, err := create(a, "f", false)
		require.NoError(t, err)
		holders := 0
		c.all(20, func(i int) {
			owner := uint64(i + 1)
			require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, owner, true), nil))
			holders++
			require.Equal(t, 1, holders)
			c.Sleep(time.Second)
			require.Equal(t, 1, holders)
			holders--
			require.NoError(t, a.Do(bg, lock(ino, api.Unlock, owner, false), nil))
		})
		require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, 1, false), nil))
		require.ErrorIs(t, a.Do(bg, lock(ino, api.ReadLock, 2, false), nil), errkind.WouldBlock)
		require.NoError(t, a.Close(bg))
	})
}

func TestWaitingLockIsCancelled(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		ino, err := create(a, "f", false)
		require.NoError(t, err)
		require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, 1, false), nil))
		ctx, cancel := newContext()
		c.AfterFunc(time.Second, cancel)
		require.ErrorIs(t, b.Do(ctx, lock(ino, api.WriteLock, 1, true), nil), errkind.Interrupted)
		require.NoError(t, a.Do(bg, lock(ino, api.Unlock, 1, false), nil))
		c.Sleep(time.Second)
		require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, 1, false), nil), "the cancelled waiter must not have got it")
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

func TestLockWaitersSurviveDisconnectionAndElections(t *testing.T) {
	simulate(t, 2, func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		ino, err := create(a, "f", false)
		require.NoError(t, err)
		require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, 1, false), nil))
		c.AfterFunc(2*time.Second, c.net.cut)
		c.AfterFunc(4*time.Second, func() { c.g.lead(1) })
		c.AfterFunc(8*time.Second, func() {
			require.NoError(t, a.Do(bg, lock(ino, api.Unlock, 1, false), nil))
		})
		begun := c.Now()
		require.NoError(t, b.Do(bg, lock(ino, api.WriteLock, 1, true), nil))
		require.GreaterOrEqual(t, c.Now()-begun, 8*time.Second)
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

func TestLockOfASilentSessionIsTaken(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a := c.dial("a")
		ino, err := create(a, "f", false)
		require.NoError(t, err)
		require.NoError(t, a.Do(bg, lock(ino, api.WriteLock, 1, false), nil))
		old := a.Session()
		b := c.dial("b")
		c.g.members[0].srv.Forget(old)
		require.NoError(t, b.Do(bg, lock(ino, api.WriteLock, 1, true), nil))
		require.NoError(t, b.Close(bg))
		c.Sleep(10 * time.Second)
		require.NotEqual(t, old, a.Session())
		require.NoError(t, a.Close(bg))
	})
}

// newContext returns a context whose end the simulation can order: it runs
// what waits for it at once, in the task that cancels.
func newContext() (context.Context, func()) {
	c := &simContext{Context: context.Background(), done: make(chan struct{})}
	return c, c.cancel
}

type simContext struct {
	context.Context
	done chan struct{}
	err  error
	then []func()
}

func (s *simContext) Done() <-chan struct{} { return s.done }
func (s *simContext) Err() error            { return s.err }
func (s *simContext) AfterFunc(fn func()) func() bool {
	s.then = append(s.then, fn)
	return func() bool { return s.err == nil }
}

func (s *simContext) cancel() {
	s.err = context.Canceled
	close(s.done)
	for _, fn := range s.then {
		fn()
	}
}
