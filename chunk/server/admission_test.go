package server_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

const mib = 1 << 20

func TestBudgetHoldsUnder200Writers(t *testing.T) {
	g := newRig(t, 3, 4, server.Limits{PutBuffers: 9 * mib, Window: 2 * mib, OpenQueue: 50})
	for _, d := range g.disks {
		d.before = func(op string) error {
			g.w.Sleep(time.Duration(g.w.Uint64() % uint64(3*time.Millisecond)))
			return nil
		}
	}
	g.run(func() {
		g.writers(200, 5*mib/4)
		for i := range 200 {
			require.True(t, g.disks[i%4].durable(ckey(i)))
		}
	})
	st := g.srv.Stats()
	require.LessOrEqual(t, st.PutPeak, int64(9*mib))
	require.Greater(t, st.PutPeak, int64(6*mib), "the budget was used")
	require.LessOrEqual(t, st.Mapped, int64((9+16+24)*mib*5/4+mib))
	require.Zero(t, st.PutBytes)
	require.Zero(t, st.OpenChunks+st.Waiting+st.Pending)
}

func TestOverCreditIsCutOff(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Window: mib})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		require.Equal(t, mib, credit(t, g.call(c, openReq(1, ckey(1), 4*mib))))
		require.ErrorIs(t, g.send(c, putReq(1, ckey(1), mib, pattern(1<<16, 1))).err, server.ErrCredit)
		require.ErrorIs(t, g.send(c, &wire.Request{Op: wire.OpSeal, Body: &wire.Seal{Disk: 1}, Payload: [][]byte{{1}}}).err, server.ErrCredit)
	})
}

// TestOpensAreServedOldestFirst: with all buffers granted the next opens wait,
// and get them in their order.
func TestOpensAreServedOldestFirst(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{PutBuffers: 2 * mib, Window: mib, OpenWait: time.Second, OpenQueue: 3})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		for i := range 2 {
			credit(t, g.call(c, openReq(1, ckey(i), mib)))
		}
		var waiting []*pend
		for i := 2; i < 5; i++ {
			waiting = append(waiting, g.send(c, openReq(1, ckey(i), mib)))
		}
		r := g.call(c, openReq(1, ckey(9), mib))
		require.Equal(t, errkind.Busy, r.Status, "the queue is full")
		require.NotZero(t, r.Body.(*wire.Grant).RetryAfter)
		for i, p := range waiting {
			require.Nil(t, p.resp)
			require.NoError(t, g.call(c, abortReq(1, ckey(i))).Err())
			credit(t, g.wait(p))
		}
	})
}

func TestWaitingOpenIsBounded(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{PutBuffers: mib, Window: mib})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		credit(t, g.call(c, openReq(1, ckey(1), mib)))
		start := g.w.Now()
		p := g.send(c, openReq(1, ckey(2), mib))
		require.Equal(t, errkind.Busy, g.wait(p).Status)
		require.Less(t, p.at-start, 50*time.Millisecond, "by then a client counts the server as out")
		require.Zero(t, g.srv.Stats().Waiting)
	})
}

// TestCancelledOpen gives its buffers back, whenever the cancel comes.
func TestCancelledOpen(t *testing.T) {
	for name, when := range map[string]time.Duration{"queued": 0, "running": 2 * time.Millisecond, "granted": 20 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, 1, 1, server.Limits{Workers: 1})
			g.disks[0].before = func(string) error { g.w.Sleep(4 * time.Millisecond); return nil }
			g.run(func() {
				c := g.srv.NewConn("client", false)
				p := g.send(c, openReq(1, ckey(1), 4*mib))
				if when > 0 {
					g.w.Sleep(when)
				}
				require.NoError(t, g.send(c, &wire.Request{Op: wire.OpCancel, Body: &wire.Cancel{Request: p.id}}).err)
				g.w.Sleep(50 * time.Millisecond)
				require.NotNil(t, p.resp)
			})
			require.Zero(t, g.srv.Stats().PutBytes)
			require.Zero(t, g.srv.Stats().OpenChunks+g.srv.Stats().Pending)
			require.False(t, g.disks[0].has(ckey(1)))
		})
	}
}

