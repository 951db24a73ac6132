package client

import (
	"context"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Bounds of a small block's copies.
const (
	storeTimeout = 10 * time.Second
	maxHedges    = 2 // further servers asked for a copy because one is silent
	maxLateTries = 3 // servers asked for a late copy after the commit
)

// small is a whole block of copies, each written by one message. It is the
// chunk.BlockWriter of a block that is sealed already.
type small struct {
	c    *Client
	spec chunk.BlockSpec
	what wire.Store
	sum  uint64 // digest
	n    int    // bytes of the block

	mu struct {
		sync.Mutex
		phase   phase
		place   *placement
		tries   []*try
		slots   []ids.DiskID // where each copy is durable
		hedges  []int        // by index
		late    []int        // tries after the commit, by index
		block   ids.Block
		refusal string
		flight  int
		buf     *buffer // the padded bytes; nil once freed
		kept    *lateCell
	}
	cond sched.Cond
}

// try is one message for one copy.
type try struct {
	peer
	index  int
	since  time.Duration
	open   bool // an answer may come, now or after a pause
	hedged bool
	cancel func()
}

// WriteBlock writes a whole small block. See chunk.Blocks.
func (c *Client) WriteBlock(ctx context.Context, spec chunk.BlockSpec, data []byte) (ids.Block, chunk.BlockWriter, error) {
	if len(data) < 1 || len(data) > chunk.SmallBlock {
		return ids.Block{}, nil, errkind.Invalid.Wrap("write a small block of %d bytes, want 1 to %d", len(data), chunk.SmallBlock)
	}
	if err := spec.Layout.Validate(); err != nil {
		return ids.Block{}, nil, errkind.Invalid.Wrap("write a small block: %v", err)
	}
	deadline := c.sched.Now() + c.cfg.Timeout
	skip := make(map[ids.DiskID]bool)
	for {
		m := c.cfg.Map()
		if m == nil {
			return ids.Block{}, nil, errkind.Unavailable.Wrap("write a small block: no cluster map yet")
		}
		w := c.newSmall(spec, data, c.place(m, spec.Layout.Width(), skip))
		err := w.run(ctx)
		if err == nil {
			return cloneBlock(w.mu.block), w, nil
		}
		w.Abandon()
		if ctxErr := ended(ctx, err.Error()); ctxErr != nil {
			return ids.Block{}, nil, ctxErr
		}
		again := errkind.Of(err) == errkind.Unavailable || errkind.Of(err) == errkind.NoSpace && w.mu.place.outs > 0
		if !again || c.sched.Now() >= deadline {
			return ids.Block{}, nil, err
		}
		if !c.health.waitChange(100 * time.Millisecond) {
			return ids.Block{}, nil, errkind.Unavailable.Wrap("write a small block: the client is closed (%v)", err)
		}
	}
}

func (c *Client) newSmall(spec chunk.BlockSpec, data []byte, place *placement) *small {
	l := spec.Layout.Small()
	n := ec.ChunkLen(l, len(data))
	w := &small{c: c, spec: spec, n: len(data)}
	w.cond = c.sched.NewCond(&w.mu)
	w.mu.place = place
	w.mu.buf = c.buffer(n)
	clear(w.mu.buf.p[copy(w.mu.buf.p, data):])
	w.what = wire.Store{Open: wire.Open{
		Key: ids.ChunkKey{Block: spec.NextID()}, Layout: l, Ino: spec.Ino, FileOff: spec.FileOff,
		Reserve: uint32(n), Granule: ec.Granule(l, n),
	}}
	w.what.Sums = ec.Sums(nil, w.mu.buf.p, w.what.Granule)
	w.sum = ec.Digest(w.what.Sums)
	w.mu.slots = make([]ids.DiskID, l.Width())
	w.mu.hedges, w.mu.late = make([]int, l.Width()), make([]int, l.Width())
	return w
}

// run sends the copies and waits for a quorum, and a moment for the last one.
func (w *small) run(ctx context.Context) error {
	defer wake(ctx, &w.mu, w.cond)()
	w.mu.Lock()
	defer w.mu.Unlock()
	var first []peer
	for range w.mu.slots {
		p, ok := w.mu.place.next()
		if !ok {
			return tooFew(w.spec.Layout, len(first), w.mu.place, "")
		}
		first = append(first, p)
		w.what.Siblings = append(w.what.Siblings, p.disk)
	}
	for i, p := range first {
		w.store(p, i, false)
	}
	start, quorum, grace := w.c.sched.Now(), w.what.Layout.Quorum(), time.Duration(0)
	for {
		now := w.c.sched.Now()
		filled, open := w.count()
		if filled >= quorum && grace == 0 {
			grace = now + max(minSealGrace, 2*(now-start))
		}
		switch {
		case filled == len(w.mu.slots), filled >= quorum && (open == 0 || now >= grace):
			w.sealed()
			return nil
		case filled+open < quorum:
			return errkind.Unavailable.Wrap("write small block %s: %d copies durable, %d are needed; %s", w.what.Key.Block, filled, quorum, w.mu.refusal)
		case now-start >= w.c.cfg.Timeout:
			return errkind.Timeout.Wrap("write small block %s: %d copies durable after %s, %d are needed", w.what.Key.Block, filled, now-start, quorum)
		}
		if err := ended(ctx, "write small block "+w.what.Key.Block.String()); err != nil {
			return err
		}
		wait := w.hedge()
		if grace > 0 {
			wait = min(wait, grace-now)
		}
		w.cond.WaitFor(wait)
	}
}

// count returns the copies that are durable, and the indices whose copy may
// still come.
func (w *small) count() (filled, open int) {
	for i, disk := range w.mu.slots {
		switch {
		case disk != 0:
			filled++
		case w.pending(i) != nil:
			open++
		}
	}
	return filled, open
}

// pending is the newest try for an index that may still bring the copy.
func (w *small) pending(index int) *try {
	for i := len(w.mu.tries) - 1; i >= 0; i-- {
		if t := w.mu.tries[i]; t.index == index && t.open {
			return t
		}
	}
	return nil
}

// hedge asks further servers for copies that are late, and returns when to
// look again.
func (w *small) hedge() time.Duration {
	limit, now := w.c.health.storeSilence(), w.c.sched.Now()
	next := limit
	for i, disk := range w.mu.slots {
		t := w.pending(i)
		if disk != 0 || t == nil || t.hedged {
			continue
		}
		if left := limit - (now - t.since); left > 0 {
			next = min(next, left)
			continue
		}
		t.hedged = true
		w.c.health.probe(t.peer)
		if w.mu.hedges[i] < maxHedges {
			w.mu.hedges[i]++
			if p, ok := w.mu.place.next(); ok {
				w.store(p, i, false)
			}
		}
	}
	return next
}

func (w *small) store(p peer, index int, background bool) {
	t := &try{peer: p, index: index, open: true}
	w.mu.tries = append(w.mu.tries, t)
	w.sendTry(t, background)
}

func (w *small) sendTry(t *try, background bool) {
	m := w.what
	m.Disk, m.Key.Index = t.disk, uint8(t.index)
	req := &wire.Request{Op: wire.OpStore, Body: &m, Payload: [][]byte{w.mu.buf.p}}
	if background {
		req.Class = wire.ClassBackground
	}
	t.since = w.c.sched.Now()
	w.mu.flight++
	t.cancel = w.c.send(t.peer, req, storeTimeout, func(r reply) { w.answered(t, r) })
}

func (w *small) answered(t *try, r reply) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.cond.Broadcast()
	defer w.settle()
	w.mu.flight--
	t.cancel = nil
	got, ok := bodyOf[*wire.Sealed](r)
	busy := errkind.Of(r.err) == errkind.Busy
	t.open = busy
	switch {
	case w.mu.phase == phaseEnded || w.mu.slots[t.index] != 0:
		t.open = false
	case ok && got.Digest == w.sum:
		w.c.health.stored(r.took)
		w.mu.slots[t.index] = t.disk
		if w.mu.phase == phaseCommitted {
			w.placed(t.index)
		}
		for _, o := range w.mu.tries {
			if o != t && o.index == t.index && o.cancel != nil {
				o.cancel()
			}
		}
	case busy:
		w.c.sched.AfterFunc(r.busyDelay(), func() { w.retry(t) })
	default:
		if r.err != nil {
			w.mu.refusal = r.err.Error()
		}
		w.mu.place.drop(t.peer)
		w.another(t.index)
	}
}

