package file

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// copied are sealed blocks of one writer that hold bytes of others.
type copied struct {
	blocks sealed
	w      chunk.BlockWriter
	issued []ids.BlockID
}

// giveUp abandons the blocks.
func (c *copied) giveUp(e *Engine) {
	if c.w != nil {
		c.w.Abandon()
	}
	e.blockIDs.retire(c.issued)
}

// source fills dst with what lies at off of the bytes to be copied.
type source func(ctx context.Context, dst []byte, off int) error

// answers counts the stripes of a copy that are with the servers.
type answers struct {
	cond sched.Cond
	mu   struct {
		sync.Mutex
		open    int
		refused bool
	}
}

// copyBlock writes length bytes of src as one new block: all of them or an
// error. It holds one or two buffers of the pool. No lock is held.
func (n *inode) copyBlock(ctx context.Context, pool *sendPool, layout ids.Layout, fileOff uint64, length int, src source) (*copied, error) {
	c := &copied{}
	spec := chunk.BlockSpec{
		NextID: func() ids.BlockID {
			id := n.e.blockIDs.next(n.ino.Slot())
			c.issued = append(c.issued, id)
			return id
		},
		Layout: layout, Ino: n.ino, FileOff: fileOff, MaxLen: length,
	}
	var err error
	if length < chunk.SmallBlock {
		err = n.copySmall(ctx, pool, c, spec, length, src)
	} else {
		err = n.copyStriped(ctx, pool, c, spec, length, src)
	}
	if err == nil && int(c.blocks.length()) != length {
		err = errkind.Unavailable.Wrap("block %s holds %d of %d bytes", c.blocks[0].ID, c.blocks.length(), length)
	}
	if err != nil {
		c.giveUp(n.e)
		return nil, err
	}
	return c, nil
}

func (n *inode) copySmall(ctx context.Context, pool *sendPool, c *copied, spec chunk.BlockSpec, length int, src source) error {
	buf, err := pool.get(ctx, n.e.deadline(), length)
	if err != nil {
		return err
	}
	defer pool.put(buf)
	if err := src(ctx, buf[:length], 0); err != nil {
		return err
	}
	blk, w, err := n.e.cfg.Blocks.WriteBlock(ctx, spec, buf[:length])
	c.blocks, c.w = sealed{blk}, w
	return err
}

func (n *inode) copyStriped(ctx context.Context, pool *sendPool, c *copied, spec chunk.BlockSpec, length int, src source) error {
	w, err := n.e.cfg.Blocks.NewBlock(ctx, spec)
	if err != nil {
		return err
	}
	c.w = w
	if length > w.Layout().MaxBlockData() {
		return errkind.Unavailable.Wrap("a block of %s is too short for %d bytes", w.Layout(), length)
	}
	a := &answers{}
	a.cond = n.e.cfg.Sched.NewCond(&a.mu)
	for off := 0; off < length; {
		size := min(w.Layout().StripeData(), length-off)
		buf, err := pool.get(ctx, n.e.deadline(), size)
		if err != nil {
			return err
		}
		if err := src(ctx, buf[:size], off); err != nil {
			pool.put(buf)
			return err
		}
		a.mu.Lock()
		a.mu.open++
		a.mu.Unlock()
		err = w.Append(ctx, buf[:size], func(ok bool) {
			pool.put(buf)
			a.mu.Lock()
			defer a.mu.Unlock()
			a.mu.open--
			a.mu.refused = a.mu.refused || !ok
			a.cond.Broadcast()
		})
		if err != nil {
			return err
		}
		off += size
	}
	blk, err := w.Seal(ctx)
	if err != nil {
		return err
	}
	c.blocks = sealedBy(w, blk)
	if !a.kept(ctx, n.e) {
		return errkind.Unavailable.Wrap("block %s does not hold all of a copy", blk.ID)
	}
	return nil
}

// kept waits until every stripe is answered, and reports whether all were
// kept. Buffers that are out go back by themselves.
func (a *answers) kept(ctx context.Context, e *Engine) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for deadline := e.deadline(); a.mu.open > 0; {
		if waitOn(ctx, e.cfg.Sched, a.cond, deadline) != nil {
			return false
		}
	}
	return !a.mu.refused
}

// splitPack makes two blocks of one, because a commit of it alone touches too
// many records. The commit task calls it; no lock is held.
func (n *inode) splitPack(pk *pack) {
	n.mu.Lock()
	mid := pk.middle(&n.mu.ov)
	layout := n.mu.attr.Layout
	length := pk.blocks.length()
	n.mu.Unlock()
	half := func(lo, hi uint32) (c *copied, err error) {
		err = pk.attempt(func(ctx context.Context) error {
			c, err = n.copyBlock(ctx, n.e.sendPool, layout, pk.fileOff, int(hi-lo), func(ctx context.Context, dst []byte, off int) error {
				return pk.blocks.read(ctx, n.e.cfg.Blocks, int(lo)+off, dst)
			})
			return err
		})
		return c, err
	}
	if mid == 0 || mid >= length {
		n.failSplit(errkind.TooBig.Wrap("a write of inode %s covers too many extents", n.ino))
		return
	}
	a, err := half(0, mid)
	if err != nil {
		n.failSplit(err)
		return
	}
	b, err := half(mid, length)
	if err != nil {
		a.giveUp(n.e)
		n.failSplit(err)
		return
	}
	n.mu.Lock()
	if pk.state != packSealed {
		n.mu.Unlock()
		a.giveUp(n.e)
		b.giveUp(n.e)
		return
	}
	at := slices.Index(n.mu.packs, pk)
	p1, p2 := pk.half(a), pk.half(b)
	n.mu.ov.repoint(pk, p2, mid)
	n.mu.ov.repoint(pk, p1, 0)
	n.mu.packs = slices.Replace(n.mu.packs, at, at+1, p1, p2)
	pk.kill()
	n.mu.Unlock()
}

func (n *inode) failSplit(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail(fmt.Errorf("divide a commit of inode %s: %w", n.ino, err))
}

// half is the pack of a block that took over a part of pk's.
func (pk *pack) half(c *copied) *pack {
	return &pack{
		n: pk.n, seq: pk.seq, first: pk.first, fileOff: pk.fileOff, app: pk.app, closed: true, pumped: true,
		state: packSealed, length: c.blocks.length(), w: c.w, blocks: c.blocks, issued: c.issued,
	}
}

// middle is the place in the log that divides what the file refers to.
func (pk *pack) middle(ov *overlay) uint32 {
	var starts []uint32
	var only entry
	for _, en := range ov.list {
		if en.pk == pk {
			starts = append(starts, en.pkOff)
			only = en
		}
	}
	switch len(starts) {
	case 0:
		return 0
	case 1:
		return only.pkOff + uint32((only.end-only.off)/2)
	}
	slices.Sort(starts)
	return starts[len(starts)/2]
}
