package client

import (
	"context"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Bounds of a read.
const (
	fetchTimeout = 10 * time.Second
	minSlow      = 20 * time.Millisecond  // rule 22
	blindSlow    = 250 * time.Millisecond // nothing to compare with
	highDelay    = 50 * time.Millisecond  // queue delay at which nobody hedges
	retryAfter   = 50 * time.Millisecond
)

// reading is one read of ranges of one block's chunks. What it fetches is
// verified against the block record: each chunk's table against its digest,
// each granule against the table.
type reading struct {
	c        *Client
	b        *ids.Block
	class    wire.Class
	coder    *ec.Coder
	chunkLen int
	deadline time.Duration

	mu struct {
		sync.Mutex
		sources []*source
		active  []*group
		flight  int // requests that the transport holds
	}
	cond sched.Cond
}

// source is one chunk of the block.
type source struct {
	peer
	index   int
	gone    error  // missing or damaged as a whole: not asked (again)
	bad     []span // damaged ranges: the rest of the chunk is as good as any
	fails   int
	busy    bool // the last request was put off: ask again at retryAt
	retryAt time.Duration
	last    error
	table   []uint64 // verified
	asking  bool     // for the table
	cancel  func()   // of asking
	waiting []*fetch // have data, wait for the table
}

// span is a range [lo, hi) of a chunk whose bytes do not match their checksums.
type span struct {
	lo, hi int
	err    error
}

// lost says why the range [lo, hi) of the chunk cannot be had, nil if it may.
func (s *source) lost(lo, hi int) error {
	if s.gone != nil {
		return s.gone
	}
	for _, b := range s.bad {
		if lo < b.hi && b.lo < hi {
			return b.err
		}
	}
	return nil
}

// group is the part of a read that lies in one stripe.
type group struct {
	targets []*target
	fetches []*fetch
	bytes   int64
}

// target is a range of one chunk that is wanted: granule-aligned [lo, hi), of
// which out gets the bytes from skip on.
type target struct {
	chunk, lo, hi int
	skip          int
	out           []byte
	repair        bool // others are asked too
	done          bool
}

// exact says that the fetched range is just what out takes.
func (t *target) exact() bool { return len(t.out) == t.hi-t.lo }

type fetchState uint8

const (
	fetchPending fetchState = iota
	fetchGood               // verified
	fetchBad
)

// fetch is one request for a range of a chunk.
type fetch struct {
	src     *source
	lo, hi  int
	buf     []byte
	scratch *buffer // owns buf; nil when buf is the caller's memory
	state   fetchState
	since   time.Duration
	took    time.Duration
	flight  bool
	hedged  bool // found slow, and counted in the budget
	orphan  bool // its group is done
	cancel  func()
}

// ReadBlock fills dst from offset off of the block. See chunk.Blocks.
func (c *Client) ReadBlock(ctx context.Context, b *ids.Block, off int, dst []byte) error {
	return c.readBlock(ctx, b, off, dst, wire.ClassForeground)
}

func (c *Client) readBlock(ctx context.Context, b *ids.Block, off int, dst []byte, class wire.Class) error {
	if off < 0 || off+len(dst) > int(b.Length) {
		return errkind.Range.Wrap("read block %s: [%d, %d) of %d bytes", b.ID, off, off+len(dst), b.Length)
	}
	if len(dst) == 0 {
		return nil
	}
	r, err := c.newReading(b, class)
	if err != nil {
		return err
	}
	var groups []*group
	stripe := -1
	for _, p := range ec.Pieces(nil, b.Layout, int(b.Length), off, len(dst)) {
		if s := p.BlockOff / b.Layout.StripeData(); s != stripe {
			stripe = s
			groups = append(groups, &group{})
		}
		at := p.BlockOff - off
		r.want(groups[len(groups)-1], p.Chunk, p.Off, dst[at:at+p.Len:at+p.Len])
	}
	return r.run(ctx, groups)
}

func (c *Client) newReading(b *ids.Block, class wire.Class) (*reading, error) {
	width := b.Layout.Width()
	coder, err := ec.For(b.Layout)
	switch {
	case err != nil:
		return nil, errkind.Unsupported.Wrap("read block %s: %v", b.ID, err)
	case b.Codec != ids.CodecNone:
		return nil, errkind.Unsupported.Wrap("read block %s: codec %d; this version knows none", b.ID, b.Codec)
	case len(b.Disks) != width || len(b.Digests) != width || b.Granule < 12 || b.Granule > 20:
		return nil, errkind.Corrupt.Wrap("read block %s: record of %d disks, %d digests, granule 2^%d", b.ID, len(b.Disks), len(b.Digests), b.Granule)
	}
	m := c.cfg.Map()
	if m == nil {
		return nil, errkind.Unavailable.Wrap("read block %s: no cluster map yet", b.ID)
	}
	r := &reading{c: c, b: b, class: class, coder: coder, chunkLen: ec.ChunkLen(b.Layout, int(b.Length))}
	r.deadline = c.sched.Now() + c.cfg.Timeout
	r.cond = c.sched.NewCond(&r.mu)
	for i, id := range b.Disks {
		s := &source{index: i, peer: peer{disk: id}}
		if id == 0 {
			s.gone = errkind.NoChunk.Wrap("chunk %d has no disk", i)
		} else if d := m.Disk(id); d == nil {
			s.gone = errkind.NoChunk.Wrap("chunk %d was on disk %d, which is not in the cluster map", i, id)
		} else if srv := m.Server(d.Server); srv == nil {
			s.gone = errkind.NoChunk.Wrap("chunk %d: the server of disk %d is not in the cluster map", i, id)
		} else {
			s.server, s.addr, s.host = srv.ID, srv.Addr, srv.Host
			s.table = c.tables.get(r.key(i), b.Digests[i])
		}
		r.mu.sources = append(r.mu.sources, s)
	}
	return r, nil
}

func (r *reading) key(i int) ids.ChunkKey { return ids.ChunkKey{Block: r.b.ID, Index: uint8(i)} }

// want adds a range of a chunk to a group, widened to whole granules.
func (r *reading) want(g *group, chunk, off int, out []byte) {
	mask := 1<<r.b.Granule - 1
	lo, hi := off&^mask, min((off+len(out)+mask)&^mask, r.chunkLen)
	g.targets = append(g.targets, &target{chunk: chunk, lo: lo, hi: hi, skip: off - lo, out: out})
	g.bytes += int64(hi - lo)
}

// run reads groups, as many at a time as the window allows. It returns once
// the transport holds nothing of them any more.
func (r *reading) run(ctx context.Context, groups []*group) error {
	defer wake(ctx, &r.mu, r.cond)()
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.loop(ctx, groups)
	for _, g := range r.mu.active {
		r.retire(g)
	}
	r.mu.active = nil
	for _, s := range r.mu.sources {
		if s.asking {
			s.cancel()
		}
	}
	for r.mu.flight > 0 {
		r.cond.Wait()
	}
	return err
}

func (r *reading) loop(ctx context.Context, groups []*group) error {
	for {
		var err error
		if groups, err = r.admit(ctx, groups); err != nil {
			return err
		}
		if len(r.mu.active) == 0 {
			return nil
		}
		if err := ended(ctx, "read block "+r.b.ID.String()); err != nil {
			return err
		}
		wait, finished := blindSlow, false
		left := r.mu.active[:0]
		for i, g := range r.mu.active {
			done, next, err := r.drive(g)
			if err != nil {
				r.mu.active = append(left, r.mu.active[i:]...)
				return err
			}
			wait = min(wait, next)
			if !done {
				left = append(left, g)
				continue
			}
			finished = true
			r.retire(g)
		}
		r.mu.active = left
		if finished {
			continue
		}
		r.cond.WaitFor(max(wait, time.Millisecond))
	}
}

// admit starts the next groups. It waits for the window only when nothing is
// under way whose end this read must handle.
func (r *reading) admit(ctx context.Context, groups []*group) ([]*group, error) {
	for len(groups) > 0 {
		g := groups[0]
		if len(r.mu.active) > 0 {
			if !r.c.window.try(g.bytes) {
				return groups, nil
			}
		} else {
			r.mu.Unlock()
			err := r.c.window.acquire(ctx, g.bytes)
			r.mu.Lock()
			if err != nil {
				return groups, err
			}
		}
		groups = groups[1:]
		r.mu.active = append(r.mu.active, g)
		for _, t := range g.targets {
			if s := r.mu.sources[t.chunk]; s.lost(t.lo, t.hi) == nil && !r.c.health.isOut(s.server) {
				var direct []byte
				if t.exact() {
					direct = t.out
				}
				r.fetch(g, s, t.lo, t.hi, direct)
			}
		}
	}
	return groups, nil
}

// retire ends a group: what is still in flight is cancelled.
func (r *reading) retire(g *group) {
	r.c.window.release(g.bytes)
	for _, f := range g.fetches {
		f.orphan = true
		if f.flight {
			f.cancel()
		} else {
			r.c.free(f.scratch)
			f.scratch = nil
		}
	}
}

// RebuildChunk computes chunk index of a block, cell by cell, from what is
// undamaged of it and, for the rest, from any K others,
// and hands the pieces to w in order: their offset in the chunk, bytes (valid
// during the call) and checksums. After the last piece the whole is compared
// with the block record's digest: on an error that wraps Corrupt, or any other,
// what w stored must not be sealed. Errors of w are returned as they are.
func (c *Client) RebuildChunk(ctx context.Context, b *ids.Block, index int, w func(off uint32, data []byte, sums []uint64) error) error {
	r, err := c.newReading(b, wire.ClassRepair)
	if err != nil {
		return err
	}
	if index < 0 || index >= b.Layout.Width() {
		return errkind.Range.Wrap("rebuild block %s: chunk %d of %d", b.ID, index, b.Layout.Width())
	}
	step := max(b.Layout.CellSize(), 1<<b.Granule)
	buf := c.buffer(min(step, r.chunkLen))
	defer c.free(buf)
	var table []uint64
	for off := 0; off < r.chunkLen; off += step {
		g, p := &group{}, buf.p[:min(step, r.chunkLen-off)]
		r.want(g, index, off, p)
		r.deadline = c.sched.Now() + c.cfg.Timeout
		if err := r.run(ctx, []*group{g}); err != nil {
			return err
		}
		from := len(table)
		table = ec.Sums(table, p, b.Granule)
		if err := w(uint32(off), p, table[from:]); err != nil {
			return err
		}
	}
	if got := ec.Digest(table); got != b.Digests[index] {
		return errkind.Corrupt.Wrap("rebuild chunk %s: digest %016x, the block record has %016x", r.key(index), got, b.Digests[index])
	}
	return nil
}
