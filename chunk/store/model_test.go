package store

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// fate is what the model knows of a chunk.
type fate uint8

const (
	fateOpen    fate = iota // never to be read
	fateSealed              // sealed, its sync has not returned: whole or gone after a crash
	fateDurable             // there, whatever happens
	fateGone                // deleted: never again
	fateMaybe               // a crash came while it was being deleted
	fateDropped             // deleted before its seal: a crash may bring it back, open
)

type modelChunk struct {
	header chunk.Header
	data   []byte
	fate   fate
	ticket uint64
	// ghost: a crash ended its deletion between the front page and the log. It
	// may be listed until it is deleted again, and is never readable: the page
	// is zero, or torn.
	ghost bool
}

// machine drives a store on a disk that crashes, and checks it against a model.
type machine struct {
	mem    *vfs.Mem
	clock  *steps
	store  *Store
	chunks map[ids.ChunkKey]*modelChunk
	next   uint64
	pinned []chunk.Reader
	// doomed is the disk as a crash in the middle of the current action left it.
	doomed *vfs.Mem
}

func newMachine(t *rapid.T) *machine {
	m := &machine{clock: &steps{}, chunks: map[ids.ChunkKey]*modelChunk{}}
	m.mem = vfs.NewMem()
	m.mem.SetCapacity(48 << 20)
	require.NoError(t, Format(m.mem, testIdentity))
	m.open(t)
	return m
}

func (m *machine) open(t *rapid.T) {
	cfg := testConfig(m.mem)
	cfg.Sched = m.clock
	cfg.SegmentSize = 256 << 10
	cfg.PoolBytes = 512 << 10
	m.store = openStore(t, cfg)
}

// during runs an action; with some luck the power fails in the middle of it.
func (m *machine) during(t *rapid.T, action func()) {
	at := rapid.IntRange(0, 40).Draw(t, "crash at operation")
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "crash"), 0))
	n := 0
	m.mem.SetHook(func(c vfs.Call) error {
		if n++; n == at && m.doomed == nil {
			m.doomed = m.mem.CrashClone(rng)
		}
		return nil
	})
	action()
	m.mem.SetHook(nil)
}

// restart goes on with another state of the disk, or the same.
func (m *machine) restart(t *rapid.T, disk *vfs.Mem) {
	for _, r := range m.pinned {
		r.Close()
	}
	m.pinned, m.mem, m.doomed = nil, disk, nil
	m.open(t)
	m.verify(t)
	_, err := m.store.AbandonOpen()
	require.NoError(t, err)
	for _, c := range m.chunks {
		if c.fate == fateOpen {
			c.fate = fateDropped
		}
	}
}

// verify compares all that the store has with the model; what was undecided
// is decided by it.
func (m *machine) verify(t *rapid.T) {
	require.NoError(t, m.store.Check())
	list, err := m.store.List(ids.ChunkKey{}, 1<<20)
	require.NoError(t, err)
	states := map[ids.ChunkKey]chunk.State{}
	for _, i := range list {
		states[i.Key] = i.State
		require.Contains(t, m.chunks, i.Key, "an unknown chunk")
	}
	for key, c := range m.chunks {
		_, err := m.store.Pin(key)
		there := err == nil
		if err != nil && (c.fate != fateMaybe && !c.ghost || !errors.Is(err, errkind.Corrupt)) {
			require.ErrorIs(t, err, errkind.NoChunk, "chunk %s", key)
		}
		switch c.fate {
		case fateOpen, fateDropped:
			require.False(t, there, "open chunk %s is readable", key)
			require.NotEqual(t, chunk.StateSealed, states[key])
		case fateGone:
			require.False(t, there, "chunk %s came back", key)
			if !c.ghost {
				require.NotContains(t, states, key)
			}
		case fateDurable:
			require.True(t, there, "chunk %s is lost", key)
		default:
			c.ghost = c.fate == fateMaybe
			switch {
			case there:
				c.fate = fateDurable
			case states[key] == chunk.StateOpen:
				c.fate = fateDropped // its seal is torn
			default:
				c.fate = fateGone
			}
		}
		if there {
			chunktest.RequireChunk(t, m.store, key, c.data)
		}
	}
	m.unpinAll()
}

// unpinAll forgets the pins that verify made: the table is rebuilt instead of
// keeping every reader.
func (m *machine) unpinAll() {
	m.store.mu.Lock()
	defer m.store.mu.Unlock()
	for at, p := range m.store.mu.pins {
		if len(p.freed) == 0 {
			p.seg.pins -= p.count
			delete(m.store.mu.pins, at)
		}
	}
}

