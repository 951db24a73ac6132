package store

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// fill writes chunks of 256 KiB until the disk is full.
func fill(t *testing.T, s *Store, from uint64) []ids.ChunkKey {
	var keys []ids.ChunkKey
	for n := from; ; n++ {
		h := chunktest.Header(chunktest.Key(n, 0), 256<<10)
		err := s.Open(h)
		if errors.Is(err, errkind.NoSpace) {
			return keys
		}
		require.NoError(t, err)
		require.Less(t, n, from+10000, "the disk never fills")
		data := chunktest.Bytes(h.Key, 256<<10)
		chunktest.PutAll(t, s, h, data)
		done, err := s.Seal(h.Key, 256<<10)
		require.NoError(t, err)
		require.NoError(t, s.Sync(done.Ticket))
		keys = append(keys, h.Key)
	}
}

func TestFullDisk(t *testing.T) {
	m := newMem(t, 32<<20)
	s := openStore(t, testConfig(m))
	keys := fill(t, s, 1)
	require.Greater(t, len(keys), 60, "most of the disk was used")
	require.False(t, s.Usage().ReadOnly, "full is not failed")
	_, err := s.Write(chunktest.Header(chunktest.Key(1e6, 0), 1<<20), chunktest.Bytes(keys[0], 1<<20), chunktest.Sums(chunktest.Bytes(keys[0], 1<<20), 16))
	require.ErrorIs(t, err, errkind.NoSpace)
	for _, k := range keys {
		chunktest.RequireChunk(t, s, k, chunktest.Bytes(k, 256<<10))
	}
	// Others fill what is left of the file system; deleting works all the same.
	hog, err := m.Create("hog")
	require.NoError(t, err)
	_, free, err := m.Space()
	require.NoError(t, err)
	if free > 0 {
		require.NoError(t, hog.Allocate(0, int64(free)))
	}
	require.NoError(t, s.Delete(keys[:20]))
	require.NoError(t, s.Maintain())
	require.NoError(t, s.Check())
	again := fill(t, s, 1000)
	require.GreaterOrEqual(t, len(again), 20, "what was deleted can be used again")
	require.NoError(t, s.Check())
	require.NoError(t, s.Close())

	s = openStore(t, testConfig(m.CrashClone(nil)))
	require.NoError(t, s.Check())
	for _, k := range append(keys[20:], again...) {
		chunktest.RequireChunk(t, s, k, chunktest.Bytes(k, 256<<10))
	}
	require.NoError(t, s.Close())
}

// TestFailedSync: the whole group fails, nothing is retried, reads go on.
func TestFailedSync(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	old := chunktest.Header(chunktest.Key(1, 0), 256<<10)
	chunktest.Store(t, s, old, chunktest.Bytes(old.Key, 256<<10))
	var tickets []uint64
	for n := range uint64(3) {
		h := chunktest.Header(chunktest.Key(10+n, 0), 64<<10)
		require.NoError(t, s.Open(h))
		chunktest.PutAll(t, s, h, chunktest.Bytes(h.Key, 64<<10))
		done, err := s.Seal(h.Key, 64<<10)
		require.NoError(t, err)
		tickets = append(tickets, done.Ticket)
	}
	syncs := 0
	m.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpSync {
			syncs++
			return syscall.EIO
		}
		return nil
	})
	for _, ticket := range tickets {
		require.ErrorIs(t, s.Sync(ticket), errkind.ReadOnly)
	}
	require.Equal(t, 1, syncs, "a failed sync is not retried")
	m.SetHook(nil)
	require.ErrorIs(t, s.Sync(tickets[0]), errkind.ReadOnly)

	require.ErrorIs(t, s.Open(chunktest.Header(chunktest.Key(20, 0), 4096)), errkind.ReadOnly)
	require.ErrorIs(t, s.Delete([]ids.ChunkKey{old.Key}), errkind.ReadOnly)
	u := s.Usage()
	require.True(t, u.ReadOnly)
	require.Contains(t, u.Reason, "sync")
	chunktest.RequireChunk(t, s, old.Key, chunktest.Bytes(old.Key, 256<<10))
	for n := range uint64(3) {
		_, err := s.Pin(chunktest.Key(10+n, 0))
		require.ErrorIs(t, err, errkind.NoChunk, "bytes that may not be on the disk are not served")
	}
	require.NoError(t, s.Maintain())
	require.NoError(t, s.Close())
}

func TestReadOnlyDisk(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	h := chunktest.Header(chunktest.Key(1, 0), 256<<10)
	data := chunktest.Bytes(h.Key, 256<<10)
	chunktest.Store(t, s, h, data)
	m.SetReadOnly(true)
	other := chunktest.Header(chunktest.Key(2, 0), 4096)
	require.ErrorIs(t, s.Open(other), errkind.ReadOnly)
	chunktest.RequireChunk(t, s, h.Key, data)
	require.NoError(t, s.Close())
	// A disk that is read-only from the start serves reads too.
	s = openStore(t, testConfig(m))
	require.True(t, s.Usage().ReadOnly)
	chunktest.RequireChunk(t, s, h.Key, data)
	require.ErrorIs(t, s.Open(other), errkind.ReadOnly)
	require.NoError(t, s.Close())
}

