package file

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// beginCompaction makes this task the one that compacts; n.mu is held, and no
// commit is under way.
func (n *inode) beginCompaction() bool {
	e := n.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.compacting || e.mu.closed {
		return false
	}
	e.mu.compacting = true
	n.mu.moves = moves{tracked: true, version: n.mu.attr.MapVersion}
	return true
}

func (n *inode) endCompaction() {
	n.mu.Lock()
	n.mu.moves = moves{}
	n.mu.Unlock()
	n.e.mu.Lock()
	defer n.e.mu.Unlock()
	n.e.mu.compacting = false
}

// compact rewrites what has become too scattered or keeps too many dead bytes.
// It runs beside writes and commits, in one inode at a time, and gives up
// quietly: a later flush, or the metadata service, tries again. Blocks never
// change, so a copy of their bytes is right for every range that still refers to
// them; a commit waits only while one replacement is committed.
func (n *inode) compact() {
	defer n.endCompaction()
	n.mu.Lock()
	windows := n.mu.windows
	if n.mu.ranges < compactRanges {
		windows = nil
	} else {
		n.mu.windows, n.mu.ranges = nil, 0
	}
	n.mu.Unlock()
	c := &compaction{n: n, limit: compactAtOnce}
	for _, w := range windows {
		if err := c.window(w * window); err != nil {
			c.note("a window of a file is not compacted this time", err)
			break
		}
	}
	last, fruitless := uint64(math.MaxUint64), 0
	for first := true; fruitless < 3; first = false {
		n.mu.Lock()
		s := &n.mu.shape
		look := s.wasteful(&n.mu.attr) || s.version != n.mu.attr.MapVersion && first
		if s.held >= last { // written faster than it can be copied
			fruitless++
		}
		last = s.held
		n.mu.Unlock()
		if !look {
			return
		}
		if err := c.reclaim(); err != nil {
			c.note("dead bytes of a file are not reclaimed this time", err)
			n.mu.Lock()
			n.mu.shape.version = n.mu.attr.MapVersion + 1 // unknown: there is a chance of a look later
			n.mu.Unlock()
			return
		}
	}
}

// Bounds of one replacement, so that it touches few enough records.
const (
	compactAtOnce = 800     // extents that it replaces
	compactOps    = 300     // ranges of the file that they make
	compactBlocks = 150     // blocks that they refer to
	compactBytes  = 4 << 20 // bytes that are copied
)

// compaction is one look at an inode.
type compaction struct {
	n       *inode
	limit   int // extents in a replacement; less after a Split
	layout  ids.Layout
	scratch []byte // readSpan bytes, for parts of a block
	copy    []byte // the bytes that are copied now: at most compactBytes
}

func (c *compaction) note(what string, err error) {
	c.n.e.cfg.Log.Debug(what, "ino", c.n.ino, "err", err)
}

// bit is an extent that is to be copied.
type bit struct {
	off, length uint64
	use         int32 // of chart.uses; negative: inline
	at          uint32
}

func (p bit) end() uint64 { return p.off + p.length }

// use is a block and how many bytes of the chart refer to it.
type use struct {
	block ids.Block
	live  uint64
}

// chart is a part of a file's map.
type chart struct {
	pieces []bit
	uses   []use
	inline [][]byte
	known  map[ids.BlockID]int32
}

func (t *chart) held() (n uint64) {
	for i := range t.uses {
		n += uint64(t.uses[i].block.Logical)
	}
	return n
}

// add takes over extents inside [lo, hi).
func (t *chart) add(m *api.Map, lo, hi uint64) {
	for i := range m.Blocks {
		if b := &m.Blocks[i]; t.known[b.ID] == 0 {
			t.uses = append(t.uses, use{block: *b})
			t.known[b.ID] = int32(len(t.uses))
		}
	}
	for _, x := range m.Extents {
		if x.Off >= hi || x.End() <= lo {
			continue
		}
		x = x.Slice(max(lo, x.Off), min(hi, x.End()))
		p := bit{off: x.Off, length: x.Len, at: x.BlockOff}
		if x.Kind == ids.ExtentInline {
			t.inline = append(t.inline, x.Data)
			p.use = int32(-len(t.inline))
		} else {
			p.use = t.known[x.Block] - 1
			if p.use < 0 {
				continue // a block that is gone: the map has changed
			}
			t.uses[p.use].live += x.Len
		}
		t.pieces = append(t.pieces, p)
	}
}

// restart forgets what was changed before the map is read anew.
func (c *compaction) restart() error {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	for deadline := n.e.deadline(); n.mu.committing; {
		if err := n.wait(context.Background(), deadline); err != nil {
			return err
		}
	}
	n.mu.moves = moves{tracked: true, version: n.mu.attr.MapVersion}
	return nil
}

