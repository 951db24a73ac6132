package server_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/sim"
)

const granule = 16 // log2 of the granule in these tests

// rig is a server in a simulated world.
type rig struct {
	t     *testing.T
	w     *sim.World
	srv   *server.Server
	disks []*fakeStore
	next  uint64
}

func newRig(t *testing.T, seed uint64, disks int, limits server.Limits) *rig {
	g := &rig{t: t, w: sim.NewWorld(seed)}
	cfg := server.Config{Cluster: ids.UUID{1}, Boot: 7, Sched: g.w, Log: quiet(), Limits: limits}
	for i := range disks {
		f := newFake()
		g.disks = append(g.disks, f)
		cfg.Disks = append(cfg.Disks, server.Disk{ID: ids.DiskID(i + 1), Store: f})
	}
	g.srv = server.New(cfg)
	t.Cleanup(g.w.Close)
	return g
}

// run runs fn as a task of the world until it ends.
func (g *rig) run(fn func()) {
	g.t.Helper()
	done := false
	g.w.Go("test", func() { fn(); done = true })
	require.NoError(g.t, g.w.Run(time.Hour, func() bool { return done || g.t.Failed() }))
}

// pend is a request under way.
type pend struct {
	mu   sync.Mutex
	cond sched.Cond
	id   uint64
	resp *wire.Response
	err  error
	at   time.Duration // when the answer came
}

func (g *rig) send(c *server.Conn, req *wire.Request) *pend {
	g.next++
	p := &pend{id: g.next}
	p.cond = g.w.NewCond(&p.mu)
	p.err = c.Call(p.id, req, func(r *wire.Response) {
		p.resp, p.at = r, g.w.Now()
		p.cond.Broadcast()
	})
	return p
}

// wait returns when the answer is there.
func (g *rig) wait(p *pend) *wire.Response {
	require.NoError(g.t, p.err)
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.resp == nil {
		p.cond.Wait()
	}
	return p.resp
}

func (g *rig) call(c *server.Conn, req *wire.Request) *wire.Response { return g.wait(g.send(c, req)) }

func ckey(n int) ids.ChunkKey {
	return ids.ChunkKey{Block: ids.MakeBlockID(1, 1, 5, uint64(n)), Index: 2}
}

func openReq(disk ids.DiskID, key ids.ChunkKey, reserve int) *wire.Request {
	return &wire.Request{Op: wire.OpOpen, Body: &wire.Open{Disk: disk, Key: key, Layout: ids.RS(4, 2), Reserve: uint32(reserve), Granule: granule}}
}

func putReq(disk ids.DiskID, key ids.ChunkKey, off int, data []byte) *wire.Request {
	return &wire.Request{Op: wire.OpPut, Body: &wire.Put{Disk: disk, Key: key, Off: uint32(off), Sums: ec.Sums(nil, data, granule)}, Payload: [][]byte{data}}
}

func sealReq(disk ids.DiskID, key ids.ChunkKey, data []byte) *wire.Request {
	return &wire.Request{Op: wire.OpSeal, Body: &wire.Seal{Disk: disk, Key: key, Length: uint32(len(data)), Digest: ec.Digest(ec.Sums(nil, data, granule))}}
}

func readReq(disk ids.DiskID, key ids.ChunkKey, off, n int) *wire.Request {
	return &wire.Request{Op: wire.OpRead, Body: &wire.Read{Disk: disk, Key: key, Off: uint32(off), Len: uint32(n)}}
}

func storeReq(disk ids.DiskID, key ids.ChunkKey, data []byte) *wire.Request {
	o := openReq(disk, key, len(data)).Body.(*wire.Open)
	return &wire.Request{Op: wire.OpStore, Body: &wire.Store{Open: *o, Sums: ec.Sums(nil, data, granule)}, Payload: [][]byte{data}}
}

func abortReq(disk ids.DiskID, key ids.ChunkKey) *wire.Request {
	return &wire.Request{Op: wire.OpAbort, Body: &wire.ChunkRef{Disk: disk, Key: key}}
}

var noise = func() []byte {
	p := make([]byte, 8*mib)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(p)
	return p
}()

// pattern returns n bytes, others for each seed below 4,096; do not change them.
func pattern(n, seed int) []byte { return noise[seed*64:][:n:n] }

// retryAfter is how long a busy server asks to wait.
func retryAfter(r *wire.Response) time.Duration {
	ms := r.Body.(*wire.Grant).RetryAfter
	return time.Duration(ms) * time.Millisecond
}

func credit(t *testing.T, r *wire.Response) int {
	t.Helper()
	require.NoError(t, r.Err())
	return int(r.Body.(*wire.Grant).Credit)
}

