package file

import (
	"cmp"
	"context"
	"slices"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// move copies pieces as one new block and commits it.
func (c *compaction) move(t *chart, list []bit) error {
	n := c.n
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	length := 0
	for _, p := range list {
		length += int(p.length)
	}
	if cap(c.copy) < length {
		c.copy = make([]byte, length)
	}
	bytes := c.copy[:length]
	if err := c.read(ctx, t, list, bytes); err != nil {
		return err
	}
	src := func(_ context.Context, dst []byte, off int) error {
		copy(dst, bytes[off:])
		return nil
	}
	made, err := n.copyBlock(ctx, n.e.idlePool, c.layout, list[0].off, length, src)
	if err != nil {
		return err
	}
	return c.swap(ctx, t, list, made)
}

// swap commits copies of pieces where the file still refers to what was copied.
func (c *compaction) swap(ctx context.Context, t *chart, list []bit, made *copied) error {
	n := c.n
	n.mu.Lock()
	for deadline := n.e.deadline(); n.mu.committing; {
		if err := n.wait(ctx, deadline); err != nil {
			n.mu.Unlock()
			made.giveUp(n.e)
			return err
		}
	}
	if n.mu.moves.broken || n.mu.err != nil || n.mu.moves.version != n.mu.attr.MapVersion {
		n.mu.moves.broken = true
		n.mu.Unlock()
		made.giveUp(n.e)
		return errkind.Changed.Wrap("inode %s has changed elsewhere", n.ino)
	}
	req, left := c.replacement(list, made)
	if len(req.Ops) == 0 {
		n.mu.Unlock()
		made.giveUp(n.e)
		n.settled(t, list, left)
		return nil
	}
	n.mu.committing = true
	n.mu.Unlock()
	err := c.commit(ctx, req, made)
	if err == nil {
		n.settled(t, list, left)
	}
	return err
}

// commit sends a replacement and lets other commits go on.
func (c *compaction) commit(ctx context.Context, req *api.Commit, made *copied) error {
	n := c.n
	req.Floor = n.e.blockIDs.floorWithout(req.Blocks)
	var reply api.Committed
	err := n.e.cfg.Meta.Do(ctx, req, &reply)
	switch outcomeOf(err) {
	case outcomeRefused:
		made.giveUp(n.e)
	case outcomeCommitted:
		made.w.Committed()
		n.e.blockIDs.retire(made.issued)
	case outcomeUnknown: // nobody may delete the block, and its ids stay out
		made.w.Committed()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil {
		steps := uint64(len(req.Ops))
		n.accountBlocks(nil, req.Blocks, &reply, steps)
		n.install(&reply.Attr, true, steps)
	}
	n.mu.committing = false
	n.kick()
	n.cond.Broadcast()
	return err
}

// replacement is the commit of a copy; left are the pieces that it could not
// take. n.mu is held.
func (c *compaction) replacement(list []bit, made *copied) (req *api.Commit, left map[int]bool) {
	n := c.n
	req = &api.Commit{Ino: n.ino}
	left = map[int]bool{}
	used := map[ids.BlockID]bool{}
	version := n.mu.moves.version
	log := uint64(0) // where the bit lies in the copy
	for i, p := range list {
		for _, s := range n.mu.moves.untouched(p.off, p.end()) {
			ext := made.blocks.pieces(s.lo, s.hi-s.lo, uint32(log+s.lo-p.off))
			last := len(req.Ops) - 1
			switch {
			case last >= 0 && req.Ops[last].Off+req.Ops[last].Len == s.lo:
				op := &req.Ops[last]
				op.Len += s.hi - s.lo
				op.Extents = joinExtents(op.Extents, ext)
			case len(req.Ops) == maxOps:
				left[i] = true
				continue
			default:
				op := api.Op{Kind: api.OpReplace, Off: s.lo, Len: s.hi - s.lo, Extents: ext, Expect: version + uint64(len(req.Ops))}
				req.Ops = append(req.Ops, op)
			}
			for _, x := range ext {
				used[x.Block] = true
			}
		}
		log += p.length
	}
	req.Blocks = slices.DeleteFunc(slices.Clone(made.blocks), func(b ids.Block) bool { return !used[b.ID] })
	return req, left
}

// joinExtents adds more to list, as one extent where they go on in one block.
func joinExtents(list, more []ids.Extent) []ids.Extent {
	for _, x := range more {
		if k := len(list) - 1; k >= 0 && list[k].Block == x.Block && list[k].End() == x.Off &&
			uint64(list[k].BlockOff)+list[k].Len == uint64(x.BlockOff) {
			list[k].Len += x.Len
			continue
		}
		list = append(list, x)
	}
	return list
}

// settled notes that the file no longer refers to pieces, but for those left:
// a block without any is gone.
func (n *inode) settled(t *chart, list []bit, left map[int]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, p := range list {
		if p.use < 0 || left[i] {
			continue
		}
		u := &t.uses[p.use]
		if u.live -= p.length; u.live == 0 {
			n.mu.shape.held -= min(n.mu.shape.held, uint64(u.block.Logical))
		}
	}
}

// Parts of a block that lie close together are read together.
const (
	readSpan = 1 << 20   // bytes read at once for several parts
	readGap  = 128 << 10 // bytes between two parts that are read in vain
)

// part is where a bit's bytes go.
type part struct {
	dst []byte
	use int32
	at  int
}

func (q part) end() int { return q.at + len(q.dst) }

// read fills dst with the bits, one after another. Each block is read in one
// pass, whatever the order of its bits in the file.
func (c *compaction) read(ctx context.Context, t *chart, list []bit, dst []byte) error {
	var parts []part
	for _, p := range list {
		q := part{dst[:p.length], p.use, int(p.at)}
		dst = dst[p.length:]
		if p.use < 0 {
			copy(q.dst, t.inline[-p.use-1][q.at:])
		} else {
			parts = append(parts, q)
		}
	}
	slices.SortFunc(parts, func(a, b part) int { return cmp.Or(cmp.Compare(a.use, b.use), cmp.Compare(a.at, b.at)) })
	for len(parts) > 0 {
		k := 1
		for k < len(parts) && parts[k].use == parts[0].use &&
			parts[k].end()-parts[0].at <= readSpan && parts[k].at-parts[k-1].end() <= readGap {
			k++
		}
		if err := c.readParts(ctx, &t.uses[parts[0].use].block, parts[:k]); err != nil {
			return err
		}
		parts = parts[k:]
	}
	return nil
}

func (c *compaction) readParts(ctx context.Context, block *ids.Block, parts []part) error {
	first := parts[0]
	if len(parts) == 1 {
		return c.n.e.cfg.Blocks.ReadBlock(ctx, block, first.at, first.dst)
	}
	if c.scratch == nil {
		c.scratch = make([]byte, readSpan)
	}
	buf := c.scratch[:parts[len(parts)-1].end()-first.at]
	if err := c.n.e.cfg.Blocks.ReadBlock(ctx, block, first.at, buf); err != nil {
		return err
	}
	for _, q := range parts {
		copy(q.dst, buf[q.at-first.at:])
	}
	return nil
}
