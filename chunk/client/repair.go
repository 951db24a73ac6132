package client

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// drive moves a group on: delivers what has arrived, asks others where a chunk
// is missing, damaged, out or slow, and reconstructs. next is when to look
// again at the latest. Called with the lock held.
func (r *reading) drive(g *group) (done bool, next time.Duration, err error) {
	done, next = true, blindSlow
	for _, t := range g.targets {
		if t.done || r.deliver(g, t) {
			continue
		}
		done = false
		own := r.pending(g, t.chunk, t.lo, t.hi)
		if s := r.mu.sources[t.chunk]; own == nil && s.busy && s.lost(t.lo, t.hi) == nil && !t.repair {
			next = min(next, r.putOff(g, t, s))
		} else if own == nil {
			t.repair = true
		} else {
			stuck, again := r.stuck(g, own)
			next = min(next, again)
			t.repair = t.repair || stuck
		}
		if !t.repair {
			continue
		}
		again, err := r.repair(g, t)
		if err != nil {
			return false, 0, err
		}
		next = min(next, again)
	}
	for _, t := range g.targets {
		done = done && t.done
	}
	return done, next, nil
}

// putOff handles a busy server: it is asked again after a while, or worked
// around as far as the budget for hedging goes.
func (r *reading) putOff(g *group, t *target, s *source) time.Duration {
	left := s.retryAt - r.c.sched.Now()
	switch {
	case left <= 0:
		r.fetch(g, s, t.lo, t.hi, nil)
		return blindSlow
	case !r.crowded() && r.c.hedges.take(int(r.b.Layout.K)*(t.hi-t.lo)):
		t.repair = true
	}
	return left
}

// deliver copies a target's own verified bytes to where they belong.
func (r *reading) deliver(g *group, t *target) bool {
	f := r.good(g, t.chunk, t.lo, t.hi)
	if f == nil {
		return false
	}
	if f.scratch != nil {
		if r.direct(g, t) != nil {
			return false // until the transport has let go of out
		}
		copy(t.out, f.buf[t.lo-f.lo+t.skip:])
	}
	t.done = true
	return true
}

// direct returns a fetch in flight that writes into the target's memory, after
// telling the transport to give it up.
func (r *reading) direct(g *group, t *target) *fetch {
	for _, f := range g.fetches {
		if f.flight && f.scratch == nil && f.src.index == t.chunk && f.lo == t.lo {
			f.cancel()
			return f
		}
	}
	return nil
}

func (r *reading) good(g *group, chunk, lo, hi int) *fetch {
	for _, f := range g.fetches {
		if f.src.index == chunk && f.state == fetchGood && !f.flight && f.lo <= lo && f.hi >= hi {
			return f
		}
	}
	return nil
}

func (r *reading) pending(g *group, chunk, lo, hi int) *fetch {
	for _, f := range g.fetches {
		if f.src.index == chunk && (f.state == fetchPending || f.flight && f.state == fetchGood) && f.lo <= lo && f.hi >= hi {
			return f
		}
	}
	return nil
}

// stuck reports whether a pending fetch should be worked around: its server is
// out, or it is slow and the budget for hedging allows it (rule 22).
func (r *reading) stuck(g *group, f *fetch) (bool, time.Duration) {
	if f.hedged || r.c.health.isOut(f.src.server) {
		return true, blindSlow
	}
	limit, age := r.slow(g, f), r.c.sched.Now()-f.since
	if age < limit {
		return false, limit - age
	}
	r.c.health.probe(f.src.peer)
	if r.crowded() {
		return false, minSlow
	}
	have := 0
	for i := range r.mu.sources {
		if i != f.src.index && (r.good(g, i, f.lo, f.hi) != nil || r.pending(g, i, f.lo, f.hi) != nil) {
			have++
		}
	}
	f.hedged = r.c.hedges.take(max(1, int(r.b.Layout.K)-have) * (f.hi - f.lo))
	return f.hedged, minSlow
}

// slow is the age from which a fetch counts as slow: 3 × the median of its
// stripe mates once half of them are there, else by what reads took lately.
func (r *reading) slow(g *group, f *fetch) time.Duration {
	var took []time.Duration
	mates := 0
	for _, o := range g.fetches {
		if o == f {
			continue
		}
		mates++
		if o.state == fetchGood {
			took = append(took, o.took)
		}
	}
	if len(took) > 0 && 2*len(took) >= mates {
		slices.Sort(took)
		return max(minSlow, 3*took[len(took)/2])
	}
	if m := r.c.health.readMedian(); m > 0 && mates == 0 {
		return max(minSlow, 3*m)
	}
	return max(blindSlow, 10*r.c.health.readMedian())
}