// TestDamage flips bits in front pages and data: never are wrong bytes vouched for.
func TestDamage(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	h := chunktest.Header(chunktest.Key(1, 0), 256<<10)
	data := chunktest.Bytes(h.Key, 256<<10)
	chunktest.Store(t, s, h, data)
	require.NoError(t, s.Close())
	for _, at := range []int64{0, 3, 40, 200, sealAt, sealAt + 5, sealAt + sealFixed + 9} {
		disk := m.CrashClone(nil)
		require.True(t, disk.Flip(segName(0), pageSize+at, 2))
		s := openStore(t, testConfig(disk))
		_, err := s.Pin(h.Key)
		require.ErrorIs(t, err, errkind.Corrupt, "offset %d", at)
		require.NoError(t, s.Close())
	}
	disk := m.CrashClone(nil)
	require.True(t, disk.Flip(segName(0), 2*pageSize+70000, 0))
	s = openStore(t, testConfig(disk))
	r, err := s.Pin(h.Key)
	require.NoError(t, err)
	got := make([]byte, 256<<10)
	_, err = r.ReadAt(got, 0)
	require.NoError(t, err)
	require.NotEqual(t, chunktest.Sums(got, 16), r.Sums(), "the reader notices")
	r.Close()
	require.NoError(t, s.Close())
}

// TestDamagedCheckpoint: an index that cannot be read is built anew.
func TestDamagedCheckpoint(t *testing.T) {
	for _, at := range []int64{0, pageSize + 9, pageSize + 40} {
		m := newMem(t, 64<<20)
		clock := &steps{}
		cfg := testConfig(m)
		cfg.Sched = clock
		s := openStore(t, cfg)
		var keys []ids.ChunkKey
		for n := range uint64(8) {
			h := chunktest.Header(chunktest.Key(n, 0), 256<<10)
			chunktest.Store(t, s, h, chunktest.Bytes(h.Key, 100<<10))
			keys = append(keys, h.Key)
			clock.advance(time.Minute)
			require.NoError(t, s.Maintain())
		}
		require.NoError(t, s.Delete(keys[:1]))
		name := logName(s.clog.gen)
		require.NoError(t, s.Close())
		require.True(t, m.Flip(name, at, 1))
		s = openStore(t, cfg)
		require.NoError(t, s.Check())
		_, err := s.Pin(keys[0])
		require.ErrorIs(t, err, errkind.NoChunk)
		for _, k := range keys[1:] {
			chunktest.RequireChunk(t, s, k, chunktest.Bytes(k, 100<<10))
		}
		require.NoError(t, s.Close())
	}
}

