package vfs

import (
	"maps"
	"path"
	"slices"
)

// Rand supplies the choices of a crash; *rand.Rand and sched.Sched do.
type Rand interface{ Uint64() uint64 }

// sector is what a disk writes as a whole even when the power fails.
const sector = 512

// CrashClone returns the file system as it might be found after the power
// failed now; m itself is untouched. Each page that was not synced is kept,
// lost, or torn at a sector's border; each change of a name that SyncDir did
// not cover is kept or lost, a rename as a whole. A nil rng loses all of it.
func (m *Mem) CrashClone(rng Rand) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &Mem{}
	c.mu.memState = m.mu.crashed(rng)
	return c
}

// Crash does in place what CrashClone does: open files are dead afterwards,
// and the hook and the read-only state are gone.
func (m *Mem) Crash(rng Rand) {
	m.mu.Lock()
	defer m.mu.Unlock()
	life := m.mu.life + 1
	m.mu.memState = m.mu.crashed(rng)
	m.mu.life = life
}

func (s *memState) crashed(rng Rand) memState {
	names := maps.Clone(s.durable)
	for _, op := range s.pending {
		if rng != nil && rng.Uint64()&1 == 0 {
			op.apply(names)
		}
	}
	out := memState{names: map[string]*inode{}, durable: map[string]*inode{}, capacity: s.capacity}
	clones := map[*inode]*inode{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		// A file whose directory was lost is lost with it; parents sort first.
		if _, ok := out.names[path.Dir(name)]; !ok && name != "." {
			continue
		}
		ino := names[name]
		var c *inode
		if ino != nil {
			if c = clones[ino]; c == nil {
				c = ino.crashed(rng)
				clones[ino] = c
				out.used += c.held() * PageSize
			}
			c.links++
		}
		out.names[name], out.durable[name] = c, c
	}
	return out
}

func (n *inode) crashed(rng Rand) *inode {
	c := &inode{durable: maps.Clone(n.durable), dirty: map[int64]struct{}{}, size: n.durableSize}
	if n.sizeDirty && rng != nil && rng.Uint64()&1 == 0 {
		c.size = n.size
	}
	for _, p := range slices.Sorted(maps.Keys(n.dirty)) {
		if rng == nil {
			break
		}
		switch pick := rng.Uint64(); pick & 7 {
		case 0, 1, 2: // lost
		case 3:
			c.durable[p] = torn(n.durable[p], n.cur[p], pick>>8)
		default:
			c.setDurable(p, n.cur[p])
		}
	}
	c.durableSize = c.size
	maps.DeleteFunc(c.durable, func(p int64, _ *page) bool { return p*PageSize >= c.size })
	c.cur = maps.Clone(c.durable)
	c.alloc = slices.Clone(n.alloc)
	for p := range int64(len(c.alloc)) * 64 {
		if c.has(p) && p*PageSize >= c.size {
			c.hold(p, false)
		}
	}
	for p := range c.cur {
		c.hold(p, true)
	}
	if tail := c.size % PageSize; tail != 0 && c.cur[c.size/PageSize] != nil {
		// Bytes beyond the end read as zeros when the file grows again.
		pg := *c.cur[c.size/PageSize]
		clear(pg[tail:])
		c.cur[c.size/PageSize], c.durable[c.size/PageSize] = &pg, &pg
	}
	return c
}

func (n *inode) setDurable(p int64, pg *page) {
	if pg == nil {
		delete(n.durable, p)
		return
	}
	n.durable[p] = pg
}

// torn mixes the sectors of two versions of a page.
func torn(before, after *page, choice uint64) *page {
	var mix page
	for i := 0; i < PageSize/sector; i++ {
		from := before
		if choice>>i&1 == 1 {
			from = after
		}
		if from != nil {
			copy(mix[i*sector:(i+1)*sector], from[i*sector:])
		}
	}
	return &mix
}

// Flip inverts one bit of a file's content, behind the back of every reader
// and of the sync state: damage on the medium. It reports whether there is a
// page at that offset.
func (m *Mem) Flip(name string, off int64, bit uint) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	ino := m.mu.names[path.Clean(name)]
	if ino == nil || ino.cur[off/PageSize] == nil {
		return false
	}
	p := off / PageSize
	cur := ino.cur[p]
	shared := cur == ino.durable[p]
	c := *cur
	c[off%PageSize] ^= 1 << (bit & 7)
	ino.cur[p] = &c
	if shared {
		ino.durable[p] = &c
	}
	return true
}