func (m *machine) pick(t *rapid.T, of ...fate) *modelChunk {
	var keys []ids.ChunkKey
	for key, c := range m.chunks {
		if slices.Contains(of, c.fate) {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		t.Skip("no such chunk")
	}
	slices.SortFunc(keys, compareKeys)
	return m.chunks[rapid.SampledFrom(keys).Draw(t, "chunk")]
}

func (m *machine) header(t *rapid.T) (chunk.Header, []byte) {
	m.next++
	key := chunktest.Key(m.next, uint8(rapid.IntRange(0, 2).Draw(t, "index")))
	h := chunktest.Header(key, uint32(rapid.IntRange(0, 40).Draw(t, "reserve"))*4096)
	h.Layout, h.Granule = ids.Copies(3), 12
	return h, chunktest.Bytes(key, rapid.IntRange(0, int(h.Reserve)).Draw(t, "length"))
}

// crashed restarts on the disk that the last action's crash left, if there was
// one. Without one it reports false.
func (m *machine) crashed(t *rapid.T) bool {
	if m.doomed == nil {
		return false
	}
	m.restart(t, m.doomed)
	return true
}

func (m *machine) actOpen(t *rapid.T) {
	h, data := m.header(t)
	m.chunks[h.Key] = &modelChunk{header: h, data: data}
	m.during(t, func() { require.NoError(t, m.store.Open(h)) })
	m.crashed(t)
}

func (m *machine) actSeal(t *rapid.T) {
	c := m.pick(t, fateOpen)
	m.during(t, func() {
		if len(c.data) > 0 {
			require.NoError(t, m.store.Put(c.header.Key, 0, c.data, chunktest.Sums(c.data, 12)))
		}
		done, err := m.store.Seal(c.header.Key, uint32(len(c.data)))
		require.NoError(t, err)
		c.fate, c.ticket = fateSealed, done.Ticket
	})
	m.crashed(t)
}

func (m *machine) actWrite(t *rapid.T) {
	h, data := m.header(t)
	c := &modelChunk{header: h, data: data, fate: fateSealed}
	m.chunks[h.Key] = c
	m.during(t, func() {
		done, err := m.store.Write(h, data, chunktest.Sums(data, 12))
		require.NoError(t, err)
		c.ticket = done.Ticket
	})
	m.crashed(t)
}

func (m *machine) actSync(t *rapid.T) {
	c := m.pick(t, fateSealed)
	m.during(t, func() { require.NoError(t, m.store.Sync(c.ticket)) })
	if m.crashed(t) {
		return
	}
	for _, o := range m.chunks {
		if o.fate == fateSealed && o.ticket <= c.ticket {
			o.fate = fateDurable
		}
	}
}

func (m *machine) actDelete(t *rapid.T) {
	c := m.pick(t, fateOpen, fateSealed, fateDurable)
	before := c.fate
	m.during(t, func() { require.NoError(t, m.store.Delete([]ids.ChunkKey{c.header.Key})) })
	switch {
	case before == fateOpen:
		c.fate = fateDropped
	case m.doomed != nil:
		c.fate = fateMaybe
	default:
		c.fate = fateGone
	}
	if m.crashed(t) {
		return
	}
	_, err := m.store.Pin(c.header.Key)
	require.ErrorIs(t, err, errkind.NoChunk)
}

func (m *machine) actMaintain(t *rapid.T) {
	m.clock.advance(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
	m.during(t, func() { require.NoError(t, m.store.Maintain()) })
	m.crashed(t)
}

func (m *machine) actPin(t *rapid.T) {
	c := m.pick(t, fateDurable)
	r, err := m.store.Pin(c.header.Key)
	require.NoError(t, err)
	m.pinned = append(m.pinned, r)
}

func (m *machine) actUnpin(t *rapid.T) {
	if len(m.pinned) == 0 {
		t.Skip("nothing pinned")
	}
	r := m.pinned[0]
	m.pinned = m.pinned[1:]
	got := make([]byte, r.Length())
	_, err := r.ReadAt(got, 0)
	if len(got) > 0 {
		require.NoError(t, err)
	}
	require.Equal(t, chunktest.Bytes(r.Header().Key, len(got)), got)
	r.Close()
}

func (m *machine) actPowerLoss(t *rapid.T) {
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	m.restart(t, m.mem.CrashClone(rng))
}

// actKill ends the process, not the machine: what was written stays.
func (m *machine) actKill(t *rapid.T) { m.restart(t, m.mem) }

func (m *machine) actClose(t *rapid.T) {
	for _, r := range m.pinned {
		r.Close()
	}
	m.pinned = nil
	require.NoError(t, m.store.Check())
	require.NoError(t, m.store.Close())
	for _, c := range m.chunks {
		if c.fate == fateSealed {
			c.fate = fateDurable // closing syncs
		}
	}
	m.restart(t, m.mem.CrashClone(nil))
}

// actLoseIndex takes the checkpoint away after a clean end: everything is
// found again from the front pages.
func (m *machine) actLoseIndex(t *rapid.T) {
	m.actClose(t)
	require.NoError(t, m.store.Close())
	names, err := m.mem.List(logDir)
	require.NoError(t, err)
	for _, name := range names {
		require.NoError(t, m.mem.Remove(logDir+"/"+name))
	}
	m.restart(t, m.mem)
}

// TestModel: everything sealed and synced survives with the same bytes,
// nothing unsealed becomes readable, what was deleted stays deleted, and the
// space accounts are exact after every restart.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		t.Repeat(map[string]func(*rapid.T){
			"open": m.actOpen, "seal": m.actSeal, "write": m.actWrite, "write2": m.actWrite, "sync": m.actSync,
			"delete": m.actDelete, "maintain": m.actMaintain, "pin": m.actPin, "unpin": m.actUnpin,
			"power loss": m.actPowerLoss, "kill": m.actKill, "close": m.actClose, "lose index": m.actLoseIndex,
		})
		m.verify(t)
	})
}