// TestCancelAfterPut: a chunk that holds bytes is not undone by a late cancel.
func TestCancelAfterPut(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	data := pattern(1<<16, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		p := g.send(c, openReq(1, ckey(1), mib))
		g.wait(p)
		g.call(c, putReq(1, ckey(1), 0, data))
		g.send(c, &wire.Request{Op: wire.OpCancel, Body: &wire.Cancel{Request: p.id}})
		require.NoError(t, g.call(c, sealReq(1, ckey(1), data)).Err())
	})
}

// TestAbortNeverTouchesASealedChunk, however it races with the seal.
func TestAbortNeverTouchesASealedChunk(t *testing.T) {
	for seed := range uint64(30) {
		g := newRig(t, seed, 1, server.Limits{})
		g.disks[0].before = func(string) error {
			g.w.Sleep(time.Duration(g.w.Uint64() % uint64(time.Millisecond)))
			return nil
		}
		data := pattern(1<<16, 1)
		g.run(func() {
			c := g.srv.NewConn("client", false)
			g.call(c, openReq(1, ckey(1), mib))
			g.call(c, putReq(1, ckey(1), 0, data))
			seal := g.send(c, sealReq(1, ckey(1), data))
			g.w.Sleep(time.Duration(g.w.Uint64() % uint64(time.Millisecond)))
			g.call(c, abortReq(1, ckey(1)))
			g.call(c, abortReq(1, ckey(1)))
			if g.wait(seal).Status == errkind.OK {
				g.w.Sleep(20 * time.Millisecond)
				require.NoError(t, g.call(c, readReq(1, ckey(1), 0, 1<<16)).Err(), "seed %d", seed)
			}
		})
	}
}

// TestIdleChunkLapses: it loses its credit, not its bytes, and can go on.
func TestIdleChunkLapses(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{PutBuffers: 2 * mib, Window: 2 * mib})
	data := pattern(3*mib, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		credit(t, g.call(c, openReq(1, ckey(1), 4*mib)))
		credit(t, g.call(c, putReq(1, ckey(1), 0, data[:mib])))
		g.w.Sleep(40 * time.Second)
		require.Zero(t, g.srv.Stats().PutBytes)
		// Another client takes all buffers meanwhile.
		credit(t, g.call(c, openReq(1, ckey(2), 2*mib)))
		require.Equal(t, errkind.Busy, g.call(c, putReq(1, ckey(1), mib, data[mib:2*mib])).Status)
		require.NoError(t, g.call(c, abortReq(1, ckey(2))).Err())
		require.GreaterOrEqual(t, credit(t, g.call(c, putReq(1, ckey(1), mib, data[mib:2*mib]))), 3*mib)
		credit(t, g.call(c, putReq(1, ckey(1), 2*mib, data[2*mib:])))
		require.NoError(t, g.call(c, sealReq(1, ckey(1), data)).Err())
		// One that nothing was put to is dropped; one with bytes much later.
		credit(t, g.call(c, openReq(1, ckey(3), mib)))
		credit(t, g.call(c, openReq(1, ckey(4), mib)))
		credit(t, g.call(c, putReq(1, ckey(4), 0, data[:1<<16])))
		g.w.Sleep(time.Minute)
		require.False(t, g.disks[0].has(ckey(3)))
		require.True(t, g.disks[0].has(ckey(4)))
		g.w.Sleep(5 * time.Minute)
		require.False(t, g.disks[0].has(ckey(4)))
	})
	require.Zero(t, g.srv.Stats().PutBytes)
	require.Zero(t, g.srv.Stats().OpenChunks)
}

