package client

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// How long the pieces of a write are waited for.
const (
	watchEvery   = 250 * time.Millisecond // silent servers are probed this often
	stallLimit   = 10 * time.Second       // a stripe without quorum ends the block
	minGrace     = 10 * time.Millisecond  // for the last servers of a stripe
	maxGrace     = 250 * time.Millisecond
	minSealGrace = 20 * time.Millisecond // for the last chunks of a seal
	maxRewrites  = 3
)

// phase of a block.
type phase uint8

const (
	phaseWriting phase = iota
	phaseSealing
	phaseSealed
	phaseCommitted
	phaseEnded // abandoned, or rewritten under another id
)

// writer implements chunk.BlockWriter.
type writer struct {
	c      *Client
	spec   chunk.BlockSpec
	l      ids.Layout
	coder  *ec.Coder
	what   wire.Open // the header of its chunks, without disk and index
	maxLen int
	depth  int // how often the bytes have been rewritten already

	mu struct {
		sync.Mutex
		phase    phase
		senders  []*sender // by chunk index
		stripes  []*stripe // without a quorum yet, in order
		held     int       // stripes whose release has not been called
		appended int       // bytes accepted
		short    bool      // the last stripe was a short one
		length   int       // bytes that a quorum holds, in order from the start
		cut      error     // why nothing more will get into the block
		stop     error     // why no further stripes are taken; those under way go on
		ready    []func()  // releases to call
		block    ids.Block
		inner    []*writer // the blocks that replace this one
	}
	cond sched.Cond
}

var (
	_ chunk.BlockWriter = (*writer)(nil)
	_ chunk.Spiller     = (*writer)(nil)
)

// stripe is one appended stripe. Its memory is the caller's.
type stripe struct {
	off, n   int // in the block
	end      int // of its cells, in the chunks
	born     time.Duration
	release  func(bool)
	refs     int       // items that refer to the caller's memory or to pads
	pads     []*buffer // cells that had to be padded with zeros
	resolved bool      // a quorum holds it, or the block will not contain it
	ok       bool
	watch    sched.Timer
	grace    sched.Timer
}

// NewBlock waits for grants and returns a writer. See chunk.Blocks.
func (c *Client) NewBlock(ctx context.Context, spec chunk.BlockSpec) (chunk.BlockWriter, error) {
	w, err := c.newWriter(ctx, spec)
	if err != nil {
		return nil, err
	}
	return w, nil
}

func (c *Client) newWriter(ctx context.Context, spec chunk.BlockSpec) (*writer, error) {
	if err := spec.Layout.Validate(); err != nil {
		return nil, errkind.Invalid.Wrap("new block: %v", err)
	}
	got, err := c.grants(ctx, spec)
	if err != nil {
		return nil, err
	}
	coder, err := ec.For(got.layout)
	if err != nil {
		return nil, errkind.Internal.Wrap("new block: %v", err)
	}
	w := &writer{c: c, spec: spec, l: got.layout, coder: coder, what: got.what, maxLen: ec.MaxLen(got.layout, spec.MaxLen)}
	w.cond = c.sched.NewCond(&w.mu)
	for i, a := range got.slots {
		w.mu.senders = append(w.mu.senders, &sender{peer: a.peer, index: i, credit: int(a.credit)})
	}
	return w, nil
}

// Layout is the block's own.
func (w *writer) Layout() ids.Layout { return w.l }

func (w *writer) key(i int) ids.ChunkKey {
	return ids.ChunkKey{Block: w.what.Key.Block, Index: uint8(i)}
}

// unlock ends a critical section and has the releases called that it produced:
// on a task of their own, because the user's locks may be held here.
func (w *writer) unlock() {
	ready := w.mu.ready
	w.mu.ready = nil
	w.mu.Unlock()
	if len(ready) > 0 {
		w.c.sched.Go("release stripes", func() {
			for _, fn := range ready {
				fn()
			}
		})
	}
}

