package file

import (
	"container/list"
	"context"
	"sync"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// minPiece is the least that is fetched into the cache at once, in bytes.
const minPiece = 1 << 20

// maxLoading is how many bytes may be on their way when more is fetched ahead:
// enough to keep the servers busy. A reader that waits comes behind them.
const maxLoading = 32 << 20

// pieceSize is the part of a block that is fetched at once: whole stripes.
func pieceSize(b *ids.Block) int {
	s := b.Layout.StripeData()
	return (minPiece + s - 1) / s * s
}

type pieceKey struct {
	block ids.BlockID
	index int
}

// piece is a part of a block in memory. Blocks never change, so neither does
// a piece once it is loaded.
type piece struct {
	key    pieceKey
	mem    []byte // the buffer
	n      int    // bytes of the block in it
	loaded bool
	err    error
	refs   int  // readers, and the task that loads it
	used   bool // somebody read its last byte: first to go
	place  *list.Element
	cond   sched.Cond // over cache.mu: loaded
}

// cache is the read pool: pieces of blocks, shared by all files, each fetched
// once however many want it at the same time. When there is no room reads go
// past it, so nobody ever waits for its memory.
type cache struct {
	e     *Engine
	total int64
	mu    struct {
		sync.Mutex
		used    int64
		loading int64 // bytes of pieces that are not loaded yet
		free    freeList
		pieces  map[pieceKey]*piece
		order   list.List // of *piece, longest unused first
	}
}

func newCache(e *Engine, total int64) *cache {
	c := &cache{e: e, total: total}
	c.mu.pieces = map[pieceKey]*piece{}
	return c
}

// room makes room for a piece of n bytes, dropping what was read and, for a
// reader that waits, what was only fetched ahead.
func (c *cache) room(n int64, demand bool) bool {
	for pass := 0; pass < 2 && c.mu.used+n > c.total; pass++ {
		if pass == 1 && !demand {
			break
		}
		for el := c.mu.order.Front(); el != nil && c.mu.used+n > c.total; {
			p := el.Value.(*piece)
			el = el.Next()
			if p.refs == 0 && (p.used || pass == 1) {
				c.evict(p)
			}
		}
	}
	return c.mu.used+n <= c.total
}

func (c *cache) evict(p *piece) {
	delete(c.mu.pieces, p.key)
	c.mu.order.Remove(p.place)
	p.place = nil
	c.discard(p)
}

// discard returns the buffer of a piece that is no longer listed.
func (c *cache) discard(p *piece) {
	if p.refs == 0 && p.mem != nil {
		c.mu.used -= int64(len(p.mem))
		c.mu.free.put(p.mem)
		c.mu.free.trim(c.total - c.mu.used)
		p.mem = nil
	}
}

// start begins to load a piece; nil when there is no room.
func (c *cache) start(b *ids.Block, index int, demand bool) *piece {
	size := pieceSize(b)
	off := index * size
	n := min(size, int(b.Logical)-off)
	length := roundUp(n)
	if int64(length) > c.total/4 || !c.room(int64(length), demand) {
		return nil
	}
	p := &piece{key: pieceKey{b.ID, index}, n: n, refs: 1, cond: c.e.cfg.Sched.NewCond(&c.mu)}
	c.mu.used += int64(length)
	c.mu.loading += int64(length)
	p.mem = c.mu.free.get(length)
	c.mu.free.trim(c.total - c.mu.used)
	c.mu.pieces[p.key] = p
	p.place = c.mu.order.PushBack(p)
	c.e.task("load", func() {
		ctx, stop := c.e.opContext(context.Background())
		defer stop()
		err := c.e.cfg.Blocks.ReadBlock(ctx, b, off, p.mem[:n])
		c.mu.Lock()
		defer c.mu.Unlock()
		p.loaded, p.err = true, err
		c.mu.loading -= int64(length)
		if err != nil && p.place != nil {
			delete(c.mu.pieces, p.key)
			c.mu.order.Remove(p.place)
			p.place = nil
		}
		c.drop(p)
		p.cond.Broadcast()
	})
	return p
}

// drop undoes one reference.
func (c *cache) drop(p *piece) {
	p.refs--
	if p.place == nil {
		c.discard(p)
	}
}

// read fills the segment, from the cache where it is there or worth it.
func (c *cache) read(ctx context.Context, s *segment, sequential bool) error {
	size := pieceSize(s.block)
	dst, off := s.dst, s.off
	direct := 0 // bytes at the start of dst that are to be read past the cache
	flush := func() error {
		if direct == 0 {
			return nil
		}
		part := dst[:direct]
		at := off
		dst, off, direct = dst[direct:], off+direct, 0
		return c.direct(ctx, s.block, at, part)
	}
	for direct < len(dst) {
		at := off + direct
		index := at / size
		n := min(len(dst)-direct, (index+1)*size-at)
		p := c.find(s, index, sequential)
		if p == nil {
			direct += n
			continue
		}
		if err := flush(); err != nil {
			c.release(p)
			return err
		}
		if err := c.copyFrom(ctx, p, dst[:n], off-index*size); err != nil {
			return err
		}
		dst, off = dst[n:], off+n
	}
	return flush()
}

// direct reads into the caller's own memory, exactly what is asked for.
func (c *cache) direct(ctx context.Context, b *ids.Block, off int, dst []byte) error {
	opctx, stop := c.e.opContext(ctx)
	defer stop()
	return c.e.cfg.Blocks.ReadBlock(opctx, b, off, dst)
}

// find returns the piece, referenced, if it is there, is being loaded, or
// should be.
func (c *cache) find(s *segment, index int, sequential bool) *piece {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.mu.pieces[pieceKey{s.block.ID, index}]
	if p == nil && sequential && worthwhile(s.block, index, s.lo, s.hi) {
		p = c.start(s.block, index, true)
	}
	if p != nil {
		p.refs++
		c.mu.order.MoveToBack(p.place)
	}
	return p
}

// worthwhile reports whether the range [lo, hi) of the block, which one extent
// of a file refers to, is at least half of the piece.
func worthwhile(b *ids.Block, index, lo, hi int) bool {
	size := pieceSize(b)
	from, to := index*size, min((index+1)*size, int(b.Logical))
	return 2*(min(hi, to)-max(lo, from)) >= to-from
}

// await waits for a piece that the caller has referenced, and returns its
// bytes in [off, off+n).
func (c *cache) await(ctx context.Context, p *piece, off, n int) ([]byte, error) {
	deadline := c.e.deadline()
	c.mu.Lock()
	defer c.mu.Unlock()
	for !p.loaded {
		if err := waitOn(ctx, c.e.cfg.Sched, p.cond, deadline); err != nil {
			return nil, err
		}
	}
	if p.err != nil {
		return nil, p.err
	}
	if off+n > p.n {
		return nil, errkind.Internal.Wrap("block %s: read of %d bytes at %d of a piece of %d", p.key.block, n, off, p.n)
	}
	p.used = p.used || off+n == p.n
	return p.mem[off : off+n : off+n], nil
}

// copyFrom waits for the piece and copies from it; it ends the reference.
func (c *cache) copyFrom(ctx context.Context, p *piece, dst []byte, off int) error {
	defer c.release(p)
	part, err := c.await(ctx, p, off, len(dst))
	copy(dst, part)
	return err
}

func (c *cache) release(p *piece) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(p)
}

// prefetch begins to load the pieces of the block that cover [lo, hi), as far
// as there is room and not too much is on its way; false when it ended early.
func (c *cache) prefetch(b *ids.Block, lo, hi, extLo, extHi int) bool {
	size := pieceSize(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := lo / size; i*size < hi; i++ {
		if c.mu.pieces[pieceKey{b.ID, i}] != nil || !worthwhile(b, i, extLo, extHi) {
			continue
		}
		if c.mu.loading >= maxLoading || c.start(b, i, false) == nil {
			return false
		}
	}
	return true
}
