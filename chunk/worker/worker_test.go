package worker

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/store"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// meta stands for the metadata service. One task runs at a time, so it needs no lock.
type meta struct {
	rig      *rig
	down     bool
	unknown  bool
	verdict  func(Ask) Verdict
	orders   []At  // repeated until freed
	jobs     []Job // handed out once
	placeErr error

	beats, registered int
	freed             []At
	done              []Result
	placed            []At
	asked             map[ids.ChunkKey]int
	onPlace           func(At)
}

func (m *meta) Heartbeat(_ context.Context, r *Report) (*Orders, error) {
	if m.down {
		return nil, errkind.Unavailable.Wrap("down")
	}
	m.beats++
	m.freed = append(m.freed, r.Freed...)
	m.done = append(m.done, r.Done...)
	m.orders = slices.DeleteFunc(m.orders, func(a At) bool { return slices.Contains(r.Freed, a) })
	n := min(r.Room, len(m.jobs))
	o := &Orders{Delete: slices.Clone(m.orders), Jobs: m.jobs[:n], Unknown: m.unknown}
	m.jobs = m.jobs[n:]
	return o, nil
}

func (m *meta) Verdicts(_ context.Context, disk ids.DiskID, asks []Ask) ([]Verdict, error) {
	if m.down || disk != testDisk {
		return nil, errkind.Unavailable.Wrap("down")
	}
	out := make([]Verdict, len(asks))
	for i, a := range asks {
		m.asked[a.Key]++
		out[i] = m.verdict(a)
	}
	return out, nil
}

func (m *meta) Place(_ context.Context, at At, _ uint64) error {
	if m.onPlace != nil {
		m.onPlace(at)
	}
	if m.placeErr != nil {
		return m.placeErr
	}
	m.placed = append(m.placed, at)
	return nil
}

func (m *meta) Register(context.Context) error {
	m.registered++
	m.unknown = false
	return nil
}

const testDisk ids.DiskID = 6

// rig is one worker with one disk in a simulated world.
type rig struct {
	t     *testing.T
	world *sim.World
	mem   *vfs.Mem
	store *store.Store
	meta  *meta
	work  *Worker
	data  func(key ids.ChunkKey) []byte // what the others of the block yield
	fail  error                         // of the rebuilder, after one piece
}

func newRig(t *testing.T, seed uint64) *rig {
	r := &rig{t: t, world: sim.NewWorld(seed), mem: vfs.NewMem()}
	r.mem.SetCapacity(64 << 20)
	require.NoError(t, store.Format(r.mem, store.Identity{Disk: ids.UUID{1}, Server: ids.UUID{2}}))
	r.meta = &meta{rig: r, asked: map[ids.ChunkKey]int{}, verdict: func(Ask) Verdict { return Keep }}
	r.data = func(key ids.ChunkKey) []byte { return chunktest.Bytes(key, 256<<10) }
	r.open()
	t.Cleanup(r.world.Close)
	return r
}

func (r *rig) open() {
	var err error
	r.store, err = store.Open(store.Config{
		FS: r.mem, Sched: r.world, Log: slog.New(slog.DiscardHandler), SegmentSize: 1 << 20, ReserveBytes: 1 << 20, PoolBytes: 4 << 20,
	})
	require.NoError(r.t, err)
}

// RebuildChunk hands out the chunk in two pieces.
func (r *rig) RebuildChunk(_ context.Context, b *ids.Block, index int, w func(uint32, []byte, []uint64) error) error {
	p := r.data(ids.ChunkKey{Block: b.ID, Index: uint8(index)})
	half := len(p) / 2
	if err := w(0, p[:half], ec.Sums(nil, p[:half], 16)); err != nil {
		return err
	}
	if r.fail != nil {
		return r.fail
	}
	return w(uint32(half), p[half:], ec.Sums(nil, p[half:], 16))
}

// run lets the worker live for d of virtual time.
func (r *rig) run(d time.Duration) {
	r.start()
	require.NoError(r.t, r.sleep(d))
	r.stop()
}

func (r *rig) start() {
	r.work = Start(Config{
		Control: r.meta, Rebuild: r, Session: func() ids.Session { return 99 },
		Disks: []Disk{{testDisk, r.store}}, Sched: r.world, Log: slog.New(slog.DiscardHandler),
	})
}

func (r *rig) sleep(d time.Duration) error {
	over := false
	r.world.Go("test", func() {
		r.world.Sleep(d)
		over = true
	})
	return r.world.Run(d+time.Second, func() bool { return over })
}

func (r *rig) stop() {
	closed := false
	r.world.Go("close", func() {
		r.work.Close()
		closed = true
	})
	require.NoError(r.t, r.world.Run(time.Minute, func() bool { return closed }))
}

func (r *rig) put(key ids.ChunkKey, session ids.Session) {
	h := chunktest.Header(key, 256<<10)
	h.Session = session
	chunktest.Store(r.t, r.store, h, r.data(key))
}

func (r *rig) has(key ids.ChunkKey) bool {
	p, err := r.store.Pin(key)
	if err == nil {
		p.Close()
	}
	return err == nil
}