// crowded reports that every server of the block has long queues.
func (r *reading) crowded() bool {
	for _, s := range r.mu.sources {
		if s.gone == nil && r.c.health.delay(s.server) < highDelay {
			return false
		}
	}
	return true
}

// repair gathers any K chunks' bytes of the target's range and reconstructs.
func (r *reading) repair(g *group, t *target) (next time.Duration, err error) {
	k, next := int(r.b.Layout.K), blindSlow
	var good []*fetch
	coming := 0
	for i := range r.mu.sources {
		if f := r.good(g, i, t.lo, t.hi); f != nil {
			good = append(good, f)
		} else if f := r.pending(g, i, t.lo, t.hi); f != nil {
			stuck, again := r.stuck(g, f)
			next = min(next, again)
			if !stuck {
				coming++
			}
		}
	}
	if len(good) >= k {
		if r.direct(g, t) != nil {
			return minSlow, nil // its end wakes us
		}
		return next, r.reconstruct(t, good)
	}
	need := k - len(good) - coming
	for _, lastResort := range []bool{false, true} {
		for _, s := range r.mu.sources {
			if need > 0 && r.pending(g, s.index, t.lo, t.hi) == nil && r.good(g, s.index, t.lo, t.hi) == nil && r.usable(s, t, lastResort) {
				r.fetch(g, s, t.lo, t.hi, nil)
				need--
			}
		}
	}
	if need <= 0 {
		return next, nil
	}
	return min(next, retryAfter), r.enough(t, k)
}

// usable reports whether a chunk may be asked now for the target's range. Servers that are out, and
// chunks whose last request failed, are a last resort.
func (r *reading) usable(s *source, t *target, lastResort bool) bool {
	if s.lost(t.lo, t.hi) != nil || s.retryAt > r.c.sched.Now() {
		return false
	}
	return lastResort || s.fails == 0 && !r.c.health.isOut(s.server)
}

// enough returns an error when K chunks cannot be had: at once when too many
// are missing or damaged, at the deadline when their servers do not answer.
func (r *reading) enough(t *target, k int) error {
	kind, have := errkind.NoChunk, 0
	var why []string
	for _, s := range r.mu.sources {
		lost := s.lost(t.lo, t.hi)
		if lost == nil {
			have++
			if s.last != nil {
				why = append(why, fmt.Sprintf("chunk %d on disk %d: %v", s.index, s.disk, s.last))
			}
			continue
		}
		why = append(why, lost.Error())
		if errkind.Of(lost) == errkind.Corrupt {
			kind = errkind.Corrupt
		}
	}
	text := strings.Join(why, "; ")
	if have < k {
		return kind.Wrap("read block %s: %d of its %d chunks are left, %d are needed (%s)", r.b.ID, have, r.b.Layout.Width(), k, text)
	}
	if r.c.sched.Now() >= r.deadline {
		return errkind.Unavailable.Wrap("read block %s: fewer than %d of its %d chunks could be read in %s (%s)", r.b.ID, k, r.b.Layout.Width(), r.c.cfg.Timeout, text)
	}
	return nil
}

// reconstruct computes the target from K other chunks, all of them verified.
func (r *reading) reconstruct(t *target, from []*fetch) error {
	n := t.hi - t.lo
	cells, want := make([][]byte, r.b.Layout.Width()), make([]bool, r.b.Layout.Width())
	for _, f := range from {
		cells[f.src.index] = f.buf[t.lo-f.lo : t.hi-f.lo]
	}
	var scratch *buffer
	into := t.out
	if !t.exact() {
		scratch = r.c.buffer(n)
		defer r.c.free(scratch)
		into = scratch.p
	}
	cells[t.chunk], want[t.chunk] = into[:0:n], true
	if err := r.coder.Reconstruct(cells, want); err != nil {
		return errkind.Internal.Wrap("read block %s: %v", r.b.ID, err)
	}
	if table := r.mu.sources[t.chunk].table; table != nil {
		g := r.b.Granule
		if !ec.Check(into[:n], table[t.lo>>g:ec.Granules(t.hi, g)], g) {
			return errkind.Corrupt.Wrap("read block %s: chunk %d, reconstructed, does not match its checksums", r.b.ID, t.chunk)
		}
	}
	if scratch != nil {
		copy(t.out, into[t.skip:n])
	}
	t.done = true
	return nil
}