// TestSavedSegmentFile stores the image of a segment, full of chunks, as the
// data of chunks of the same disk, and then loses the index.
func TestSavedSegmentFile(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	inner := chunktest.Header(chunktest.Key(1, 0), 64<<10)
	chunktest.Store(t, s, inner, chunktest.Bytes(inner.Key, 64<<10))
	file, err := m.Open(segName(0))
	require.NoError(t, err)
	image := make([]byte, 512<<10)
	_, err = file.ReadAt(image, 0)
	require.NoError(t, err)
	outer := chunktest.Header(chunktest.Key(2, 0), 512<<10)
	chunktest.Store(t, s, outer, image)
	require.NoError(t, s.Delete([]ids.ChunkKey{inner.Key, outer.Key}))
	require.NoError(t, s.Close())
	names, err := m.List(logDir)
	require.NoError(t, err)
	for _, name := range names {
		require.NoError(t, m.Remove(logDir+"/"+name))
	}
	s = openStore(t, testConfig(m))
	list, err := s.List(ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Empty(t, list, "the image's front pages are not at their places")
	require.NoError(t, s.Close())
}

// TestPoolIsBounded: what is freed is kept for reuse up to the bound, and what
// is above goes back to the file system.
func TestPoolIsBounded(t *testing.T) {
	m := newMem(t, 128<<20)
	clock := &steps{}
	cfg := testConfig(m)
	cfg.Sched = clock
	s := openStore(t, cfg)
	var keys []ids.ChunkKey
	for n := range uint64(100) {
		h := chunktest.Header(chunktest.Key(n, 0), 256<<10)
		chunktest.Store(t, s, h, chunktest.Bytes(h.Key, 256<<10))
		keys = append(keys, h.Key)
	}
	_, before, err := m.Space()
	require.NoError(t, err)
	usageBefore := s.Usage()
	// Every other chunk goes: no segment becomes empty, ranges are punched.
	var gone, kept []ids.ChunkKey
	for i, k := range keys {
		if i%2 == 0 {
			gone = append(gone, k)
		} else {
			kept = append(kept, k)
		}
	}
	require.NoError(t, s.Delete(gone))
	for range 5 {
		clock.advance(time.Minute)
		require.NoError(t, s.Maintain())
	}
	require.NoError(t, s.Check())
	_, after, err := m.Space()
	require.NoError(t, err)
	freed := int64(len(gone)) * (256<<10 + pageSize)
	require.GreaterOrEqual(t, int64(after)-int64(before), freed-cfg.PoolBytes-8<<20)
	require.InDelta(t, float64(usageBefore.Free)+float64(freed), float64(s.Usage().Free), float64(10<<20), "log and segments aside")
	// The rest goes too: whole segments are removed.
	require.NoError(t, s.Delete(kept))
	for range 5 {
		clock.advance(time.Minute)
		require.NoError(t, s.Maintain())
	}
	names, err := m.List(segDir)
	require.NoError(t, err)
	require.LessOrEqual(t, len(names), 6)
	require.NoError(t, s.Check())
	require.NoError(t, s.Close())
	s = openStore(t, cfg)
	require.NoError(t, s.Check())
	require.Zero(t, s.Usage().Chunks)
	require.NoError(t, s.Close())
}

// TestReuseIsFirst: deleted space is taken again before the disk gives more.
func TestReuseIsFirst(t *testing.T) {
	m := newMem(t, 128<<20)
	clock := &steps{}
	cfg := testConfig(m)
	cfg.Sched = clock
	cfg.PoolBytes = 64 << 20
	s := openStore(t, cfg)
	for round := range uint64(20) {
		var keys []ids.ChunkKey
		for n := range uint64(10) {
			h := chunktest.Header(chunktest.Key(round<<8|n, 0), 256<<10)
			chunktest.Store(t, s, h, chunktest.Bytes(h.Key, 256<<10))
			keys = append(keys, h.Key)
		}
		require.NoError(t, s.Delete(keys))
		clock.advance(time.Minute)
		require.NoError(t, s.Maintain())
	}
	names, err := m.List(segDir)
	require.NoError(t, err)
	require.Less(t, len(names), 12, "200 chunks of 256 KiB went through segments of 1 MiB")
	require.NoError(t, s.Close())
}

func TestSecondProcess(t *testing.T) {
	o, err := vfs.NewOS(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, Format(o, testIdentity))
	s := openStore(t, testConfig(o))
	_, err = Open(testConfig(o))
	require.ErrorIs(t, err, errkind.Busy)
	require.NoError(t, s.Close())
	s = openStore(t, testConfig(o))
	require.NoError(t, s.Close())
	_, err = s.Pin(chunktest.Key(1, 0))
	require.ErrorIs(t, err, errkind.Internal)
}

// TestAbandonOpen: chunks left open by an earlier life are deleted, those of
// this life are not.
func TestAbandonOpen(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	require.NoError(t, s.Open(chunktest.Header(chunktest.Key(1, 0), 1<<19)))
	s = openStore(t, testConfig(m)) // the first process was killed
	list, err := s.List(ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Equal(t, []chunk.Info{{Key: chunktest.Key(1, 0), State: chunk.StateOpen}}, list)
	require.ErrorIs(t, s.Open(chunktest.Header(chunktest.Key(1, 0), 1<<19)), errkind.Conflict)
	require.NoError(t, s.Open(chunktest.Header(chunktest.Key(2, 0), 1<<19)))
	require.Equal(t, []ids.ChunkKey{chunktest.Key(2, 0)}, s.Young())
	require.Empty(t, s.Young())
	n, err := s.AbandonOpen()
	require.NoError(t, err)
	require.Equal(t, 1, n)
	list, err = s.List(ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.NoError(t, s.Check())
	require.NoError(t, s.Close())
}

// TestSealDuringSync: a seal whose writes end while an fdatasync runs is not
// covered by it (data-path rule 8).
func TestSealDuringSync(t *testing.T) {
	m := newMem(t, 64<<20)
	s := openStore(t, testConfig(m))
	begin := func(n uint64) {
		h := chunktest.Header(chunktest.Key(n, 0), 64<<10)
		require.NoError(t, s.Open(h))
		chunktest.PutAll(t, s, h, chunktest.Bytes(h.Key, 64<<10))
	}
	begin(1)
	begin(2)
	first, err := s.Seal(chunktest.Key(1, 0), 64<<10)
	require.NoError(t, err)
	var second chunk.Sealed
	syncs := 0
	m.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpSync {
			if syncs++; syncs == 1 {
				second, err = s.Seal(chunktest.Key(2, 0), 64<<10)
			}
		}
		return err
	})
	require.NoError(t, s.Sync(first.Ticket))
	require.Equal(t, 1, syncs)
	require.NoError(t, s.Sync(second.Ticket))
	require.Equal(t, 2, syncs, "the second seal needs a sync of its own")
	m.SetHook(nil)
	require.NoError(t, s.Close())
}