func bodyOf[T any](r reply) (T, bool) {
	var none T
	if r.err != nil || r.Response == nil {
		return none, false
	}
	b, ok := r.Body.(T)
	return b, ok
}

// retry sends a copy again to a server that was busy.
func (w *small) retry(t *try) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !t.open || w.mu.phase == phaseEnded || w.mu.slots[t.index] != 0 || w.mu.buf == nil {
		t.open = false
		w.settle()
		w.cond.Broadcast()
		return
	}
	w.sendTry(t, w.mu.phase != phaseWriting)
}

// another asks a further server for a copy, unless one is asked already.
func (w *small) another(index int) {
	if w.pending(index) != nil || w.mu.buf == nil {
		return
	}
	if w.mu.phase != phaseWriting {
		if w.mu.late[index]++; w.mu.late[index] > maxLateTries {
			return
		}
	}
	if p, ok := w.mu.place.next(); ok {
		w.store(p, index, w.mu.phase != phaseWriting)
	}
}

// sealed fixes the block at the copies that are durable now. Bytes kept for a
// late copy count in the late pool.
func (w *small) sealed() {
	w.mu.phase = phaseSealed
	b := ids.Block{
		ID: w.what.Key.Block, Layout: w.what.Layout, Length: uint32(w.n), Logical: uint32(w.n),
		Codec: ids.CodecNone, Granule: w.what.Granule,
	}
	for i, disk := range w.mu.slots {
		b.Disks = append(b.Disks, disk)
		b.Digests = append(b.Digests, w.sum)
		w.c.tables.add(ids.ChunkKey{Block: b.ID, Index: uint8(i)}, w.sum, w.what.Sums)
	}
	w.mu.block = b
	if w.missing() && w.mu.buf != nil {
		w.mu.kept = w.c.late.keep(len(w.mu.buf.p), w.Abandon)
		if w.mu.kept == nil {
			w.end()
		}
	}
	w.settle()
}