// TestResentPut: a put whose answer was lost may be sent again.
func TestResentPut(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{PutBuffers: 4 * mib, Window: mib})
	data := pattern(2*mib, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		credit(t, g.call(c, openReq(1, ckey(1), 2*mib)))
		for range 5 {
			require.Equal(t, 2*mib, credit(t, g.call(c, putReq(1, ckey(1), 0, data[:mib]))))
		}
		credit(t, g.call(c, putReq(1, ckey(1), mib, data[mib:])))
		require.NoError(t, g.call(c, sealReq(1, ckey(1), data)).Err())
	})
	require.Zero(t, g.srv.Stats().PutBytes)
}

func (g *rig) sealed(c *server.Conn, disk ids.DiskID, key ids.ChunkKey, data []byte) {
	require.NoError(g.t, g.call(c, storeReq(disk, key, data)).Err())
}

func TestForegroundNeverWaitsBehindRepair(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Workers: 4})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(1<<16, 1))
		g.disks[0].before = func(string) error { g.w.Sleep(10 * time.Millisecond); return nil }
		var repair []*pend
		for range 200 {
			r := readReq(1, ckey(1), 0, 1<<16)
			r.Class = wire.ClassRepair
			repair = append(repair, g.send(c, r))
		}
		g.w.Sleep(5 * time.Millisecond)
		for range 5 {
			sent := g.w.Now() // virtual
			p := g.send(c, readReq(1, ckey(1), 0, 1<<16))
			require.NoError(t, g.wait(p).Err())
			require.Equal(t, 10*time.Millisecond, p.at-sent, "one worker is always free for the foreground")
		}
		require.Nil(t, repair[199].resp)
		for _, p := range repair {
			require.NoError(t, g.wait(p).Err())
		}
		require.NotZero(t, repair[199].resp.QueueDelay)
	})
}

// TestRepairIsNotStarved by a foreground that never ends.
func TestRepairIsNotStarved(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Workers: 2})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(1<<16, 1))
		g.disks[0].before = func(string) error { g.w.Sleep(time.Millisecond); return nil }
		r := readReq(1, ckey(1), 0, 1<<16)
		r.Class = wire.ClassRepair
		var repair *pend
		for i := range 400 {
			g.send(c, readReq(1, ckey(1), 0, 1<<16))
			if i == 100 {
				repair = g.send(c, r)
			}
			g.w.Sleep(300 * time.Microsecond)
		}
		require.NotNil(t, repair.resp)
	})
}

func TestLateRequestsAreDropped(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Workers: 1})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(1<<16, 1))
		g.disks[0].before = func(string) error { g.w.Sleep(20 * time.Millisecond); return nil }
		pins := g.disks[0].count("pin")
		first := g.send(c, readReq(1, ckey(1), 0, 1<<16))
		g.w.Sleep(time.Millisecond)
		late := readReq(1, ckey(1), 0, 1<<16)
		late.Left = 5 * time.Millisecond
		second, third := g.send(c, late), g.send(c, readReq(1, ckey(1), 0, 1<<16))
		g.send(c, &wire.Request{Op: wire.OpCancel, Body: &wire.Cancel{Request: third.id}})
		require.Equal(t, errkind.Interrupted, g.wait(third).Status)
		require.NoError(t, g.wait(first).Err())
		require.Equal(t, errkind.Timeout, g.wait(second).Status)
		require.Equal(t, pins+1, g.disks[0].count("pin"))
	})
}

// TestHungDiskHurtsOnlyItself: its queue fills, its requests are refused, and
// it cannot take the buffers of the others.
func TestHungDiskHurtsOnlyItself(t *testing.T) {
	g := newRig(t, 1, 2, server.Limits{PutBuffers: 8 * mib, Window: mib, QueueLen: 10})
	hung := true
	g.disks[0].before = func(string) error {
		for hung {
			g.w.Sleep(time.Second)
		}
		return nil
	}
	g.run(func() {
		c := g.srv.NewConn("client", false)
		for i := range 30 {
			g.send(c, openReq(1, ckey(100+i), mib))
		}
		g.w.Sleep(time.Second)
		g.writeChunk(c, 2, ckey(1), pattern(4*mib, 1))
		require.LessOrEqual(t, g.srv.Stats().PutBytes, int64(4*mib))
		err := g.srv.Close(time.Second)
		require.ErrorIs(t, err, errkind.Timeout)
		hung = false
		require.NoError(t, g.srv.Close(10*time.Second))
	})
}

