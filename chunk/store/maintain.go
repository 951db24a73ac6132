package store

import (
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Bounds of one call of Maintain.
const (
	punchRanges = 64        // ranges punched
	punchBytes  = 256 << 20 // bytes punched or removed
	punchLeast  = 64 << 10  // bytes; shorter ranges are left to new chunks
)

// Maintain does the periodic work. On a disk that refuses changes it does nothing.
func (s *Store) Maintain() error {
	s.ckpt.lock()
	defer s.ckpt.unlock()
	if s.writable() != nil {
		return nil
	}
	if s.checkpointDue() {
		if err := s.checkpoint(false); err != nil {
			return err
		}
	}
	if err := s.prepareStandby(); err != nil {
		return err
	}
	return s.giveBack()
}

func (s *Store) checkpointDue() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	pending := len(s.mu.changed) + len(s.mu.changedSegs)
	return s.mu.written >= s.cfg.CheckpointBytes || len(s.mu.changed) >= changeBound ||
		pending > 0 && s.cfg.Sched.Now()-s.mu.lastCkpt >= s.cfg.CheckpointEvery
}

// prepareStandby readies the next segment before the current one is used up,
// so that no chunk waits for it.
func (s *Store) prepareStandby() error {
	s.mu.Lock()
	needed := s.mu.standby == nil && slices.ContainsFunc(s.mu.active[:], func(r *run) bool {
		return r != nil && r.pagesLeft() < r.seg.pages/2
	})
	s.mu.Unlock()
	if !needed {
		return nil
	}
	next, err := s.nextRun(min(reservedPages(ids.MaxChunk), uint32(s.cfg.SegmentSize/pageSize)-1))
	if isFull(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.join(next)
}

// giveBack returns to the file system what the reuse pool holds above its bound.
func (s *Store) giveBack() error {
	empty, ranges := s.surplus()
	if len(empty) == 0 && len(ranges) == 0 {
		return nil
	}
	s.mu.Lock()
	for _, x := range ranges {
		seg := s.mu.segs[x.seg]
		seg.punched = seg.punched.add(x.span)
		s.mu.changedSegs = append(s.mu.changedSegs, x.seg)
	}
	s.mu.Unlock()
	// Recorded first: a range that is thought to be punched and is not costs
	// nothing, the other way round a chunk would be promised space in vain. And
	// the log must not name chunks of a segment that is gone.
	if err := s.checkpoint(false); err != nil {
		return err
	}
	for _, seg := range empty {
		if err := s.removeSegment(seg); err != nil {
			return err
		}
	}
	for _, x := range ranges {
		s.mu.Lock()
		seg := s.mu.segs[x.seg]
		s.mu.Unlock()
		if err := seg.file.Punch(int64(x.lo)*pageSize, int64(x.pages())*pageSize); err != nil {
			return s.failed("punch "+segName(x.seg), err)
		}
	}
	return nil
}

// surplus chooses what goes back: whole segments first, then ranges.
func (s *Store) surplus() (empty []*segment, ranges []activeRun) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var idle []*segment
	over := -s.cfg.PoolBytes
	for _, seg := range s.mu.segs {
		if !seg.active {
			idle = append(idle, seg)
			over += (int64(seg.free.pages()) - int64(seg.punched.pages())) * pageSize
		}
	}
	if over <= 0 {
		return nil, nil
	}
	slices.SortFunc(idle, func(a, b *segment) int { return int(a.num) - int(b.num) })
	budget := int64(punchBytes)
	for _, seg := range idle {
		size := int64(seg.free.pages()) * pageSize
		if whole := seg.free.pages() == seg.pages-1 && seg.pins == 0; whole && over >= size && budget > 0 {
			empty = append(empty, seg)
			over, budget = over-size, budget-size
		}
	}
	for _, seg := range idle {
		if slices.Contains(empty, seg) {
			continue
		}
		for _, x := range seg.free.without(seg.punched) {
			size := int64(x.pages()) * pageSize
			if over < size || budget <= 0 || len(ranges) >= punchRanges {
				continue
			}
			if size >= punchLeast {
				ranges = append(ranges, activeRun{seg.num, x})
				over, budget = over-size, budget-size
			}
		}
	}
	return empty, ranges
}

// removeSegment deletes a segment file without chunks.
func (s *Store) removeSegment(seg *segment) error {
	s.mu.Lock()
	delete(s.mu.segs, seg.num)
	s.mu.changedSegs = append(s.mu.changedSegs, seg.num)
	s.mu.Unlock()
	err := s.fs.Remove(segName(seg.num))
	if cerr := seg.file.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return s.failed("remove "+segName(seg.num), err)
	}
	return nil
}

// Check compares the space accounts with the index: every page of every
// segment must be in exactly one list. It takes time in proportion to the
// number of chunks, and is meant for tests and for repair tools.
func (s *Store) Check() error {
	s.ckpt.lock()
	defer s.ckpt.unlock()
	s.alloc.lock()
	defer s.alloc.unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	used := map[uint32][]span{}
	s.mu.idx.all(func(e entry) bool {
		used[e.seg] = append(used[e.seg], e.span())
		return true
	})
	for at, p := range s.mu.pins {
		used[at.seg] = append(used[at.seg], p.freed...)
	}
	for _, r := range s.mu.runs() {
		used[r.seg.num] = append(used[r.seg.num], r.left...)
	}
	for num := range used {
		if s.mu.segs[num] == nil {
			return fmt.Errorf("chunks in %s, which does not exist", segName(num))
		}
	}
	for num, seg := range s.mu.segs {
		all := append(used[num], seg.free...)
		slices.SortFunc(all, func(a, b span) int { return int(a.lo) - int(b.lo) })
		at := uint32(1)
		for _, x := range all {
			if x.lo != at {
				return fmt.Errorf("%s: page %d follows page %d", segName(num), x.lo, at)
			}
			at = x.hi
		}
		if at != seg.pages {
			return fmt.Errorf("%s: pages %d to %d are in no list", segName(num), at, seg.pages)
		}
		if n := seg.punched.intersect(seg.free).pages(); n != seg.punched.pages() {
			return fmt.Errorf("%s: %d punched pages, of which %d are free", segName(num), seg.punched.pages(), n)
		}
	}
	return nil
}

var _ chunk.Store = (*Store)(nil)
