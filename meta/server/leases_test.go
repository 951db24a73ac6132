package server_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
)

func lookup(cl *client.Client, name string) (api.Attr, error) {
	var e api.Entry
	err := cl.Do(bg, &api.Lookup{Parent: ids.RootIno, Name: []byte(name)}, &e)
	return e.Attr, err
}

func setMtime(cl *client.Client, ino ids.Ino, at int64) error {
	return cl.Do(bg, &api.SetAttr{Ino: ino, Valid: api.SetMtime, Mtime: at}, &api.Entry{})
}

// messages counts what the clients receive from now on.
func (c *simulated) messages() *int {
	n := new(int)
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.net.mu.drop = func([]byte) bool { *n++; return false }
	return n
}

func TestLoneSessionIsAnsweredFromMemory(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		ino, err := create(cl, "f", false)
		require.NoError(t, err)
		_, err = lookup(cl, "f") // asks for the lease, too
		require.NoError(t, err)
		c.Sleep(100 * time.Millisecond)
		_, err = lookup(cl, "f")
		require.NoError(t, err)
		n := c.messages()
		for range 100 {
			a, err := lookup(cl, "f")
			require.NoError(t, err)
			require.Equal(t, ino, a.Ino)
			require.NoError(t, cl.Do(bg, &api.GetAttr{Ino: ino}, &api.Entry{}))
		}
		require.Zero(t, *n)
		require.NoError(t, setMtime(cl, ino, 77))
		_, err = create(cl, "g", false)
		require.NoError(t, err)
		require.Equal(t, 2, *n)
		a, err := lookup(cl, "f")
		require.NoError(t, err)
		require.EqualValues(t, 77, a.Mtime)
		_, err = lookup(cl, "g")
		require.NoError(t, err)
		require.NoError(t, unlink(cl, "f"))
		require.Equal(t, 3, *n, "what changes answer is kept")
		_, err = lookup(cl, "f")
		require.ErrorIs(t, err, errkind.NotFound)
		require.NoError(t, cl.Close(bg))
	})
}

func TestChangeWaitsForTheLeaseOfAnother(t *testing.T) {
	for name, dead := range map[string]bool{"returned": false, "holder is gone": true} {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, func(c *simulated) {
				a, b, ino := c.leased()
				n := c.messages()
				_, err := lookup(b, "f")
				require.NoError(t, err)
				require.Zero(t, *n, "b has the lease")
				if dead {
					c.net.mu.Lock()
					c.net.mu.conns[1].Close()
					c.net.mu.down["meta0"] = true
					c.net.mu.Unlock()
				}
				begun := c.Now()
				require.NoError(t, setMtime(a, ino, 5))
				took := c.Now() - begun
				c.net.mu.Lock()
				c.net.mu.down["meta0"] = false
				c.net.mu.Unlock()
				require.Equal(t, dead, took > 500*time.Millisecond, "it took %s", took)
				require.Less(t, took, 1100*time.Millisecond)
				at, err := lookup(b, "f")
				require.NoError(t, err)
				require.EqualValues(t, 5, at.Mtime)
				require.NoError(t, a.Close(bg))
				require.NoError(t, b.Close(bg))
			})
		})
	}
}

// leased dials two clients, the second of which has a lease.
func (c *simulated) leased() (a, b *client.Client, ino ids.Ino) {
	a, b = c.dial("a"), c.dial("b")
	ino, err := create(a, "f", false)
	require.NoError(c.t, err)
	c.Sleep(3 * time.Second)
	for range 2 {
		_, err = lookup(b, "f")
		require.NoError(c.t, err)
		c.Sleep(100 * time.Millisecond)
	}
	return a, b, ino
}

