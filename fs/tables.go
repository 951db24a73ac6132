package fs

import (
	"sync"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// minPeak is the size below which a map is never rebuilt.
const minPeak = 256

// shrinkMap is a map that gives memory back: Go's own never does. Not safe for
// concurrent use.
type shrinkMap[K comparable, V any] struct {
	m    map[K]V
	peak int
}

func (s *shrinkMap[K, V]) set(k K, v V) {
	if s.m == nil {
		s.m = make(map[K]V)
	}
	s.m[k] = v
	s.peak = max(s.peak, len(s.m))
}

func (s *shrinkMap[K, V]) remove(k K) {
	delete(s.m, k)
	if s.peak > minPeak && len(s.m) < s.peak/4 {
		m := make(map[K]V, len(s.m))
		for k, v := range s.m {
			m[k] = v
		}
		s.m, s.peak = m, len(m)
	}
}

// table gives handles numbers. Numbers are never reused.
type table[T any] struct {
	mu struct {
		sync.RWMutex
		next uint64
		all  shrinkMap[uint64, T]
	}
}

func (t *table[T]) init() { t.mu.next = 1 }

func (t *table[T]) add(v T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	fh := t.mu.next
	t.mu.next++
	t.mu.all.set(fh, v)
	return fh
}

func (t *table[T]) get(fh uint64) (T, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	v, ok := t.mu.all.m[fh]
	return v, ok
}

func (t *table[T]) take(fh uint64) (T, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok := t.mu.all.m[fh]
	t.mu.all.remove(fh)
	return v, ok
}

const nodeShards = 32

// What is remembered of an inode that the kernel references, besides the count:
// enough to answer the kernel's questions for ACLs and capabilities, which it
// asks at every step of a path, without a call.
const (
	nodeACL uint64 = 1 << iota
	nodeCaps
	nodeSetID // has set-id bits that a write must clear
	nodeKnown // the other bits are known
	nodeCount // one reference of the kernel
)

// nodes counts the kernel's references, 16 bytes an inode.
type nodes struct {
	shards [nodeShards]struct {
		mu struct {
			sync.Mutex
			all shrinkMap[ids.Ino, uint64]
		}
	}
}

func nodeBits(a *api.Attr) uint64 {
	bits := nodeKnown
	if a.Flags&api.FlagACL != 0 {
		bits |= nodeACL
	}
	if a.Flags&api.FlagCaps != 0 {
		bits |= nodeCaps
	}
	if a.IsRegular() && (a.Mode&api.ModeSetuid != 0 || a.Mode&(api.ModeSetgid|0o010) == api.ModeSetgid|0o010) {
		bits |= nodeSetID
	}
	return bits
}

// see records what attributes say; with ref the kernel gets one more reference.
func (n *nodes) see(a *api.Attr, ref bool) {
	s := &n.shards[uint64(a.Ino)%nodeShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	old, known := s.mu.all.m[a.Ino]
	switch {
	case ref:
		old += nodeCount
	case !known && a.Ino != ids.RootIno:
		return // the kernel has forgotten it meanwhile
	}
	s.mu.all.set(a.Ino, old&^(nodeCount-1)|nodeBits(a))
}

// forget takes n references away.
func (n *nodes) forget(ino ids.Ino, count uint64) {
	s := &n.shards[uint64(ino)%nodeShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.mu.all.m[ino]
	if have := v / nodeCount; have > count {
		s.mu.all.set(ino, v-count*nodeCount)
	} else {
		s.mu.all.remove(ino)
	}
}

// bits returns what is known of an inode.
func (n *nodes) bits(ino ids.Ino) uint64 {
	s := &n.shards[uint64(ino)%nodeShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.all.m[ino] & (nodeCount - 1)
}
