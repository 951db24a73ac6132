package file

import (
	"context"
	"sync"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

const (
	maxStreams   = 16       // sequential readers followed in one inode (rule 32)
	streamSlack  = 1 << 20  // how far requests of one stream may be out of order, bytes
	firstWindow  = 2 << 20  // bytes fetched ahead of a new stream
	maxWindow    = 64 << 20 // bytes fetched ahead of a long one
	streamRead   = 64 << 10 // a read of this length at the start of a file begins a stream at once
	readParallel = 8        // parts of one read that are fetched at the same time
)

// stream is one sequential reader of a file.
type stream struct {
	next   uint64 // where it goes on
	ahead  uint64 // up to where was fetched
	window uint64
	used   uint64 // n.mu.clock of its last read; 0: not in use
}

// noteRead follows the streams of the inode, fetches ahead, and reports
// whether the read belongs to a stream.
func (n *inode) noteRead(off uint64, count int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.clock++
	s := n.findStream(off)
	end := off + uint64(count)
	if s == nil {
		s = &n.mu.streams[0]
		for i := range n.mu.streams {
			if n.mu.streams[i].used < s.used {
				s = &n.mu.streams[i]
			}
		}
		*s = stream{next: end, ahead: end, window: firstWindow, used: n.mu.clock}
		return off == 0 && count >= streamRead
	}
	s.used = n.mu.clock
	s.next = max(s.next, end)
	limit := min(maxWindow, uint64(n.e.cache.total)/8)
	s.ahead = max(s.ahead, s.next)
	if s.ahead-s.next < s.window/2 {
		s.window = min(2*s.window, max(limit, unit))
		s.ahead = n.fetchAhead(s.ahead, min(s.next+s.window, n.mu.attr.Size))
	}
	return true
}

func (n *inode) findStream(off uint64) *stream {
	for i := range n.mu.streams {
		s := &n.mu.streams[i]
		if s.used != 0 && off+streamSlack >= s.next && off <= s.next+streamSlack {
			return s
		}
	}
	return nil
}

// fetchAhead begins to load [lo, hi) of the committed file, as far as its map
// is known and there is room, and returns how far it came.
func (n *inode) fetchAhead(lo, hi uint64) uint64 {
	for lo < hi {
		x, end, known := n.mu.emap.at(lo)
		if !known {
			break
		}
		end = min(end, hi)
		if x != nil && x.Kind == ids.ExtentBlock {
			b := n.mu.emap.blocks[x.Block]
			if b == nil {
				break
			}
			at := int(x.BlockOff) + int(lo-x.Off)
			if !n.e.cache.prefetch(b, at, at+int(end-lo), int(x.BlockOff), int(x.BlockOff)+int(x.Len)) {
				break
			}
		}
		lo = end
	}
	return lo
}

// fan reads several segments at the same time.
type fan struct {
	cond sched.Cond
	mu   struct {
		sync.Mutex
		next    int
		running int
		err     error
	}
}

// fetchSegments reads all segments. It returns only when nothing writes into
// them any more.
func (n *inode) fetchSegments(ctx context.Context, segs []segment, sequential bool) error {
	if len(segs) == 1 {
		return n.e.cache.read(ctx, &segs[0], sequential)
	}
	f := &fan{}
	f.cond = n.e.cfg.Sched.NewCond(&f.mu)
	work := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for f.mu.err == nil && f.mu.next < len(segs) {
			s := &segs[f.mu.next]
			f.mu.next++
			f.mu.Unlock()
			err := n.e.cache.read(ctx, s, sequential)
			f.mu.Lock()
			if f.mu.err == nil {
				f.mu.err = err
			}
		}
		f.mu.running--
		f.cond.Broadcast()
	}
	f.mu.running = min(readParallel, len(segs))
	for range f.mu.running - 1 {
		n.e.task("read", work)
	}
	work()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.mu.running > 0 {
		// Each call under way ends with ctx or the operation time-out.
		f.cond.WaitFor(n.e.cfg.OpTimeout)
	}
	return f.mu.err
}