func TestNewLeaderLetsLeasesRunOut(t *testing.T) {
	simulate(t, 3, func(c *simulated) {
		a, b, ino := c.leased()
		n := c.messages()
		c.g.lead(1)
		require.NoError(t, setMtime(a, ino, 5))
		require.NotZero(t, *n)
		at, err := lookup(b, "f")
		require.NoError(t, err)
		require.EqualValues(t, 5, at.Mtime)
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

func TestNoLeaseWhileAnotherChangeIsUnderWay(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a, b, ino := c.leased()
		c.Sleep(2 * time.Second)
		c.g.pause(true)
		returned := false
		c.Go("change", func() {
			require.NoError(t, setMtime(a, ino, 5))
			returned = true
		})
		for range 40 {
			c.Sleep(110 * time.Millisecond)
			_, err := lookup(b, "f")
			require.NoError(t, err)
		}
		c.g.pause(false)
		for !returned {
			c.Sleep(time.Millisecond)
		}
		at, err := lookup(b, "f")
		require.NoError(t, err)
		require.EqualValues(t, 5, at.Mtime)
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

// register is a value that only grows: what a read begun after a write
// returned must see, and no read ends with more than was begun.
type register struct{ begun, done atomic.Int64 }

func (r *register) write(fn func(v int64) error) error {
	v := r.begun.Add(1)
	if err := fn(v); err != nil {
		return err
	}
	for {
		old := r.done.Load()
		if old >= v || r.done.CompareAndSwap(old, v) {
			return nil
		}
	}
}

// TestReadsAreNeverOlderThanWhatReturned has mounts read and write in turn,
// with pauses that let leases come and go, over lost connections and
// elections.
func TestReadsAreNeverOlderThanWhatReturned(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			runWorld(t, seed, 3, func(c *simulated) { c.readAndWrite(seed%2 == 1) })
		})
	}
}

func (c *simulated) readAndWrite(trouble bool) {
	t := c.t
	var clients []*client.Client
	for i := range 3 {
		clients = append(clients, c.dial(fmt.Sprint(i)))
	}
	ino, err := create(clients[0], "f", false)
	require.NoError(t, err)
	require.NoError(t, setMtime(clients[0], ino, 0))
	var value, order register
	var turn int64 // one writer at a time: the value grows in the order of the log
	stop := false
	if trouble {
		c.Go("trouble", func() {
			for n := 1; !stop; n++ {
				c.Sleep(time.Duration(c.Uint64()%20_000) * time.Millisecond)
				if n%2 == 0 {
					c.net.cut()
				} else {
					c.g.lead(n % 3)
				}
			}
		})
	}
	c.all(9, func(i int) {
		cl := clients[i%3]
		for range 60 {
			if c.Uint64()%4 == 0 {
				c.Sleep(time.Duration(c.Uint64()%4000) * time.Millisecond)
			}
			c.Sleep(time.Duration(c.Uint64()%20) * time.Millisecond)
			if c.Uint64()%8 == 0 && atomic.CompareAndSwapInt64(&turn, 0, 1) {
				require.NoError(t, value.write(func(v int64) error { return setMtime(cl, ino, v) }))
				require.NoError(t, order.write(func(v int64) error { return c.replaceName(cl, v) }))
				turn = 0
				continue
			}
			low, lowOrder := value.done.Load(), order.done.Load()
			a, err := lookup(cl, "f")
			require.NoError(t, err)
			require.GreaterOrEqual(t, a.Mtime, low)
			require.LessOrEqual(t, a.Mtime, value.begun.Load())
			if lowOrder > 0 {
				a, err = lookup(cl, "x")
				require.NoError(t, err)
				require.GreaterOrEqual(t, a.Mtime, lowOrder, "the name leads to an older file")
			}
		}
	})
	stop = true
	c.Sleep(21 * time.Second)
	for _, cl := range clients {
		require.NoError(t, cl.Close(bg))
	}
}

// replaceName makes a file whose time is v and renames it over x.
func (c *simulated) replaceName(cl *client.Client, v int64) error {
	ino, err := create(cl, "tmp", false)
	if err == nil {
		err = setMtime(cl, ino, v)
	}
	if err == nil {
		err = cl.Do(bg, &api.Rename{OldParent: ids.RootIno, OldName: []byte("tmp"), NewParent: ids.RootIno, NewName: []byte("x")}, nil)
	}
	return err
}