// scan reads the map of [lo, hi). TooBig when it has too many extents.
func (c *compaction) scan(lo, hi uint64) (*chart, error) {
	n := c.n
	if err := c.restart(); err != nil {
		return nil, err
	}
	t := &chart{known: map[ids.BlockID]int32{}}
	for at := lo; at < hi; {
		if err := c.going(); err != nil {
			return nil, err
		}
		var reply api.Mapped
		ctx, stop := n.e.opContext(context.Background())
		err := n.e.cfg.Meta.Do(ctx, &api.GetMap{Ino: n.ino, Off: at, End: hi, Max: 4 * mapPageExtents}, &reply)
		stop()
		if err != nil {
			return nil, err
		}
		c.layout = reply.Attr.Layout
		end := min(reply.Map.End, hi)
		if end <= at {
			return nil, errkind.Internal.Wrap("map of inode %s ends at %d", n.ino, end)
		}
		t.add(&reply.Map, at, min(end, reply.Attr.Size))
		if len(t.pieces) > shapeExtents || len(t.uses) > shapeBlocks {
			return nil, errkind.TooBig.Wrap("inode %s has over %d extents or %d blocks", n.ino, shapeExtents, shapeBlocks)
		}
		at = end
	}
	return t, nil
}

// going is an error when the compaction should end.
func (c *compaction) going() error {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	n.e.mu.Lock()
	closed := n.e.mu.closed
	n.e.mu.Unlock()
	if closed || n.mu.moves.broken || n.mu.err != nil {
		return errkind.Changed.Wrap("compact inode %s", n.ino)
	}
	return nil
}

// window joins the extents of a window, when they are too many and copying them
// makes at most half as many.
func (c *compaction) window(off uint64) error {
	t, err := c.scan(off, off+window)
	if err != nil || len(t.pieces) <= windowExtents {
		return err
	}
	runs := 0
	for i, p := range t.pieces {
		if i == 0 || t.pieces[i-1].end() != p.off {
			runs++
		}
	}
	if runs > len(t.pieces)/2 {
		return nil
	}
	return c.relocate(t, t.pieces)
}

// reclaim counts what the file's blocks hold, and copies what is live in the
// most dead ones, until they hold no more than one and a half times as much as
// is live.
func (c *compaction) reclaim() error {
	n := c.n
	n.mu.Lock()
	before := n.mu.shape.fresh
	n.mu.shape.fresh = 0
	n.mu.Unlock()
	t, err := c.scan(0, api.MaxFileSize)
	n.mu.Lock()
	since := n.mu.shape.fresh
	n.mu.shape.fresh += before
	if err != nil {
		n.mu.Unlock()
		return err
	}
	stored := n.mu.attr.Stored
	n.mu.shape.version, n.mu.shape.held = n.mu.moves.version, t.held()+since
	wasteful := n.mu.shape.wasteful(&n.mu.attr)
	n.mu.Unlock()
	if !wasteful {
		return nil
	}
	victims := t.victims(stored)
	move := slices.DeleteFunc(slices.Clone(t.pieces), func(p bit) bool { return p.use < 0 || !victims[p.use] })
	return c.relocate(t, move)
}

// victims chooses blocks, the most dead ones first, without which the others
// hold at most one and a half times the live bytes.
func (t *chart) victims(stored uint64) []bool {
	order := make([]int, len(t.uses))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := &t.uses[i], &t.uses[j]
		return cmp.Compare(a.live*uint64(b.block.Logical), b.live*uint64(a.block.Logical))
	})
	victims := make([]bool, len(t.uses))
	held := t.held()
	for _, i := range order {
		u := &t.uses[i]
		if 2*held <= 3*stored || u.live >= uint64(u.block.Logical) {
			break
		}
		victims[i] = true
		held -= uint64(u.block.Logical) - u.live
	}
	return victims
}

// batch takes the first of the pieces that fit into one replacement.
func (c *compaction) batch(list []bit) int {
	limit := min(compactBytes, c.layout.MaxBlockData())
	ops, bytes := 0, 0
	used := map[int32]bool{}
	for i, p := range list {
		if i == 0 || list[i-1].end() != p.off {
			ops++
		}
		if p.use >= 0 {
			used[p.use] = true
		}
		bytes += int(min(p.length, uint64(limit)+1))
		if i > 0 && (i >= c.limit || ops > compactOps || len(used) > compactBlocks || bytes > limit) {
			return i
		}
	}
	return len(list)
}

// relocate copies pieces into new blocks and swaps them, batch by batch.
func (c *compaction) relocate(t *chart, list []bit) error {
	most := uint64(min(compactBytes, c.layout.MaxBlockData()))
	for len(list) > 0 {
		if err := c.going(); err != nil {
			return err
		}
		if p := list[0]; p.length > most {
			rest := p
			rest.off, rest.length, rest.at = p.off+most, p.length-most, p.at+uint32(most)
			list = slices.Insert(slices.Clone(list[1:]), 0, rest)
			p.length = most
			list = slices.Insert(list, 0, p)
		}
		k := c.batch(list)
		err := c.move(t, list[:k])
		if errkind.Of(err) == errkind.Split && k > 1 {
			c.limit = k / 2
			continue
		}
		if err != nil {
			return err
		}
		list = list[k:]
	}
	return nil
}