// TestUncommittedChunksGo: a chunk that no file has is freed soon after its
// session has ended, and one that was committed is not asked about for ever.
func TestUncommittedChunksGo(t *testing.T) {
	r := newRig(t, 1)
	kept, dead, open := chunktest.Key(1, 0), chunktest.Key(2, 0), chunktest.Key(3, 0)
	var ended time.Duration
	r.meta.verdict = func(a Ask) Verdict {
		switch {
		case a.Key == kept:
			return Keep
		case ended == 0 || r.world.Now() < ended:
			return NotYet
		}
		return Delete
	}
	r.start()
	require.NoError(t, r.sleep(3*time.Second))
	r.put(kept, 0)
	r.put(dead, 0)
	require.NoError(t, r.store.Open(chunktest.Header(open, 64<<10)))
	require.NoError(t, r.sleep(40*time.Second))
	require.True(t, r.has(dead), "its session lives")
	ended = r.world.Now()
	require.NoError(t, r.sleep(15*time.Second))
	require.False(t, r.has(dead))
	require.True(t, r.has(kept))
	list, err := r.store.List(ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.LessOrEqual(t, r.meta.asked[kept], 2)
	r.stop()
}

// TestEarlierLife: chunks of an earlier life of the process are found by the walk.
func TestEarlierLife(t *testing.T) {
	r := newRig(t, 2)
	var keys []ids.ChunkKey
	for n := range uint64(20) {
		keys = append(keys, chunktest.Key(n, 0))
		r.put(keys[n], 0)
	}
	require.NoError(t, r.store.Close())
	r.open()
	r.meta.verdict = func(a Ask) Verdict {
		if a.Key.Block.Counter()%2 == 0 {
			return Delete
		}
		return Keep
	}
	r.run(10 * time.Second)
	for n, key := range keys {
		require.Equal(t, n%2 == 1, r.has(key), "chunk %s", key)
	}
}

// TestForeignWriter: a chunk that a repair job wrote is judged by the job's session.
func TestForeignWriter(t *testing.T) {
	r := newRig(t, 3)
	young, stray := chunktest.Key(1, 0), chunktest.Key(2, 0)
	r.put(young, 50)
	r.put(stray, 51)
	r.meta.verdict = func(a Ask) Verdict {
		if a.Writer == 50 {
			return NotYet
		}
		return Delete // the block's own session ended long ago
	}
	r.run(30 * time.Second)
	require.True(t, r.has(young))
	require.False(t, r.has(stray))
}

func TestOrderedDeletions(t *testing.T) {
	r := newRig(t, 4)
	key := chunktest.Key(1, 0)
	r.put(key, 0)
	orders := []At{{key, testDisk}, {chunktest.Key(9, 0), testDisk}, {chunktest.Key(9, 0), 77}}
	r.meta.orders = slices.Clone(orders)
	r.run(10 * time.Second)
	require.False(t, r.has(key))
	require.Equal(t, orders[:2], r.meta.freed, "each once, those of other disks not")
	require.Equal(t, orders[2:], r.meta.orders)
}

// TestOutageKeepsResults: what could not be reported is reported later.
func TestOutageKeepsResults(t *testing.T) {
	r := newRig(t, 5)
	key := chunktest.Key(1, 0)
	r.put(key, 0)
	r.meta.orders = []At{{key, testDisk}}
	r.meta.jobs = []Job{{ID: 4, Kind: JobCompact}}
	r.start()
	require.NoError(t, r.world.Run(time.Minute, func() bool { return r.meta.beats == 1 }))
	r.meta.down = true
	require.NoError(t, r.sleep(10*time.Second))
	require.Empty(t, r.meta.freed)
	r.meta.down = false
	r.meta.unknown = true
	require.NoError(t, r.sleep(5*time.Second))
	require.Equal(t, []At{{key, testDisk}}, r.meta.freed)
	require.Len(t, r.meta.done, 1)
	require.ErrorIs(t, r.meta.done[0].Err, errkind.Unsupported)
	require.Equal(t, 1, r.meta.registered)
	r.stop()
}

func (r *rig) repairJob(id uint64, key ids.ChunkKey) Job {
	b := ids.Block{
		ID: key.Block, Layout: ids.RS(4, 2), Length: 4 * 256 << 10, Granule: 16, Version: 8,
		Disks: []ids.DiskID{1, 2, 3, 0, 5, 7}, Digests: make([]uint64, 6),
	}
	b.Digests[key.Index] = ec.Digest(ec.Sums(nil, r.data(key), 16))
	return Job{ID: id, Kind: JobRepair, Block: b, Index: key.Index, Target: testDisk}
}

// TestRepair rebuilds a chunk that is not there, one that is damaged, and
// leaves one alone that is whole. Each is durable before it is recorded.
func TestRepair(t *testing.T) {
	r := newRig(t, 6)
	absent, damaged, whole, other := chunktest.Key(1, 3), chunktest.Key(2, 3), chunktest.Key(3, 3), chunktest.Key(4, 3)
	r.put(damaged, 0)
	r.put(whole, 0)
	wrong := chunktest.Header(other, 256<<10)
	chunktest.Store(t, r.store, wrong, chunktest.Bytes(absent, 128<<10))
	require.True(t, r.mem.Flip("segments/00000000.seg", 2*vfs.PageSize+70000, 1), "the first chunk's data")
	r.meta.onPlace = func(at At) {
		after := &rig{t: t, world: r.world, mem: r.mem.CrashClone(nil)}
		after.open()
		chunktest.RequireChunk(t, after.store, at.Key, r.data(at.Key))
	}
	keys := []ids.ChunkKey{absent, damaged, whole, other}
	var want []At
	for i, key := range keys {
		r.meta.jobs = append(r.meta.jobs, r.repairJob(uint64(i+1), key))
		want = append(want, At{key, testDisk})
	}
	r.run(30 * time.Second)
	for _, d := range r.meta.done {
		require.NoError(t, d.Err)
	}
	require.Len(t, r.meta.done, 4)
	require.ElementsMatch(t, want, r.meta.placed)
	for _, key := range keys {
		chunktest.RequireChunk(t, r.store, key, r.data(key))
	}
	p, err := r.store.Pin(absent)
	require.NoError(t, err)
	require.Equal(t, ids.Session(99), p.Header().Session)
	require.Equal(t, []ids.DiskID{1, 2, 3, testDisk, 5, 7}, p.Header().Siblings)
	p.Close()
	p, err = r.store.Pin(whole)
	require.NoError(t, err)
	require.Zero(t, p.Header().Session, "it was not written again")
	p.Close()
}

// TestFailedRepair leaves nothing behind, and does not touch what was there.
func TestFailedRepair(t *testing.T) {
	r := newRig(t, 7)
	absent, damaged := chunktest.Key(1, 3), chunktest.Key(2, 3)
	r.put(damaged, 0)
	require.True(t, r.mem.Flip("segments/00000000.seg", 2*vfs.PageSize+70000, 1))
	r.fail = errkind.Unavailable.Wrap("too few chunks left")
	r.meta.jobs = []Job{r.repairJob(1, absent), r.repairJob(2, damaged), {ID: 3, Kind: JobRepair, Target: 50}}
	r.run(20 * time.Second)
	require.Len(t, r.meta.done, 3)
	for _, d := range r.meta.done {
		require.Error(t, d.Err)
	}
	require.Empty(t, r.meta.placed)
	require.True(t, r.has(damaged), "its sound granules may be needed")
	list, err := r.store.List(ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Len(t, list, 1)
}

// TestUnrecordedRepair: when the record cannot be changed, the chunk stays
// until a verdict says that it may go: the record may have it all the same.
func TestUnrecordedRepair(t *testing.T) {
	r := newRig(t, 8)
	key := chunktest.Key(1, 3)
	gone := false
	r.meta.placeErr = errkind.Changed.Wrap("version 9")
	r.meta.verdict = func(a Ask) Verdict {
		switch {
		case gone:
			return Delete
		case a.Writer == 99:
			return NotYet
		}
		return Delete
	}
	r.meta.jobs = []Job{r.repairJob(1, key)}
	r.start()
	require.NoError(t, r.sleep(30*time.Second))
	require.ErrorIs(t, r.meta.done[0].Err, errkind.Changed)
	require.True(t, r.has(key))
	gone = true
	require.NoError(t, r.sleep(15*time.Second))
	require.False(t, r.has(key))
	r.stop()
}

// stuck is a disk whose maintenance hangs until free.
type stuck struct {
	chunk.Store
	rig  *rig
	free func() bool
}

func (s stuck) Inventory() chunk.Inventory { return stuckInventory{s.Store.Inventory(), s} }

type stuckInventory struct {
	chunk.Inventory
	disk stuck
}

func (s stuckInventory) Maintain() error {
	for !s.disk.free() {
		s.disk.rig.world.Sleep(time.Second)
	}
	return errors.New("the disk hung")
}

// TestHangingDisk: a server with a disk that hangs goes on reporting.
func TestHangingDisk(t *testing.T) {
	r := newRig(t, 9)
	free := false
	bad := stuck{r.store, r, func() bool { return free }}
	r.work = Start(Config{Control: r.meta, Disks: []Disk{{testDisk, bad}}, Sched: r.world, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, r.sleep(20*time.Second))
	require.Greater(t, r.meta.beats, 15)
	free = true
	r.stop()
}

// TestEqualSeeds: equal seeds give equal traces.
func TestEqualSeeds(t *testing.T) {
	play := func(seed uint64) uint64 {
		r := newRig(t, seed)
		r.meta.verdict = func(a Ask) Verdict { return Verdict(a.Key.Block.Counter() % 3) }
		for n := range uint64(30) {
			r.put(chunktest.Key(n, 3), 0)
		}
		for n := range uint64(6) {
			r.meta.jobs = append(r.meta.jobs, r.repairJob(n, chunktest.Key(100+n, 3)))
		}
		r.run(30 * time.Second)
		return r.world.TraceHash()
	}
	for seed := range uint64(3) {
		require.Equal(t, play(seed), play(seed))
	}
	require.NotEqual(t, play(10), play(11))
}