func TestCloseFinishesWhatWasAccepted(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	data := pattern(1<<16, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.call(c, openReq(1, ckey(1), 1<<16))
		g.call(c, putReq(1, ckey(1), 0, data))
		g.disks[0].before = func(string) error { g.w.Sleep(20 * time.Millisecond); return nil }
		seal := g.send(c, sealReq(1, ckey(1), data))
		require.NoError(t, g.srv.Close(time.Minute))
		require.NotNil(t, seal.resp)
		require.NoError(t, seal.resp.Err())
		require.True(t, g.disks[0].durable(ckey(1)))
		require.Equal(t, errkind.Unavailable, g.call(c, readReq(1, ckey(1), 0, 1<<16)).Status)
	})
	require.Zero(t, g.srv.Stats().Mapped)
}

// TestClosedConnection: what it left in the queue is not executed.
func TestClosedConnection(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Workers: 1})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(1<<16, 1))
		g.disks[0].before = func(string) error { g.w.Sleep(time.Millisecond); return nil }
		pins := g.disks[0].count("pin")
		for range 10 {
			g.send(c, readReq(1, ckey(1), 0, 1<<16))
		}
		c.Close()
		require.ErrorIs(t, g.send(c, readReq(1, ckey(1), 0, 1<<16)).err, errkind.Invalid)
		g.w.Sleep(time.Second)
		require.LessOrEqual(t, g.disks[0].count("pin"), pins+1)
		require.Zero(t, g.srv.Stats().Pending)
	})
}

func TestBusyIsBounded(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{Workers: 1, ConnPending: 20})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(1<<16, 1))
		g.disks[0].before = func(string) error { g.w.Sleep(time.Millisecond); return nil }
		var busy int
		var last []*pend
		for range 30 {
			last = append(last, g.send(c, readReq(1, ckey(1), 0, 1<<16)))
		}
		for _, p := range last {
			if g.wait(p).Status == errkind.Busy {
				busy++
			}
		}
		require.Equal(t, 10, busy)
	})
}

// TestReadsWaitForBuffers: with all read buffers held by a client that does not
// read, others wait, and go on when it lets go.
func TestReadsWaitForBuffers(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{ReadBuffers: 2 * mib, Workers: 2})
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.sealed(c, 1, ckey(1), pattern(mib, 1))
		var held []*server.Reply
		read := func(c *server.Conn, id uint64) {
			in, err := c.Accept(id, readReq(1, ckey(1), 0, mib), 0)
			require.NoError(t, err)
			c.Submit(in, func(r *server.Reply) { held = append(held, r) })
		}
		slow := g.srv.NewConn("slow", false)
		for id := range uint64(4) {
			read(slow, 1000+id)
		}
		g.w.Sleep(time.Second)
		require.Len(t, held, 1, "one connection gets half of the buffers")
		require.NoError(t, g.call(c, readReq(1, ckey(1), 0, mib)).Err())
		read(g.srv.NewConn("other", false), 1)
		g.w.Sleep(time.Second)
		require.Len(t, held, 2)
		waiting := g.send(c, readReq(1, ckey(1), 0, mib))
		g.w.Sleep(time.Second)
		require.Nil(t, waiting.resp)
		for i := 0; i < len(held); i++ {
			require.NoError(t, held[i].Err())
			require.Equal(t, pattern(mib, 1), held[i].Payload)
			held[i].Release()
			g.w.Sleep(time.Second)
		}
		require.Len(t, held, 5)
		require.NoError(t, g.wait(waiting).Err())
		require.NoError(t, g.srv.Close(time.Minute))
	})
	require.LessOrEqual(t, g.srv.Stats().ReadPeak, int64(2*mib))
	require.Zero(t, g.srv.Stats().ReadBytes)
}