func TestChunkLife(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	data := pattern(3<<20+4096, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		granted := credit(t, g.call(c, openReq(1, ckey(1), 4<<20)))
		require.Equal(t, granted, credit(t, g.call(c, openReq(1, ckey(1), 4<<20))), "opening again is a no-op")
		require.Equal(t, errkind.Conflict, g.call(c, openReq(1, ckey(1), 8<<20)).Status)
		for off := 0; off < len(data); off += 1 << 20 {
			end := min(off+1<<20, len(data))
			require.LessOrEqual(t, end, granted)
			granted = credit(t, g.call(c, putReq(1, ckey(1), off, data[off:end])))
		}
		require.Equal(t, errkind.NoChunk, g.call(c, readReq(1, ckey(1), 0, 1<<16)).Status, "an open chunk is not readable")
		st := g.call(c, &wire.Request{Op: wire.OpStat, Body: &wire.ChunkRef{Disk: 1, Key: ckey(1)}})
		require.Equal(t, &wire.Stat{State: uint8(chunk.StateOpen), Length: uint32(len(data)), Granule: granule}, st.Body)

		wrong := sealReq(1, ckey(1), data)
		sealed := g.call(c, sealReq(1, ckey(1), data))
		require.NoError(t, sealed.Err())
		require.True(t, g.disks[0].durable(ckey(1)), "acknowledged before it was durable")
		require.NoError(t, g.call(c, sealReq(1, ckey(1), data)).Err(), "a seal may be repeated")
		wrong.Body.(*wire.Seal).Digest++
		require.Equal(t, errkind.Conflict, g.call(c, wrong).Status)

		r := g.call(c, readReq(1, ckey(1), 1<<20, 1<<20))
		require.NoError(t, r.Err())
		require.Equal(t, data[1<<20:2<<20], r.Payload)
		require.Equal(t, ec.Sums(nil, r.Payload, granule), r.Body.(*wire.Data).Sums)
		tail := g.call(c, readReq(1, ckey(1), 3<<20, 4096))
		require.Equal(t, data[3<<20:], tail.Payload)
		require.Equal(t, errkind.Range, g.call(c, readReq(1, ckey(1), 3<<20, 8192)).Status)
		require.Equal(t, errkind.Invalid, g.call(c, readReq(1, ckey(1), 4096, 1<<16)).Status)
		require.Equal(t, errkind.NotFound, g.call(c, readReq(9, ckey(1), 0, 1<<16)).Status)
	})
	st := g.srv.Stats()
	require.Zero(t, st.PutBytes+st.ReadBytes)
	require.Zero(t, st.OpenChunks+st.Pending)
	require.Zero(t, g.disks[0].count("pinned"))
}

func TestStoreIsDurableOnReply(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{StoreBuffers: 256 << 10, StoreCredit: 192 << 10})
	data := pattern(128<<10, 3)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		r := g.call(c, storeReq(1, ckey(1), data))
		require.NoError(t, r.Err())
		require.Equal(t, ec.Digest(ec.Sums(nil, data, granule)), r.Body.(*wire.Sealed).Digest)
		require.True(t, g.disks[0].durable(ckey(1)))

		bad := storeReq(1, ckey(2), data)
		bad.Body.(*wire.Store).Sums[1]++
		require.Equal(t, errkind.Corrupt, g.call(c, bad).Status)
		require.False(t, g.disks[0].has(ckey(2)))

		// Over the connection's credit: cut off. Over all buffers: busy.
		g.send(c, storeReq(1, ckey(3), data))
		require.ErrorIs(t, g.send(c, storeReq(1, ckey(4), data)).err, server.ErrCredit)
		two, three := g.srv.NewConn("two", false), g.srv.NewConn("three", false)
		g.send(two, storeReq(1, ckey(5), data))
		r = g.call(three, storeReq(1, ckey(6), data))
		require.Equal(t, errkind.Busy, r.Status)
		require.NotZero(t, r.Body.(*wire.Grant).RetryAfter)
	})
}

func TestWrongSumsAreNeverAcknowledged(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	data := pattern(1<<20, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		g.call(c, openReq(1, ckey(1), 4<<20))
		req := putReq(1, ckey(1), 0, data)
		req.Body.(*wire.Put).Sums[3] ^= 1
		require.Equal(t, errkind.Corrupt, g.call(c, req).Status)
		req.Body.(*wire.Put).Sums = req.Body.(*wire.Put).Sums[:4]
		require.Equal(t, errkind.Invalid, g.call(c, req).Status)
		require.Zero(t, g.disks[0].count("put"))
		require.Equal(t, errkind.NoChunk, g.call(c, putReq(1, ckey(2), 0, data)).Status)
		// The same range again, right this time, goes through.
		require.NoError(t, g.call(c, putReq(1, ckey(1), 0, data)).Err())
		require.NoError(t, g.call(c, sealReq(1, ckey(1), data)).Err())
	})
}

