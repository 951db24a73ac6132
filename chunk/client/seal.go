package client

import (
	"context"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// sealTimeout bounds one request to seal; it waits for a disk's sync.
const sealTimeout = 10 * time.Second

// Seal ends the block. See chunk.BlockWriter.
func (w *writer) Seal(ctx context.Context) (ids.Block, error) {
	defer wake(ctx, &w.mu, w.cond)()
	w.mu.Lock()
	if w.mu.phase != phaseWriting {
		defer w.unlock()
		return ids.Block{}, errkind.Invalid.Wrap("seal block %s: it has ended already", w.what.Key.Block)
	}
	for len(w.mu.stripes) > 0 {
		if err := ended(ctx, "seal block "+w.what.Key.Block.String()); err != nil {
			w.cutBlock(err)
			defer w.unlock()
			return ids.Block{}, err
		}
		w.cond.Wait()
	}
	if w.mu.length == 0 {
		w.finishEmpty()
		defer w.unlock()
		return ids.Block{Layout: w.l}, nil
	}
	w.mu.phase = phaseSealing
	w.progress()
	rewrite, err := w.awaitSeals(ctx)
	switch {
	case err != nil:
		w.unlock()
		return ids.Block{}, err
	case rewrite:
		old := w.makeBlock()
		w.unlock()
		return w.rewrite(ctx, old)
	}
	defer w.unlock()
	w.mu.phase = phaseSealed
	w.mu.block = w.makeBlock()
	for i, s := range w.mu.senders {
		w.c.tables.add(w.key(i), w.mu.block.Digests[i], w.table(s))
		s.sums = w.table(s)
	}
	return cloneBlock(w.mu.block), nil
}

// finishEmpty ends a block that holds nothing: its chunks are dropped.
func (w *writer) finishEmpty() {
	w.mu.phase = phaseEnded
	for _, s := range w.mu.senders {
		w.lose(s, errkind.Invalid.Wrap("the block is empty"))
	}
}

// chunkLen is the length of the sealed chunks.
func (w *writer) chunkLen() int { return ec.ChunkLen(w.l, w.mu.length) }

// table is the checksum table of a chunk at the block's length. Only whole
// stripes were cut off, and a granule divides a cell.
func (w *writer) table(s *sender) []uint64 {
	return s.sums[:ec.Granules(w.chunkLen(), w.what.Granule)]
}

// makeBlock describes the block as its sealed chunks make it.
func (w *writer) makeBlock() ids.Block {
	b := ids.Block{
		ID: w.what.Key.Block, Layout: w.l, Length: uint32(w.mu.length), Logical: uint32(w.mu.length),
		Codec: ids.CodecNone, Granule: w.what.Granule,
	}
	for _, s := range w.mu.senders {
		disk := s.disk
		if !s.sealed {
			disk = 0
		}
		b.Disks = append(b.Disks, disk)
		b.Digests = append(b.Digests, ec.Digest(w.table(s)))
	}
	return b
}

func cloneBlock(b ids.Block) ids.Block {
	b.Disks, b.Digests = slices.Clone(b.Disks), slices.Clone(b.Digests)
	return b
}

// seal sends the seal of a chunk whose bytes are all there; called whenever
// something changed.
func (w *writer) seal(s *sender) {
	if w.mu.phase == phaseEnded || s.lost || s.sealed || s.sealing || s.paused || s.acked < w.chunkLen() {
		return
	}
	s.sealing, s.sealSent = true, true
	req := &wire.Request{Op: wire.OpSeal, Body: &wire.Seal{
		Disk: s.disk, Key: w.key(s.index), Length: uint32(w.chunkLen()), Digest: ec.Digest(w.table(s)),
	}}
	w.c.send(s.peer, req, sealTimeout, func(r reply) { w.sealDone(s, r) })
}

func (w *writer) sealDone(s *sender, r reply) {
	w.mu.Lock()
	defer w.unlock()
	s.sealing = false
	if s.lost || s.sealed {
		return
	}
	if r.err != nil {
		w.troubled(s, r)
		w.progress()
		return
	}
	if got, ok := r.Body.(*wire.Sealed); !ok || got.Digest != ec.Digest(w.table(s)) {
		w.lose(s, errkind.Corrupt.Wrap("sealed with another digest"))
		w.progress()
		return
	}
	s.sealed, s.took = true, r.took
	w.recovered(s)
	if w.mu.phase == phaseCommitted && w.mu.block.Disks[s.index] == 0 {
		w.c.reportPlaced(w.key(s.index), s.disk, w.mu.block.Version)
	}
	w.progress()
}

// sealing counts: chunks sealed, not lost, and not lost on servers that answer.
type sealCount struct{ sealed, alive, reach, waiting int }

func (w *writer) countSeals() (n sealCount) {
	for _, s := range w.mu.senders {
		out := w.c.health.isOut(s.server)
		switch {
		case s.sealed:
			n.sealed++
			n.alive++
			n.reach++
		case s.lost:
		case out:
			n.alive++
		default:
			n.alive++
			n.reach++
			if s.failed == 0 {
				n.waiting++ // worth a short grace
			}
		}
	}
	return n
}

// awaitSeals waits for a quorum of sealed chunks, and a moment longer for the
// others. rewrite says that fewer will ever be there, but enough to read the
// block. Called with the lock held.
func (w *writer) awaitSeals(ctx context.Context) (rewrite bool, err error) {
	start := w.c.sched.Now()
	probed := start
	k, quorum := int(w.l.K), w.l.Quorum()
	for {
		n, now := w.countSeals(), w.c.sched.Now()
		age := now - start
		wait := watchEvery
		switch left := w.sealGrace() - age; {
		case n.sealed == w.l.Width(), n.sealed >= quorum && (n.waiting == 0 || left <= 0):
			return false, nil
		case n.sealed >= quorum:
			wait = left
		case n.alive < k:
			return false, errkind.NoChunk.Wrap("seal block %s: %d of %d chunks are left, %d are needed to read it: %v",
				w.what.Key.Block, n.alive, w.l.Width(), k, w.lossError())
		case n.sealed >= k && (n.alive < quorum || n.reach < quorum && age >= 2*watchEvery || age >= w.c.cfg.Timeout):
			return true, nil
		case age >= 2*w.c.cfg.Timeout:
			return false, errkind.Timeout.Wrap("seal block %s: %d of %d chunks durable after %s, %d are needed",
				w.what.Key.Block, n.sealed, w.l.Width(), age, quorum)
		}
		if err := ended(ctx, "seal block "+w.what.Key.Block.String()); err != nil {
			return false, err
		}
		if now-probed >= watchEvery {
			probed = now
			for _, s := range w.mu.senders {
				if !s.sealed && !s.lost {
					w.c.health.probe(s.peer)
				}
			}
		}
		w.cond.WaitFor(wait)
	}
}

// sealGrace is how long after its start a seal waits for the last chunks: 3 ×
// the median of the others.
func (w *writer) sealGrace() time.Duration {
	var took []time.Duration
	for _, s := range w.mu.senders {
		if s.sealed {
			took = append(took, s.took)
		}
	}
	if len(took) == 0 {
		return minSealGrace
	}
	slices.Sort(took)
	return max(minSealGrace, 3*took[len(took)/2])
}

// Spill returns the further blocks of a rewritten one. See chunk.Spiller.
func (w *writer) Spill() []ids.Block {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []ids.Block
	for i, in := range w.mu.inner {
		if i > 0 {
			out = append(out, in.sealedBlock())
		}
	}
	return out
}

func (w *writer) sealedBlock() ids.Block {
	w.mu.Lock()
	defer w.mu.Unlock()
	return cloneBlock(w.mu.block)
}

// Committed tells that the block is part of a file. See chunk.BlockWriter.
func (w *writer) Committed() {
	w.mu.Lock()
	inner := w.mu.inner
	if w.mu.phase == phaseSealed {
		w.mu.phase = phaseCommitted
		for i, s := range w.mu.senders {
			switch {
			case w.mu.block.Disks[i] != 0:
			case s.sealed:
				w.c.reportPlaced(w.key(i), s.disk, w.mu.block.Version)
			case s.lost:
				w.c.finish.rebuild(w.what, w.mu.block, i)
			default:
				w.c.sched.AfterFunc(w.c.cfg.LateTimeout, func() { w.lateOver(s) })
			}
		}
	}
	w.unlock()
	for _, in := range inner {
		in.Committed()
	}
}

// lateOver gives up on a late chunk at its first server.
func (w *writer) lateOver(s *sender) {
	w.mu.Lock()
	defer w.unlock()
	w.lose(s, errkind.Timeout.Wrap("late chunk not finished in %s", w.c.cfg.LateTimeout))
}

// Abandon gives the block up. See chunk.BlockWriter. Chunks that may be sealed
// are left to garbage collection: a commit whose answer was lost may hold them.
func (w *writer) Abandon() {
	w.mu.Lock()
	inner := w.mu.inner
	if w.mu.phase != phaseCommitted && w.mu.phase != phaseEnded {
		w.end(errkind.Interrupted.Wrap("block %s was abandoned", w.what.Key.Block))
	}
	w.unlock()
	for _, in := range inner {
		in.Abandon()
	}
}

// end frees all that the block holds. Called with the lock held.
func (w *writer) end(why error) {
	w.mu.phase = phaseEnded
	w.cutBlock(why)
	for _, s := range w.mu.senders {
		w.lose(s, why)
	}
}
