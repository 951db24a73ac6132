package server_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/stream"
)

var bg = context.Background()

func TestFoundsServesAndCloses(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		require.NotZero(t, cl.Session())
		require.False(t, cl.Cluster().IsZero())
		require.True(t, cl.Valid())
		require.NotNil(t, cl.Map())
		ino, err := create(cl, "f", false)
		require.NoError(t, err)
		var e api.Entry
		require.NoError(t, cl.Do(bg, &api.Lookup{Parent: ids.RootIno, Name: []byte("f")}, &e))
		require.Equal(t, ino, e.Attr.Ino)
		_, err = create(cl, "f", false)
		require.ErrorIs(t, err, errkind.Exists)
		session := cl.Session()
		require.NoError(t, cl.Close(bg))
		c.g.view(t, func(r kv.Reader) error {
			x, ok, err := meta.ReadSession(r, session)
			require.True(t, !ok || x.State == meta.SessionEnded)
			return err
		})
		require.ErrorIs(t, cl.Do(bg, &api.GetAttr{Ino: ids.RootIno}, nil), errkind.Unavailable)
	})
}

func TestLostRepliesApplyOnce(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		c.net.mu.Lock()
		c.net.mu.drop = func([]byte) bool { return c.Uint64()%4 == 0 }
		c.net.mu.Unlock()
		before := c.g.mu.applied
		const n = 200
		c.all(n, func(i int) {
			c.Sleep(time.Duration(i) * time.Millisecond)
			// Without idempotence the retry of an applied Create would say Exists.
			_, err := create(cl, fmt.Sprintf("f%d", i), false)
			require.NoError(t, err)
		})
		c.net.mu.Lock()
		c.net.mu.drop = nil
		c.net.mu.Unlock()
		require.Greater(t, c.g.mu.applied-before, n, "some command must have been retried")
		require.Len(t, listing(t, cl), n)
		require.NoError(t, cl.Close(bg))
	})
}

func TestFollowsTheLeader(t *testing.T) {
	simulate(t, 3, func(c *simulated) {
		cl := c.dial("a")
		stop := false
		c.Go("elections", func() {
			for n := 1; !stop; n++ {
				c.Sleep(1300 * time.Millisecond) // a new leader proposes no change for a second
				c.g.lead(-1)
				c.Sleep(100 * time.Millisecond)
				c.g.lead(n % 3)
			}
		})
		const n = 300
		c.all(10, func(w int) {
			for i := range n / 10 {
				_, err := create(cl, fmt.Sprintf("f%d-%d", w, i), false)
				require.NoError(t, err)
				c.Sleep(50 * time.Millisecond)
			}
		})
		stop = true
		require.Len(t, listing(t, cl), n)
		c.Sleep(time.Second)
		require.NoError(t, cl.Close(bg))
	})
}

func TestServerThatIsDownIsPassedOver(t *testing.T) {
	simulate(t, 3, func(c *simulated) {
		cl := c.dial("a")
		c.net.mu.down["meta0"] = true
		c.g.lead(2)
		c.net.cut()
		_, err := create(cl, "f", false)
		require.NoError(t, err)
		require.NoError(t, cl.Close(bg))
	})
}

func TestDialTellsWhatIsWrong(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		cfg := c.config("b")
		cfg.Cluster = ids.UUID{1}
		_, err := client.Dial(bg, cfg)
		require.ErrorIs(t, err, errkind.WrongCluster)
		cfg = c.config("c")
		cfg.Addrs = []string{"nowhere"}
		cfg.OpTimeout = 3 * time.Second
		_, err = client.Dial(bg, cfg)
		require.ErrorIs(t, err, errkind.Timeout)
		require.ErrorContains(t, err, "no server at nowhere")
		require.NoError(t, cl.Close(bg))
	})
}