// Append hands over the next stripe. See chunk.BlockWriter.
func (w *writer) Append(ctx context.Context, data []byte, release func(ok bool)) error {
	defer wake(ctx, &w.mu, w.cond)()
	w.mu.Lock()
	err := w.admit(ctx, len(data))
	if err != nil {
		w.mu.ready = append(w.mu.ready, func() { release(false) })
		w.unlock()
		return err
	}
	st := &stripe{off: w.mu.appended, n: len(data), born: w.c.sched.Now(), release: release, refs: 1}
	st.end = ec.ChunkLen(w.l, st.off) + ec.CellLen(w.l, len(data), 0)
	w.mu.appended += len(data)
	w.mu.short = len(data) < w.l.StripeData()
	w.mu.held++
	w.mu.stripes = append(w.mu.stripes, st)
	w.mu.Unlock()

	// The stripe is listed already, so a cut meanwhile refuses it like others;
	// one reference keeps its memory until it is encoded.
	items, pads, err := w.encode(st, data)

	w.mu.Lock()
	defer w.unlock()
	if err != nil {
		w.cutBlock(err)
	}
	st.pads = pads
	for _, it := range items {
		if it.shared {
			st.refs++
		}
	}
	st.refs--
	if st.resolved {
		w.settle(st)
		for _, it := range items {
			w.drop(it)
		}
		return w.mu.cut
	}
	for i, s := range w.mu.senders {
		s.sums = append(s.sums, items[i].sums...)
		if s.lost {
			w.drop(items[i])
			continue
		}
		s.q = append(s.q, items[i])
	}
	st.watch = w.c.sched.AfterFunc(watchEvery, func() { w.watch(st) })
	for _, s := range w.mu.senders {
		w.pump(s)
	}
	w.progress()
	return nil
}

// admit waits for a place in the window; called with the lock held.
func (w *writer) admit(ctx context.Context, n int) error {
	for w.mu.cut == nil && w.mu.stop == nil && w.mu.phase == phaseWriting && w.mu.held >= w.c.cfg.Window && ctx.Err() == nil {
		w.cond.Wait()
	}
	switch id := w.what.Key.Block; {
	case w.mu.phase != phaseWriting:
		return errkind.Invalid.Wrap("append to block %s: it has ended", id)
	case w.mu.cut != nil:
		return w.mu.cut
	case w.mu.stop != nil:
		return w.mu.stop
	case ctx.Err() != nil:
		return ended(ctx, "append to block "+id.String())
	case w.mu.short:
		return errkind.Invalid.Wrap("append to block %s: its last stripe was a short one", id)
	case n < 1 || n > w.l.StripeData():
		return errkind.Invalid.Wrap("append to block %s: %d bytes, a stripe of %s has %d", id, n, w.l, w.l.StripeData())
	case w.mu.appended+n > w.maxLen:
		return errkind.TooBig.Wrap("append to block %s: %d bytes on top of %d, at most %d fit", id, n, w.mu.appended, w.maxLen)
	}
	return nil
}

// encode makes the K+M cells of a stripe and their checksums.
func (w *writer) encode(st *stripe, data []byte) (items []*item, pads []*buffer, err error) {
	k, width := int(w.l.K), w.l.Width()
	cellLen := ec.CellLen(w.l, len(data), 0)
	off := st.end - cellLen
	items = make([]*item, width)
	cells := make([][]byte, width)
	for i := range items {
		items[i] = &item{of: st, off: off, shared: true}
		switch {
		case i < k && (i+1)*cellLen <= len(data):
			cells[i] = data[i*cellLen : (i+1)*cellLen : (i+1)*cellLen]
		case i < k:
			pad := w.c.buffer(cellLen)
			clear(pad.p[copy(pad.p, data[min(i*cellLen, len(data)):]):])
			pads = append(pads, pad)
			cells[i] = pad.p
		case w.l.Kind == ids.LayoutCopies:
			cells[i] = cells[0]
		default:
			items[i].shared = false
			items[i].buf = w.c.buffer(cellLen)
			cells[i] = items[i].buf.p
		}
		items[i].data = cells[i]
	}
	sums := make([][]uint64, width)
	if err := w.coder.EncodeAndSum(cells[:k], cells[k:], sums, w.what.Granule); err != nil {
		return items, pads, errkind.Internal.Wrap("block %s: %v", w.what.Key.Block, err)
	}
	for i, it := range items {
		it.sums = sums[i]
	}
	return items, pads, nil
}