// TestFailuresAreDistinct: what the store says arrives as it is.
func TestFailuresAreDistinct(t *testing.T) {
	for _, kind := range []errkind.Kind{errkind.NoSpace, errkind.ReadOnly, errkind.Corrupt, errkind.Internal} {
		g := newRig(t, 1, 1, server.Limits{})
		g.disks[0].before = func(op string) error {
			if op == "open" {
				return kind.Wrap("disk 1")
			}
			return nil
		}
		g.run(func() {
			c := g.srv.NewConn("client", false)
			r := g.call(c, openReq(1, ckey(1), 4<<20))
			require.Equal(t, kind, r.Status)
			require.NotContains(t, r.Text, kind.Error(), "the kind is told by the status")
		})
		require.Zero(t, g.srv.Stats().PutBytes)
		require.Zero(t, g.srv.Stats().OpenChunks)
	}
}

// TestFailedSyncFailsTheWholeGroup: no seal of it may be acknowledged.
func TestFailedSyncFailsTheWholeGroup(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	g.disks[0].before = func(op string) error {
		if op == "sync" {
			g.w.Sleep(10 * time.Millisecond)
			return errkind.ReadOnly.Wrap("sync")
		}
		return nil
	}
	data := pattern(1<<16, 1)
	g.run(func() {
		c := g.srv.NewConn("client", false)
		var all []*pend
		for i := range 5 {
			g.call(c, openReq(1, ckey(i), 1<<16))
			g.call(c, putReq(1, ckey(i), 0, data))
		}
		for i := range 5 {
			all = append(all, g.send(c, sealReq(1, ckey(i), data)))
		}
		for _, p := range all {
			require.Equal(t, errkind.ReadOnly, g.wait(p).Status)
		}
	})
}

func TestSealsShareASync(t *testing.T) {
	g := newRig(t, 1, 1, server.Limits{})
	data := pattern(1<<16, 1)
	const n = 60
	g.run(func() {
		c := g.srv.NewConn("client", false)
		for i := range n {
			g.call(c, openReq(1, ckey(i), 1<<16))
			g.call(c, putReq(1, ckey(i), 0, data))
		}
		g.disks[0].before = func(op string) error {
			if op == "sync" {
				g.w.Sleep(5 * time.Millisecond)
			}
			return nil
		}
		var all []*pend
		for i := range n {
			all = append(all, g.send(c, sealReq(1, ckey(i), data)))
		}
		for i, p := range all {
			require.NoError(t, g.wait(p).Err())
			require.True(t, g.disks[0].durable(ckey(i)))
		}
	})
	require.Less(t, g.disks[0].count("sync"), 6, "group commit")
}

func TestSameSeedSameRun(t *testing.T) {
	hash := func(seed uint64) uint64 {
		g := newRig(t, seed, 2, server.Limits{PutBuffers: 4 << 20})
		g.run(func() { g.writers(12, 1<<20) })
		return g.w.TraceHash()
	}
	require.Equal(t, hash(5), hash(5))
	require.NotEqual(t, hash(5), hash(6))
}

// writers runs n clients that each write a chunk of size bytes; it returns
// when all have been sealed.
func (g *rig) writers(n, size int) {
	left := n
	for i := range n {
		g.w.Go(fmt.Sprintf("writer %d", i), func() {
			c := g.srv.NewConn(fmt.Sprintf("client %d", i), false)
			g.writeChunk(c, ids.DiskID(i%len(g.disks)+1), ckey(i), pattern(size, i))
			c.Close()
			left--
		})
	}
	for left > 0 {
		g.w.Sleep(time.Millisecond)
	}
}

func (g *rig) writeChunk(c *server.Conn, disk ids.DiskID, key ids.ChunkKey, data []byte) {
	granted := 0
	for granted == 0 {
		r := g.call(c, openReq(disk, key, len(data)))
		if r.Status == errkind.Busy {
			g.w.Sleep(retryAfter(r))
			continue
		}
		granted = credit(g.t, r)
	}
	const step = 512 << 10
	for off := 0; off < len(data); off += step {
		end := min(off+step, len(data))
		require.LessOrEqual(g.t, end, granted, "a writer must never be stuck without credit")
		granted = credit(g.t, g.call(c, putReq(disk, key, off, data[off:end])))
	}
	require.NoError(g.t, g.call(c, sealReq(disk, key, data)).Err())
}