func TestGarbageEndsTheStreamAlone(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		for _, garbage := range [][]byte{
			{},
			{1, 2, 3},
			make([]byte, 100), stream.Append(nil, stream.TypeReply, 1, nil),
			stream.Append(nil, stream.TypeRequest, 1, []byte{1}),
		} {
			conn, err := c.net.Connect(bg, "meta0")
			require.NoError(t, err)
			require.NoError(t, conn.Send(garbage))
			_, err = conn.Recv()
			require.Error(t, err, "garbage instead of hello")
			conn, err = c.net.Connect(bg, "meta0")
			require.NoError(t, err)
			_, err = stream.Greet(conn, &stream.Hello{MinVersion: 1, MaxVersion: 1, Name: "x"})
			require.NoError(t, err)
			require.NoError(t, conn.Send(garbage))
			c.Sleep(time.Second)
			conn.Close()
		}
		_, err := create(cl, "f", false)
		require.NoError(t, err)
		require.NoError(t, cl.Close(bg))
	})
}

func TestVersionMismatchIsRefused(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		conn, err := c.net.Connect(bg, "meta0")
		require.NoError(t, err)
		_, err = stream.Greet(conn, &stream.Hello{MinVersion: 77, MaxVersion: 78, Name: "of the future"})
		require.ErrorIs(t, err, errkind.Version)
		require.ErrorContains(t, err, "77")
		conn.Close()
	})
}

func TestSlowReaderBlocksNobody(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		cl := c.dial("a")
		_, err := create(cl, "f", false)
		require.NoError(t, err)
		conn, err := c.net.Connect(bg, "meta0")
		require.NoError(t, err)
		_, err = stream.Greet(conn, &stream.Hello{MinVersion: 1, MaxVersion: 1, Name: "slow"})
		require.NoError(t, err)
		c.Go("flood", func() {
			req := api.EncodeRequest(&api.Header{}, &api.GetAttr{Ino: ids.RootIno})
			for id := uint64(1); ; id++ {
				if id%100 == 0 {
					c.Sleep(10 * time.Millisecond)
				}
				if conn.Send(stream.Append(nil, stream.TypeRequest, id, req)) != nil {
					return
				}
			}
		})
		for i := range 50 {
			_, err := create(cl, fmt.Sprintf("g%d", i), false)
			require.NoError(t, err)
			c.Sleep(time.Second)
		}
		require.Error(t, conn.Send([]byte{0}), "a client that reads nothing for long is disconnected")
		require.NoError(t, cl.Close(bg))
	})
}

func TestClientMayNotGiveTheLeadersCommands(t *testing.T) {
	simulate(t, 1, func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		for _, req := range []api.Request{
			&api.Found{}, &api.Reap{}, &api.UpdateDisks{}, &api.SuspectSessions{Sessions: []ids.Session{b.Session()}},
			&api.EndSessions{Sessions: []ids.Session{b.Session()}}, &api.FreeStep{Max: 1}, &api.ChunksFreed{}, &api.SetFeature{},
		} {
			require.ErrorIs(t, a.Do(bg, req, nil), errkind.Perm, "%s", req.Kind())
		}
		_, err := create(b, "f", false)
		require.NoError(t, err)
		require.NoError(t, a.Close(bg))
		require.NoError(t, b.Close(bg))
	})
}

func TestEqualSeedsHaveEqualTraces(t *testing.T) {
	work := func(c *simulated) {
		a, b := c.dial("a"), c.dial("b")
		c.AfterFunc(700*time.Millisecond, func() { c.g.lead(1) })
		c.AfterFunc(1300*time.Millisecond, c.net.cut)
		c.all(20, func(i int) {
			for n := range 5 {
				ino, err := create(a, fmt.Sprintf("f%d-%d", i, n), true)
				require.NoError(c.t, err)
				require.NoError(c.t, b.Do(bg, lock(ino%7+1, api.ReadLock, uint64(i), true), nil))
				c.Sleep(100 * time.Millisecond)
				require.NoError(c.t, b.Do(bg, lock(ino%7+1, api.Unlock, uint64(i), false), nil))
			}
		})
		c.Sleep(15 * time.Second)
		require.NoError(c.t, a.Close(bg))
		require.NoError(c.t, b.Close(bg))
	}
	first := runWorld(t, 42, 3, work)
	require.Equal(t, first, runWorld(t, 42, 3, work))
	require.NotEqual(t, first, runWorld(t, 43, 3, work))
}