func (w *small) missing() bool {
	for _, disk := range w.mu.slots {
		if disk == 0 {
			return true
		}
	}
	return false
}

// settle frees the bytes when nobody will send them any more.
func (w *small) settle() {
	waits := w.mu.phase != phaseEnded && w.missing()
	if waits && w.mu.phase == phaseCommitted {
		waits = false
		for i, disk := range w.mu.slots {
			waits = waits || disk == 0 && w.pending(i) != nil
		}
	}
	if waits || w.mu.flight > 0 || w.mu.buf == nil || w.mu.phase == phaseWriting {
		return
	}
	w.c.free(w.mu.buf)
	w.c.late.release(w.mu.kept)
	w.mu.buf, w.mu.kept = nil, nil
}

// placed reports a copy that became durable after the block was sealed.
func (w *small) placed(index int) {
	w.c.reportPlaced(ids.ChunkKey{Block: w.what.Key.Block, Index: uint8(index)}, w.mu.slots[index], w.mu.block.Version)
}

// Layout is that of the copies.
func (w *small) Layout() ids.Layout { return w.what.Layout }

// Append refuses: the block is complete.
func (w *small) Append(_ context.Context, _ []byte, release func(bool)) error {
	w.c.sched.Go("release stripes", func() { release(false) })
	return errkind.Invalid.Wrap("append to block %s: it is sealed", w.what.Key.Block)
}

// Seal refuses: the block was sealed by WriteBlock.
func (w *small) Seal(context.Context) (ids.Block, error) {
	return ids.Block{}, errkind.Invalid.Wrap("seal block %s: it is sealed already", w.what.Key.Block)
}

// Committed tells that the block is part of a file. See chunk.BlockWriter.
func (w *small) Committed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.phase != phaseSealed {
		return
	}
	w.mu.phase = phaseCommitted
	for i, disk := range w.mu.block.Disks {
		switch {
		case disk != 0:
		case w.mu.slots[i] != 0:
			w.placed(i)
		default:
			w.another(i)
		}
	}
	w.settle()
}

// Abandon gives the block up; copies that are durable are left to garbage
// collection.
func (w *small) Abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.end()
}

func (w *small) end() {
	w.mu.phase = phaseEnded
	for _, t := range w.mu.tries {
		if t.cancel != nil {
			t.cancel()
		}
	}
	w.settle()
}
