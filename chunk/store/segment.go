package store

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

const (
	segDir = "segments"
	// maxRuns bounds the ranges of one segment that are in use at once, and so
	// the record of them in a checkpoint.
	maxRuns = 4096
)

// class keeps small records apart from chunks, in segments of their own, so
// that small files do not cut up the space that large chunks need.
type class uint8

const (
	classLarge class = iota
	classSmall
	classes
)

func classOf(pages uint32) class {
	if pages <= 1+smallRecord/pageSize {
		return classSmall
	}
	return classLarge
}

// segment is one preallocated file. Its lists are guarded by Store.mu; pages
// leave free, and punched changes, only under the ckpt gate.
//
// What is freed may be given out again only after a checkpoint: its front page
// is durably zero then, and the log does not name it any more. That needs no
// list of its own, because pages are given out from runs alone, and a run
// begins with a checkpoint.
type segment struct {
	num   uint32
	uuid  ids.UUID
	pages uint32
	file  vfs.File

	free    spans // may be given out once the segment is activated
	punched spans // the part of free that takes no space on the disk
	active  bool  // a run has it
	dirty   bool  // it is in state.dirty
	pins    int
}

func segName(num uint32) string { return fmt.Sprintf("%s/%08x.seg", segDir, num) }

func (g *segment) place(page uint32) place { return place{g.uuid, uint64(page) * pageSize} }

// run is a segment's free ranges while chunks are being made in them: where a
// restart looks for new front pages. Each range is used up from its start.
// Guarded by Store.mu, and used up only under the alloc gate.
type run struct {
	seg  *segment
	left []span
}

// take cuts n pages off the first range that has them.
func (r *run) take(n uint32) (page uint32, ok bool) {
	for i := range r.left {
		if r.left[i].pages() < n {
			continue
		}
		page = r.left[i].lo
		r.left[i].lo += n
		if r.left[i].pages() == 0 {
			r.left = slices.Delete(r.left, i, i+1)
		}
		return page, true
	}
	return 0, false
}

func (r *run) pagesLeft() uint32 { return spans(r.left).pages() }

// runs lists all runs that a checkpoint must know of, in a fixed order.
func (st *state) runs() []*run {
	var out []*run
	for _, r := range st.active {
		if r != nil {
			out = append(out, r)
		}
	}
	if st.standby != nil {
		out = append(out, st.standby)
	}
	return out
}

// allocate takes n pages for a chunk of the class from the ranges at hand.
// Called under the alloc gate.
func (s *Store) allocate(cl class, n uint32) (*segment, uint32, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.take(cl, n)
}

func (st *state) take(cl class, n uint32) (*segment, uint32, bool) {
	if r := st.active[cl]; r != nil {
		if page, ok := r.take(n); ok {
			return r.seg, page, true
		}
	}
	r := st.standby
	if r == nil || !spans(r.left).fits(n) {
		return nil, 0, false
	}
	st.active[cl].retire()
	st.active[cl], st.standby = r, nil
	page, _ := r.take(n)
	return r.seg, page, true
}

// retire ends the run. The last checkpoint still names it: what was made in it
// since is found.
func (r *run) retire() {
	if r != nil {
		r.seg.free = r.seg.free.union(r.left)
		r.seg.active = false
	}
}

// takeAnywhere is allocate on a disk that has no other room: the class does
// not matter then.
func (s *Store) takeAnywhere(n uint32) (*segment, uint32, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for cl := range classes {
		if seg, page, ok := s.mu.take(cl, n); ok {
			return seg, page, true
		}
	}
	return nil, 0, false
}

// makeRoom readies a segment with a range of n pages. NoSpace when there is
// none and the disk has no room for a new one.
func (s *Store) makeRoom(n uint32) error {
	s.ckpt.lock()
	defer s.ckpt.unlock()
	s.mu.Lock()
	ready := s.mu.standby != nil && spans(s.mu.standby.left).fits(n)
	s.mu.Unlock()
	if ready {
		return nil
	}
	r, err := s.nextRun(n)
	if err != nil {
		return err
	}
	return s.join(r)
}

// join makes r the standby once a checkpoint has recorded it.
func (s *Store) join(r *run) error {
	if err := s.checkpointWith(r, false); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		r.retire()
		return err
	}
	return nil
}

