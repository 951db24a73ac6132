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
	"github.com/ckptfs/ckptfs/meta/api"
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
// error. No lock is held.
func (n *inode) copyBlock(ctx context.Context, layout ids.Layout, fileOff uint64, length int, src source) (*copied, error) {
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
		err = n.copySmall(ctx, c, spec, length, src)
	} else {
		err = n.copyStriped(ctx, c, spec, length, src)
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

func (n *inode) copySmall(ctx context.Context, c *copied, spec chunk.BlockSpec, length int, src source) error {
	buf, err := n.e.sendPool.get(ctx, n.e.deadline(), length)
	if err != nil {
		return err
	}
	defer n.e.sendPool.put(buf)
	if err := src(ctx, buf[:length], 0); err != nil {
		return err
	}
	blk, w, err := n.e.cfg.Blocks.WriteBlock(ctx, spec, buf[:length])
	c.blocks, c.w = sealed{blk}, w
	return err
}

func (n *inode) copyStriped(ctx context.Context, c *copied, spec chunk.BlockSpec, length int, src source) error {
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
		buf, err := n.e.sendPool.get(ctx, n.e.deadline(), size)
		if err != nil {
			return err
		}
		if err := src(ctx, buf[:size], off); err != nil {
			n.e.sendPool.put(buf)
			return err
		}
		a.mu.Lock()
		a.mu.open++
		a.mu.Unlock()
		err = w.Append(ctx, buf[:size], func(ok bool) {
			n.e.sendPool.put(buf)
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
			c, err = n.copyBlock(ctx, layout, pk.fileOff, int(hi-lo), func(ctx context.Context, dst []byte, off int) error {
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

const (
	window         = 64 << 20 // bytes of a file that are compacted together (rule 15)
	windowExtents  = 1024     // more are compacted by the writer
	compactRanges  = 256      // committed ranges after which the writer looks
	compactAtOnce  = 1200     // extents replaced by one commit
	compactWaste   = 1 << 20  // dead bytes that are worth it
	compactWindows = 64       // windows remembered for a look
)

// touchWindows remembers which windows a commit changed.
func (n *inode) touchWindows(ops []api.Op) {
	for _, op := range ops {
		if op.Kind != api.OpWrite && op.Kind != api.OpInline && op.Kind != api.OpAppend {
			continue
		}
		n.mu.ranges++
		w := op.Off / window
		if !slices.Contains(n.mu.windows, w) && len(n.mu.windows) < compactWindows {
			n.mu.windows = append(n.mu.windows, w)
		}
	}
}

// compact rewrites windows of the file that have become too scattered. It
// runs in the commit task, for one inode at a time, and gives up quietly: the
// next flush, or the metadata service, tries again.
func (n *inode) compact() {
	e := n.e
	e.mu.Lock()
	busy := e.mu.compacting || e.mu.closed
	if !busy {
		e.mu.compacting = true
	}
	e.mu.Unlock()
	if busy {
		return
	}
	defer func() {
		e.mu.Lock()
		e.mu.compacting = false
		e.mu.Unlock()
	}()
	for tries, again := 0, true; again && tries < 3; tries++ {
		again = false
		n.mu.Lock()
		windows := n.mu.windows
		n.mu.windows, n.mu.ranges = nil, 0
		n.mu.Unlock()
		for _, w := range windows {
			err := n.compactWindow(w * window)
			if err == nil {
				continue
			}
			e.cfg.Log.Debug("a window of a file is not compacted this time", "ino", n.ino, "offset", w*window, "err", err)
			n.mu.Lock()
			if errkind.Of(err) == errkind.Changed && n.mu.err == nil {
				// A commit came between. While more come, the next one looks again.
				n.touchWindows([]api.Op{{Kind: api.OpWrite, Off: w * window}})
				n.mu.ranges = compactRanges
				again = again || !n.mu.dirty
			}
			n.mu.Unlock()
		}
	}
}

// compactWindow counts the window's extents and, if they are too many or refer
// to blocks that are mostly dead, replaces them part by part.
func (n *inode) compactWindow(off uint64) error {
	m, attr, err := n.getMap(off, off+window, 4*windowExtents)
	if err != nil || len(m.Extents) < 2 {
		return err
	}
	if len(m.Extents) <= windowExtents && !wasteful(m, attr.Size) {
		return nil
	}
	for at := off; at < off+window; {
		part, attr, err := n.getMap(at, off+window, compactAtOnce)
		if err != nil {
			return err
		}
		end := min(part.End, off+window)
		if end <= at {
			return errkind.Internal.Wrap("map of inode %s ends at %d", n.ino, end)
		}
		if len(part.Extents) > 1 {
			if err := n.replace(part, attr, at, end); err != nil {
				return err
			}
		}
		at = end
	}
	return nil
}

// wasteful reports whether the blocks that the map names hold more than twice
// what it refers to. Only for a file that is all in the map can that be told
// here; the metadata service counts for the others.
func wasteful(m *api.Map, size uint64) bool {
	if m.Off != 0 || m.End < size {
		return false
	}
	var live, held uint64
	for _, x := range m.Extents {
		if x.Kind == ids.ExtentBlock {
			live += x.Len
		}
	}
	for i := range m.Blocks {
		held += uint64(m.Blocks[i].Logical)
	}
	return held > 2*live && held-live >= compactWaste
}

func (n *inode) getMap(lo, hi uint64, limit uint32) (*api.Map, *api.Attr, error) {
	var reply api.Mapped
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	err := n.e.cfg.Meta.Do(ctx, &api.GetMap{Ino: n.ino, Off: lo, End: hi, Max: limit}, &reply)
	return &reply.Map, &reply.Attr, err
}

// replace writes what [lo, hi) holds as new blocks and swaps the extents, if
// the map is still at the version of part.
func (n *inode) replace(part *api.Map, attr *api.Attr, lo, hi uint64) error {
	req := &api.Commit{Ino: n.ino}
	op := api.Op{Kind: api.OpReplace, Off: lo, Len: hi - lo, Expect: part.Version}
	var blocks []*copied
	giveUp := func() {
		for _, c := range blocks {
			c.giveUp(n.e)
		}
	}
	live := clipExtents(part.Extents, lo, min(hi, attr.Size))
	limit := uint64(attr.Layout.MaxBlockData())
	for len(live) > 0 {
		var take []ids.Extent
		take, live = firstBytes(live, limit)
		c, err := n.copyExtents(part, attr.Layout, take)
		if err != nil {
			giveUp()
			return err
		}
		blocks = append(blocks, c)
		req.Blocks = append(req.Blocks, c.blocks...)
		op.Extents = append(op.Extents, joined(take, c.blocks)...)
	}
	req.Ops = []api.Op{op}
	req.Floor = n.e.blockIDs.floorWithout(req.Blocks)
	var reply api.Committed
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	err := n.e.cfg.Meta.Do(ctx, req, &reply)
	what := outcomeOf(err)
	if what == outcomeRefused {
		giveUp()
		return err
	}
	for _, c := range blocks {
		if c.w.Committed(); what == outcomeCommitted {
			n.e.blockIDs.retire(c.issued)
		}
	}
	if err == nil {
		n.mu.Lock()
		n.install(&reply.Attr, true, 1)
		n.mu.Unlock()
	}
	return err
}

// clipExtents keeps what lies inside [lo, hi).
func clipExtents(list []ids.Extent, lo, hi uint64) []ids.Extent {
	var out []ids.Extent
	for _, x := range list {
		if x.Off < hi && lo < x.End() {
			out = append(out, x.Slice(lo, hi))
		}
	}
	return out
}

// firstBytes divides a list of extents after limit bytes.
func firstBytes(list []ids.Extent, limit uint64) (first, rest []ids.Extent) {
	for i, x := range list {
		if x.Len <= limit {
			limit -= x.Len
			continue
		}
		if limit == 0 {
			return list[:i], list[i:]
		}
		first = append(slices.Clone(list[:i]), x.Slice(x.Off, x.Off+limit))
		rest = slices.Clone(list[i:])
		rest[0] = x.Slice(x.Off+limit, x.End())
		return first, rest
	}
	return list, nil
}

// joined describes the extents as blocks that hold them one after another.
func joined(list []ids.Extent, blocks sealed) []ids.Extent {
	var out []ids.Extent
	at := uint32(0)
	for i := 0; i < len(list); {
		off, length := list[i].Off, uint64(0)
		for ; i < len(list) && list[i].Off == off+length; i++ {
			length += list[i].Len
		}
		out = append(out, blocks.pieces(off, length, at)...)
		at += uint32(length)
	}
	return out
}

// copyExtents writes the bytes of the extents, one after another, as a block.
func (n *inode) copyExtents(part *api.Map, layout ids.Layout, list []ids.Extent) (*copied, error) {
	blocks := make(map[ids.BlockID]*ids.Block, len(part.Blocks))
	for i := range part.Blocks {
		blocks[part.Blocks[i].ID] = &part.Blocks[i]
	}
	length := 0
	for _, x := range list {
		length += int(x.Len)
	}
	ctx, stop := n.e.opContext(context.Background())
	defer stop()
	return n.copyBlock(ctx, layout, list[0].Off, length, func(ctx context.Context, dst []byte, off int) error {
		at := 0
		for _, x := range list {
			lo, hi := max(off, at), min(off+len(dst), at+int(x.Len))
			if lo < hi {
				part := dst[lo-off : hi-off]
				if x.Kind == ids.ExtentInline {
					copy(part, x.Data[lo-at:])
				} else if b := blocks[x.Block]; b == nil {
					return errkind.Internal.Wrap("block %s is not in the map", x.Block)
				} else if err := n.e.cfg.Blocks.ReadBlock(ctx, b, int(x.BlockOff)+lo-at, part); err != nil {
					return err
				}
			}
			at += int(x.Len)
		}
		return nil
	})
}
