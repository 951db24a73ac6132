package file

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// pump stores one pack: it opens the block, hands over stripe after stripe
// while the pack fills, and seals it when the pack is closed. It is the only
// task that talks to the pack's block writer, so the seal of one pack overlaps
// the filling of the next.
func (pk *pack) pump() {
	n := pk.n
	n.mu.Lock()
	small := pk.closed && pk.length < chunk.SmallBlock
	again := pk.failing != 0
	n.mu.Unlock()
	var err error
	if again {
		err = pk.pause(errkind.Timeout.Wrap("store bytes of inode %s", n.ino))
	}
	if err != nil {
	} else if small {
		err = pk.storeSmall()
	} else {
		err = pk.storeStriped()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	pk.pumping = false
	if pk.state != packDead && err == nil {
		err = pk.finish()
	}
	switch {
	case pk.state == packDead:
		for _, b := range pk.bufs {
			if !pk.held(b) {
				pk.drop(b)
			}
		}
		pk.abandon()
	case err != nil:
		n.fail(err)
	}
	n.cond.Broadcast()
}

// spec describes the block; length is 0 while it is not known.
func (pk *pack) spec(length uint32) chunk.BlockSpec {
	n := pk.n
	n.mu.Lock()
	defer n.mu.Unlock()
	return chunk.BlockSpec{
		NextID: func() ids.BlockID {
			id := n.e.blockIDs.next(n.ino.Slot())
			n.mu.Lock()
			pk.issued = append(pk.issued, id)
			n.mu.Unlock()
			return id
		},
		Layout:  n.mu.attr.Layout,
		Ino:     n.ino,
		FileOff: pk.fileOff,
		MaxLen:  min(int(length), n.mu.attr.Layout.MaxBlockData()),
	}
}

// retriable errors may go away by themselves.
func retriable(err error) bool {
	switch errkind.Of(err) {
	case errkind.Unavailable, errkind.Timeout, errkind.Busy, errkind.Conflict, errkind.NotLeader:
		return true
	}
	return false
}

// pause waits a little before another try; an error when there have been
// fruitless tries for the operation time-out.
func (pk *pack) pause(cause error) error {
	n := pk.n
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.cause = cause
	now := n.e.cfg.Sched.Now()
	if pk.failing == 0 {
		pk.failing = now
	}
	if now-pk.failing >= n.e.cfg.OpTimeout || pk.state == packDead {
		return cause
	}
	end := now + min(50*time.Millisecond, n.e.cfg.OpTimeout/10)
	for pk.state != packDead && n.e.cfg.Sched.Now() < end {
		n.cond.WaitFor(end - n.e.cfg.Sched.Now())
	}
	return nil
}

// attempt calls fn until it works, fails for good, or has failed for the
// operation time-out.
func (pk *pack) attempt(fn func(ctx context.Context) error) error {
	for {
		ctx, stop := pk.n.e.opContext(context.Background())
		err := fn(ctx)
		stop()
		if err == nil || !retriable(err) {
			return err
		}
		if err := pk.pause(err); err != nil {
			return err
		}
	}
}

// storeSmall writes the whole pack as one small block.
func (pk *pack) storeSmall() error {
	n := pk.n
	n.mu.Lock()
	if pk.state == packDead {
		n.mu.Unlock()
		return nil
	}
	data := pk.bufs[0].mem[:pk.bufs[0].n]
	if len(pk.bufs) > 1 {
		data = make([]byte, 0, pk.length)
		for _, b := range pk.bufs {
			data = append(data, b.mem[:b.n]...)
		}
	}
	pk.stripes = append(pk.stripes, stripe{lo: 0, hi: pk.length})
	n.mu.Unlock()
	spec := pk.spec(pk.length)
	var blk ids.Block
	var w chunk.BlockWriter
	err := pk.attempt(func(ctx context.Context) (err error) {
		blk, w, err = n.e.cfg.Blocks.WriteBlock(ctx, spec, data)
		return err
	})
	n.mu.Lock()
	if err == nil {
		pk.w, pk.blocks = w, sealed{blk}
	}
	n.mu.Unlock()
	pk.answer(0, err == nil)
	if err != nil {
		return fmt.Errorf("store %d bytes of inode %s as a small block: %w", len(data), n.ino, err)
	}
	return nil
}

// storeStriped writes the pack stripe by stripe and seals it.
func (pk *pack) storeStriped() error {
	n := pk.n
	var length uint32
	n.mu.Lock()
	if pk.closed {
		length = pk.length
	}
	n.mu.Unlock()
	spec := pk.spec(length)
	err := pk.attempt(func(ctx context.Context) error {
		w, err := n.e.cfg.Blocks.NewBlock(ctx, spec)
		if err == nil {
			n.mu.Lock()
			pk.w = w
			n.mu.Unlock()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("open a block for inode %s: %w", n.ino, err)
	}
	w := pk.w
	limit := uint32(w.Layout().MaxBlockData())
	if spec.MaxLen > 0 {
		// A narrower layout may not hold what was announced.
		limit = min(limit, uint32(spec.MaxLen))
	}
	pk.send(w, uint32(w.Layout().StripeData()), limit)
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	n.mu.Lock()
	dead := pk.state == packDead
	n.mu.Unlock()
	if dead {
		return nil
	}
	blk, err := w.Seal(ctx)
	if err != nil {
		return fmt.Errorf("seal a block of inode %s: %w", n.ino, err)
	}
	blocks := sealedBy(w, blk)
	n.mu.Lock()
	defer n.mu.Unlock()
	pk.blocks = blocks
	return nil
}

// send hands over stripes until the pack is closed and sent, or the block
// takes no more. What is left is marked for another block.
func (pk *pack) send(w chunk.BlockWriter, size, limit uint32) {
	var sent uint32
	for {
		lo, hi, ok := pk.next(sent, size, limit)
		if !ok {
			break
		}
		if err := pk.append(w, lo, hi); err != nil {
			pk.n.e.cfg.Log.Warn("a block ends early; its rest goes to another", "ino", pk.n.ino, "err", err)
			break
		}
		sent = hi
	}
	n := pk.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if pk.state == packDead {
		return
	}
	pk.close()
	n.dropLane(pk)
	for _, b := range pk.bufs {
		if b.end() > sent {
			b.bad = true
		}
	}
}

// next waits for the stripe at sent; false when there is none to come.
func (pk *pack) next(sent, size, limit uint32) (lo, hi uint32, ok bool) {
	n := pk.n
	n.mu.Lock()
	defer n.mu.Unlock()
	for pk.state != packDead {
		var frozen uint32
		for i := len(pk.bufs) - 1; i >= 0 && frozen == 0; i-- {
			if pk.bufs[i].frozen {
				frozen = pk.bufs[i].end()
			}
		}
		switch {
		case sent >= limit:
			return 0, 0, false
		case frozen >= sent+size:
			return sent, min(sent+size, limit), true
		case pk.closed && frozen > sent:
			return sent, min(frozen, limit), true
		case pk.closed:
			return 0, 0, false
		}
		n.cond.WaitFor(n.e.cfg.OpTimeout)
	}
	return 0, 0, false
}

// append hands over the bytes [lo, hi) of the log: without a copy when they
// lie in one buffer.
func (pk *pack) append(w chunk.BlockWriter, lo, hi uint32) error {
	n := pk.n
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	var gathered []byte
	n.mu.Lock()
	whole := pk.state == packDead || pk.bufferAt(lo).end() >= hi
	n.mu.Unlock()
	if !whole {
		var err error
		if gathered, err = n.e.sendPool.get(ctx, n.e.deadline(), int(hi-lo)); err != nil {
			return err
		}
	}
	n.mu.Lock()
	if pk.state == packDead {
		n.mu.Unlock()
		if gathered != nil {
			n.e.sendPool.put(gathered)
		}
		return errkind.Interrupted
	}
	i := len(pk.stripes)
	pk.stripes = append(pk.stripes, stripe{lo: lo, hi: hi})
	b := pk.bufferAt(lo)
	var data []byte
	if whole {
		data = b.mem[lo-b.base : hi-b.base]
	} else {
		data = gathered[:hi-lo]
		pk.copyOut(data, lo)
	}
	n.mu.Unlock()
	return w.Append(ctx, data, func(ok bool) {
		if gathered != nil {
			n.e.sendPool.put(gathered)
		}
		pk.answer(i, ok)
	})
}

// copyOut copies bytes of the log that are all in memory.
func (pk *pack) copyOut(dst []byte, off uint32) {
	for len(dst) > 0 {
		b := pk.bufferAt(off)
		c := copy(dst, b.mem[off-b.base:b.n])
		dst = dst[c:]
		off += uint32(c)
	}
}

// answer notes what became of a stripe and frees what the servers hold.
func (pk *pack) answer(i int, ok bool) {
	n := pk.n
	n.mu.Lock()
	defer n.mu.Unlock()
	s := &pk.stripes[i]
	if s.answered {
		n.e.cfg.Log.Error("a stripe was released twice", "ino", n.ino)
		return
	}
	s.answered, s.ok = true, ok
	if ok {
		n.mu.progress++
		n.mu.cause = nil
	}
	for _, b := range pk.bufs {
		lo, hi := max(b.base, s.lo), min(b.end(), s.hi)
		if lo >= hi {
			continue
		}
		if ok {
			b.left -= int(hi - lo)
		} else {
			b.bad = true
		}
		if pk.state == packDead && !pk.held(b) || b.left == 0 && !b.bad {
			pk.drop(b)
		}
	}
	n.cond.Broadcast()
}

// finish settles a pack whose block is sealed: what the block does not hold
// goes to a new pack, which starts at once.
func (pk *pack) finish() error {
	n := pk.n
	if err := pk.awaitAnswers(); err != nil || pk.state == packDead {
		return err
	}
	acc, ended := uint32(0), false
	for _, s := range pk.stripes {
		if s.ok && ended {
			return errkind.Internal.Wrap("block %s of inode %s: a stripe was kept behind a refused one", pk.blocks[0].ID, n.ino)
		}
		if s.ok {
			acc = s.hi
		} else {
			ended = true
		}
	}
	if pk.blocks.length() != acc {
		return errkind.Internal.Wrap("block %s of inode %s holds %d bytes where %d were acknowledged", pk.blocks[0].ID, n.ino, pk.blocks.length(), acc)
	}
	for i, b := range pk.bufs {
		if b.bad || b.left > 0 {
			if err := pk.requeue(i, acc > 0); err != nil {
				return err
			}
			break
		}
	}
	if pk.pieces == 0 {
		pk.kill()
		n.forget(pk)
		return nil
	}
	pk.state = packSealed
	n.kick()
	return nil
}

// awaitAnswers waits until every stripe is answered.
func (pk *pack) awaitAnswers() error {
	n := pk.n
	deadline := n.e.deadline()
	for pk.state != packDead && slices.ContainsFunc(pk.stripes, func(s stripe) bool { return !s.answered }) {
		if err := n.wait(context.Background(), deadline); err != nil {
			return err
		}
	}
	return nil
}

// requeue moves the buffers from index i on, whole, to a pack of their own.
func (pk *pack) requeue(i int, progress bool) error {
	n := pk.n
	now := n.e.cfg.Sched.Now()
	p2 := &pack{n: n, seq: pk.seq, first: pk.first, fileOff: pk.fileOff, app: pk.app, closed: true}
	if !progress {
		p2.failing = pk.failing
		if p2.failing == 0 {
			p2.failing = now
		}
		if now-p2.failing >= n.e.cfg.OpTimeout {
			return errkind.Timeout.Wrap("store %d bytes of inode %s: no block has taken them", pk.length, n.ino)
		}
	}
	base := pk.bufs[i].base
	for _, b := range pk.bufs[i:] {
		b.base -= base
		b.left, b.bad = b.n, false
		p2.bufs = append(p2.bufs, b)
	}
	p2.length = pk.length - base
	pk.bufs = pk.bufs[:i]
	n.mu.ov.repoint(pk, p2, base)
	if p2.pieces == 0 {
		p2.kill()
		return nil
	}
	at := slices.Index(n.mu.packs, pk)
	n.mu.packs = slices.Insert(n.mu.packs, at+1, p2)
	p2.start()
	return nil
}