// nextRun picks the segment that goes on: written space first, because it
// syncs faster; then a new segment; at last whatever fits. Called under the
// ckpt gate.
func (s *Store) nextRun(n uint32) (*run, error) {
	if err := s.writable(); err != nil {
		return nil, err
	}
	if seg := s.pick(n, 8); seg != nil {
		return s.activate(seg, n)
	}
	seg, err := s.createSegment(n, uint32(s.cfg.SegmentSize/pageSize))
	if err == nil {
		return s.activate(seg, n)
	}
	if !isFull(err) {
		return nil, err
	}
	if seg := s.pick(n, 0); seg != nil {
		return s.activate(seg, n)
	}
	if seg, err = s.createSegment(n, n+1); err != nil {
		return nil, err
	}
	return s.activate(seg, n)
}

// pick returns the idle segment with the most free pages that are not punched,
// among those with a range of n pages. With share > 0 at least that fraction
// of it must be free and written.
func (s *Store) pick(n, share uint32) *segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	var best *segment
	var most int64 = -1
	for _, seg := range s.mu.segs {
		if seg.active || !seg.free.fits(n) {
			continue
		}
		written := int64(seg.free.pages()) - int64(seg.punched.pages())
		if share > 0 && written < int64(seg.pages/share) {
			continue
		}
		if written > most || written == most && seg.num < best.num {
			best, most = seg, written
		}
	}
	return best
}

// activate turns the segment's free ranges into a run, with space on the disk
// for each. The run must be recorded by a checkpoint before it is used.
func (s *Store) activate(seg *segment, n uint32) (*run, error) {
	s.mu.Lock()
	left, punched := slices.Clone(seg.free), slices.Clone(seg.punched)
	s.mu.Unlock()
	if len(left) > maxRuns {
		slices.SortStableFunc(left, func(a, b span) int { return int(b.pages()) - int(a.pages()) })
		left = left[:maxRuns]
		slices.SortFunc(left, func(a, b span) int { return int(a.lo) - int(b.lo) })
	}
	back := punched.intersect(left)
	for _, x := range back {
		if err := seg.file.Allocate(int64(x.lo)*pageSize, int64(x.pages())*pageSize); err != nil {
			if isFull(err) {
				left = left.remove(x)
				continue
			}
			return nil, s.failed("allocate in "+segName(seg.num), err)
		}
		punched = punched.remove(x)
	}
	if !left.fits(n) {
		return nil, errkind.NoSpace.Wrap("no room for %d bytes on disk %s", uint64(n)*pageSize, s.id.Disk)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	seg.free = seg.free.without(left)
	seg.punched = punched
	seg.active = true
	if len(back) > 0 {
		s.mu.changedSegs = append(s.mu.changedSegs, seg.num)
	}
	return &run{seg: seg, left: left}, nil
}

// createSegment makes a segment file of about pages, at least one that holds
// a chunk of n. NoSpace when that would eat into the reserve.
func (s *Store) createSegment(n, pages uint32) (*segment, error) {
	pages = max(pages, n+1)
	_, free, err := s.fs.Space()
	if err != nil {
		return nil, s.failed("read free space", err)
	}
	if free < uint64(pages)*pageSize+uint64(s.cfg.ReserveBytes) {
		return nil, errkind.NoSpace.Wrap("disk %s is full: no room for a segment of %d bytes", s.id.Disk, uint64(pages)*pageSize)
	}
	s.mu.Lock()
	num := s.mu.next
	s.mu.next++
	s.mu.Unlock()
	seg := &segment{num: num, uuid: s.newUUID(), pages: pages, free: spans{{1, pages}}}
	file, err := s.fs.Create(segName(num))
	if err != nil {
		return nil, s.failed("create "+segName(num), err)
	}
	seg.file = file
	head := encodeSegHeader(segHeader{disk: s.id.Disk, uuid: seg.uuid, num: num, pages: pages})
	err = file.Allocate(0, int64(pages)*pageSize)
	if err == nil {
		_, err = file.WriteAt(head, 0)
	}
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = s.fs.SyncDir(segDir)
	}
	if err != nil {
		file.Close()
		if rerr := s.fs.Remove(segName(num)); rerr != nil {
			s.log.Warn("cannot remove an unfinished segment", "segment", segName(num), "err", rerr)
		}
		return nil, s.failed("create "+segName(num), err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.segs[num] = seg
	s.mu.changedSegs = append(s.mu.changedSegs, num)
	return seg, nil
}

func (s *Store) newUUID() ids.UUID {
	var u ids.UUID
	binary.LittleEndian.PutUint64(u[0:], s.cfg.Sched.Uint64())
	binary.LittleEndian.PutUint64(u[8:], s.cfg.Sched.Uint64())
	return u
}
