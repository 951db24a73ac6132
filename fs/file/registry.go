package file

import (
	"context"
	"slices"
	"sync"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// blockIDs knows which block ids of the session may still be committed.
type blockIDs struct {
	ids IDs
	mu  struct {
		sync.Mutex
		next uint64   // above every counter handed out
		out  []uint64 // counters handed out and not settled, ascending
	}
}

// next makes an id.
func (b *blockIDs) next(slot ids.Slot) ids.BlockID {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := b.ids.NextBlockID(slot)
	c := id.Counter()
	i, _ := slices.BinarySearch(b.mu.out, c)
	b.mu.out = slices.Insert(b.mu.out, i, c)
	b.mu.next = max(b.mu.next, c+1)
	return id
}

// retire settles ids: committed, or never to be.
func (b *blockIDs) retire(list []ids.BlockID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range list {
		if i, ok := slices.BinarySearch(b.mu.out, id.Counter()); ok {
			b.mu.out = slices.Delete(b.mu.out, i, i+1)
		}
	}
}

// floorWithout is the lowest counter that may be committed after blocks are.
func (b *blockIDs) floorWithout(blocks []ids.Block) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.mu.out {
		if !slices.ContainsFunc(blocks, func(x ids.Block) bool { return x.ID.Counter() == c }) {
			return c
		}
	}
	return b.mu.next
}

// version names the content of a file.
type version struct{ mapVersion, size uint64 }

// memory remembers one value for each of a bounded number of inodes, oldest
// forgotten first.
type memory[V any] struct {
	limit int
	byIno map[ids.Ino]V
	order []ids.Ino
}

func (m *memory[V]) put(ino ids.Ino, v V) {
	if m.byIno == nil {
		m.byIno = map[ids.Ino]V{}
	}
	if _, ok := m.byIno[ino]; !ok {
		m.order = append(m.order, ino)
	}
	m.byIno[ino] = v
	for len(m.byIno) > m.limit {
		delete(m.byIno, m.order[0])
		m.order = m.order[1:]
	}
}

func (m *memory[V]) take(ino ids.Ino) (v V, ok bool) {
	if v, ok = m.byIno[ino]; ok {
		delete(m.byIno, ino)
		i := slices.Index(m.order, ino)
		m.order = slices.Delete(m.order, i, i+1)
	}
	return v, ok
}

// releaseBatch is how many pending releases are sent without waiting longer.
const releaseBatch = 128

// sendReleases tells the metadata service which inodes are no longer open.
// One call at a time; an open of one of them waits for it.
func (e *Engine) sendReleases() {
	e.mu.Lock()
	if len(e.mu.releases) == 0 || len(e.mu.releasing) > 0 {
		e.mu.Unlock()
		return
	}
	e.mu.releasing, e.mu.releases = e.mu.releases, nil
	req := &api.Release{Inos: e.mu.releasing}
	e.mu.Unlock()
	ctx, stop := e.opContext(context.Background())
	err := e.cfg.Meta.Do(ctx, req, &api.Empty{})
	stop()
	if err != nil {
		e.cfg.Log.Warn("closed files stay registered as open until the session renews", "count", len(req.Inos), "err", err)
	}
	e.mu.Lock()
	e.mu.releasing = nil
	e.cond.Broadcast()
	e.mu.Unlock()
}

// reopen takes the inode out of the pending releases, waiting for one that is
// under way, so that no release overtakes the open that follows.
func (e *Engine) reopen(ctx context.Context, n *inode) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	deadline := e.deadline()
	for slices.Contains(e.mu.releasing, n.ino) {
		if err := waitOn(ctx, e.cfg.Sched, e.cond, deadline); err != nil {
			return err
		}
	}
	e.mu.releases = slices.DeleteFunc(e.mu.releases, func(i ids.Ino) bool { return i == n.ino })
	n.registered = true
	return nil
}