// progress resolves stripes, ends a block that can reach no quorum any more,
// and moves a seal on. Called with the lock held after every change.
func (w *writer) progress() {
	for len(w.mu.stripes) > 0 {
		st, n := w.mu.stripes[0], 0
		for _, s := range w.mu.senders {
			if !s.lost && s.acked >= st.end {
				n++
			}
		}
		if n < w.l.Quorum() {
			break
		}
		w.mu.stripes = w.mu.stripes[1:]
		w.mu.length += st.n
		w.resolve(st, true)
	}
	if w.mu.cut == nil && w.mu.phase <= phaseSealing && w.alive() < w.l.Quorum() {
		w.cutBlock(w.lossError())
	}
	if w.mu.phase >= phaseSealing {
		for _, s := range w.mu.senders {
			w.seal(s)
		}
	}
	w.cond.Broadcast()
}

func (w *writer) alive() int {
	n := 0
	for _, s := range w.mu.senders {
		if !s.lost {
			n++
		}
	}
	return n
}

func (w *writer) lossError() error {
	for _, s := range w.mu.senders {
		if s.lost {
			return errkind.Unavailable.Wrap("block %s: %d of %d chunks are left, %d are needed; chunk %d on disk %d: %v",
				w.what.Key.Block, w.alive(), w.l.Width(), w.l.Quorum(), s.index, s.disk, s.why)
		}
	}
	return nil
}

// cutBlock ends the block at what a quorum holds; the stripes behind it are
// refused. Called with the lock held.
func (w *writer) cutBlock(why error) {
	if w.mu.cut == nil {
		w.mu.cut = why
		w.c.log.Info("block cut", "block", w.what.Key.Block.String(), "length", w.mu.length, "why", why)
	}
	refused := w.mu.stripes
	w.mu.stripes = nil
	for _, st := range refused {
		w.resolve(st, false)
	}
	w.cond.Broadcast()
}

// resolve decides a stripe. Its memory goes back once nothing refers to it.
func (w *writer) resolve(st *stripe, ok bool) {
	st.resolved, st.ok = true, ok
	if st.watch != nil {
		st.watch.Stop()
	}
	missing := false
	for _, s := range w.mu.senders {
		switch {
		case s.lost:
		case !ok:
			s.q = slices.DeleteFunc(s.q, func(it *item) bool {
				if it.of == st {
					w.drop(it)
				}
				return it.of == st
			})
		case s.acked < st.end && s.late:
			w.absorb(s)
		case s.acked < st.end:
			missing = true
		}
	}
	if missing {
		d := min(max(minGrace, 2*(w.c.sched.Now()-st.born)), maxGrace)
		st.grace = w.c.sched.AfterFunc(d, func() { w.graceOver(st) })
	}
	w.settle(st)
}

// graceOver stops waiting for the last servers of a stripe: they are late now.
func (w *writer) graceOver(st *stripe) {
	w.mu.Lock()
	defer w.unlock()
	for _, s := range w.mu.senders {
		if !s.lost && s.acked < st.end && w.mu.phase != phaseEnded {
			s.late = true
			w.absorb(s)
		}
	}
}

// settle calls for the release of a decided stripe that nothing refers to.
func (w *writer) settle(st *stripe) {
	if !st.resolved || st.refs > 0 || st.release == nil {
		return
	}
	for _, pad := range st.pads {
		w.c.free(pad)
	}
	if st.grace != nil && !st.ok {
		st.grace.Stop()
	}
	release, ok := st.release, st.ok
	st.release, st.pads = nil, nil
	w.mu.held--
	w.mu.ready = append(w.mu.ready, func() { release(ok) })
	w.cond.Broadcast()
}

// watch looks at a stripe that has no quorum yet: servers that are silent are
// probed, and the block is cut when too few can be reached.
func (w *writer) watch(st *stripe) {
	w.mu.Lock()
	defer w.unlock()
	if st.resolved {
		return
	}
	age, reach := w.c.sched.Now()-st.born, 0
	for _, s := range w.mu.senders {
		switch {
		case s.lost:
		case s.acked >= st.end || !w.c.health.isOut(s.server):
			reach++
		}
		if !s.lost && s.acked < st.end {
			w.c.health.probe(s.peer)
		}
	}
	switch id := w.what.Key.Block; {
	case reach < w.l.Quorum() && age >= 2*watchEvery:
		w.cutBlock(errkind.Unavailable.Wrap("block %s: %d of its %d servers answer, %d are needed", id, reach, w.l.Width(), w.l.Quorum()))
	case age >= stallLimit:
		w.cutBlock(errkind.Timeout.Wrap("block %s: no quorum for a stripe within %s", id, stallLimit))
	default:
		st.watch = w.c.sched.AfterFunc(watchEvery, func() { w.watch(st) })
	}
}
