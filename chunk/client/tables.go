package client

import (
	"context"
	"slices"
	"sync"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// tables caches the checksum tables of chunks, each verified against a digest:
// the oldest entries go first.
type tables struct {
	mu struct {
		sync.Mutex
		budget, used int64
		byKey        map[ids.ChunkKey]tableEntry
		fifo         []ids.ChunkKey
	}
}

type tableEntry struct {
	digest uint64
	sums   []uint64
}

// tableOverhead is what an entry costs besides its sums, in bytes.
const tableOverhead = 96

func newTables(budget int64) *tables {
	t := &tables{}
	t.mu.budget = budget
	t.mu.byKey = make(map[ids.ChunkKey]tableEntry)
	return t
}

// add keeps a table whose digest has been checked. sums must not change.
func (t *tables) add(key ids.ChunkKey, digest uint64, sums []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.mu.byKey[key]; ok {
		return
	}
	t.mu.byKey[key] = tableEntry{digest, sums}
	t.mu.fifo = append(t.mu.fifo, key)
	t.mu.used += int64(8*len(sums) + tableOverhead)
	for t.mu.used > t.mu.budget && len(t.mu.fifo) > 0 {
		old := t.mu.fifo[0]
		t.mu.fifo = t.mu.fifo[1:]
		t.mu.used -= int64(8*len(t.mu.byKey[old].sums) + tableOverhead)
		delete(t.mu.byKey, old)
	}
}

// get returns the table of a chunk with exactly that digest, or nil.
func (t *tables) get(key ids.ChunkKey, digest uint64) []uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.mu.byKey[key]; ok && e.digest == digest {
		return e.sums
	}
	return nil
}

// window bounds the bytes that reads have in flight, and lets them in in the
// order in which they came. One read larger than the window passes alone.
type window struct {
	c  *Client
	mu struct {
		sync.Mutex
		limit, used int64
		queue       []*windowWait
	}
}

type windowWait struct {
	n       int64
	granted bool
	cond    sched.Cond
}

func newWindow(c *Client, limit int64) *window {
	w := &window{c: c}
	w.mu.limit = limit
	return w
}

// try takes n bytes unless that means waiting, or passing those who wait.
func (w *window) try(n int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.mu.queue) > 0 || w.mu.used+n > w.mu.limit {
		return false
	}
	w.mu.used += n
	return true
}

// acquire waits for n bytes.
func (w *window) acquire(ctx context.Context, n int64) error {
	x := &windowWait{n: n, cond: w.c.sched.NewCond(&w.mu)}
	defer wake(ctx, &w.mu, x.cond)()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.queue = append(w.mu.queue, x)
	for w.serve(); !x.granted; x.cond.Wait() {
		if err := ended(ctx, "wait for the read window"); err != nil {
			w.mu.queue = slices.DeleteFunc(w.mu.queue, func(o *windowWait) bool { return o == x })
			w.serve()
			return err
		}
	}
	return nil
}

// serve lets in whom there is room for.
func (w *window) serve() {
	for len(w.mu.queue) > 0 {
		x := w.mu.queue[0]
		if w.mu.used > 0 && w.mu.used+x.n > w.mu.limit {
			return
		}
		w.mu.queue = w.mu.queue[1:]
		w.mu.used += x.n
		x.granted = true
		x.cond.Broadcast()
	}
}

func (w *window) release(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.used -= n
	w.serve()
}

// Hedging may add a tenth of the bytes read (rule 22), with a burst so that the
// first reads of a mount may hedge too.
const (
	hedgeShare = 10
	hedgeBurst = 16 << 20
)

// budget counts bytes that hedged reads may fetch.
type budget struct {
	sync.Mutex
	tokens int64
}

func (b *budget) earn(n int) {
	b.Lock()
	defer b.Unlock()
	b.tokens = min(b.tokens+int64(n)/hedgeShare, hedgeBurst)
}

func (b *budget) take(n int) bool {
	b.Lock()
	defer b.Unlock()
	if b.tokens < int64(n) {
		return false
	}
	b.tokens -= int64(n)
	return true
}
