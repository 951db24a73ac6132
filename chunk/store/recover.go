package store

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// recovery brings the index up to date when the disk is opened. The state is
// not shared yet.
type recovery struct {
	*Store
	st      *state
	segs    map[uint32]segRecord // as of the log
	active  []activeRun
	rebuild bool // the log is lost: read every front page
	full    bool // write a new log
}

// recover reads the checkpoint log and then only the front pages that may have
// been written since; what was sealed since is checked against its sums,
// because the seal may have reached the disk before the data.
func (s *Store) recover() error {
	r := &recovery{Store: s, st: &s.mu.state, segs: map[uint32]segRecord{}}
	if err := s.makeDirs(); err != nil {
		return err
	}
	if err := r.readLog(); err != nil {
		return err
	}
	if err := r.openSegments(); err != nil {
		return err
	}
	if !r.rebuild && !r.sane() {
		s.log.Error("the index contradicts itself; it is rebuilt from the segments", "disk", s.id.Disk.String())
		r.startRebuild()
	}
	if err := r.readFronts(); err != nil {
		return err
	}
	r.countSpace()
	s.ckpt.lock()
	defer s.ckpt.unlock()
	err := s.checkpoint(r.full)
	if err != nil && s.writable() == nil && !isFull(err) {
		return err
	}
	if err != nil {
		s.log.Warn("disk opened without a checkpoint", "disk", s.id.Disk.String(), "err", err)
	}
	return nil
}

func (s *Store) makeDirs() error {
	for _, dir := range []string{segDir, logDir} {
		if err := s.fs.MkdirAll(dir); err != nil {
			return wrapIO("make directory "+dir, err)
		}
	}
	if err := s.fs.SyncDir("."); err != nil {
		// Sets the disk read-only, unless it is merely full.
		s.log.Warn("cannot sync the disk's directory", "disk", s.id.Disk.String(), "err", s.failed("sync directory", err))
	}
	return nil
}

func (r *recovery) readLog() error {
	gens, err := generations(r.fs)
	if err != nil {
		return wrapIO("list checkpoints", err)
	}
	if len(gens) == 0 {
		r.rebuild, r.full = true, true
		return nil
	}
	r.clog, err = readLog(r.fs, r.id.Disk, gens[len(gens)-1], r.apply)
	if errors.Is(err, errLogDamaged) {
		r.log.Error("the checkpoint is damaged; the index is rebuilt from the segments", "disk", r.id.Disk.String(), "err", err)
		r.startRebuild()
		return nil
	}
	if err != nil {
		return wrapIO("read checkpoint", err)
	}
	r.full = r.clog.cut
	return nil
}

func (r *recovery) startRebuild() {
	r.rebuild, r.full = true, true
	r.st.idx = newIndex()
	r.active = nil
	for num, seg := range r.segs {
		seg.punched = nil
		r.segs[num] = seg
	}
}

func (r *recovery) apply(b *batch) {
	for _, e := range b.puts {
		r.st.idx.put(e)
	}
	for _, k := range b.drops {
		r.st.idx.drop(k)
	}
	for _, seg := range b.segs {
		if seg.removed {
			delete(r.segs, seg.num)
		} else {
			r.segs[seg.num] = seg
		}
	}
	if b.setActive {
		r.active = b.active
	}
}

// openSegments opens all segment files. A file that the log does not know was
// made just before a crash; it is scanned as a whole, to be sure.
func (r *recovery) openSegments() error {
	names, err := r.fs.List(segDir)
	if err != nil {
		return wrapIO("list segments", err)
	}
	for _, name := range names {
		var num uint32
		if _, err := fmt.Sscanf(name, "%08x.seg", &num); err != nil || segName(num) != segDir+"/"+name {
			r.log.Warn("a strange file among the segments", "disk", r.id.Disk.String(), "file", name)
			continue
		}
		r.st.next = max(r.st.next, num+1)
		if err := r.openSegment(num); err != nil {
			return err
		}
	}
	for num := range r.segs {
		r.st.next = max(r.st.next, num+1)
	}
	return nil
}

func (r *recovery) openSegment(num uint32) error {
	file, err := r.fs.Open(segName(num))
	if err != nil {
		return wrapIO("open "+segName(num), err)
	}
	rec, known := r.segs[num]
	if !known || r.rebuild {
		page := make([]byte, pageSize)
		_, err := file.ReadAt(page, 0)
		h, ok := decodeSegHeader(page)
		if err != nil || !ok || h.disk != r.id.Disk || h.num != num {
			file.Close()
			r.log.Warn("a segment without a valid header is left alone: it was never used, or is damaged",
				"disk", r.id.Disk.String(), "segment", segName(num), "err", err)
			return nil
		}
		if !known {
			rec = segRecord{num: num, uuid: h.uuid, pages: h.pages}
			r.active = append(r.active, activeRun{num, span{1, h.pages}})
			r.st.changedSegs = append(r.st.changedSegs, num)
		}
	}
	r.st.segs[num] = &segment{num: num, uuid: rec.uuid, pages: rec.pages, file: file, punched: rec.punched}
	return nil
}

// sane reports whether the chunks of the log lie in their segments and do not
// overlap; those of a segment that is gone are dropped, loudly.
func (r *recovery) sane() bool {
	var lost []entry
	ok := true
	r.st.idx.all(func(e entry) bool {
		if seg := r.st.segs[e.seg]; seg == nil {
			lost = append(lost, e)
		} else if e.span().hi > seg.pages {
			ok = false
		}
		return ok
	})
	for _, e := range lost {
		r.log.Error("a chunk is lost: its segment is gone", "disk", r.id.Disk.String(), "chunk", e.key().String(), "segment", segName(e.seg))
		r.st.idx.drop(e.key())
		r.st.changed = append(r.st.changed, e.key())
	}
	for _, list := range r.occupied() {
		for i := 1; i < len(list); i++ {
			ok = ok && list[i-1].hi <= list[i].lo
		}
	}
	return ok
}

// occupied lists the ranges of all chunks by segment, in order.
func (r *recovery) occupied() map[uint32][]span {
	out := map[uint32][]span{}
	r.st.idx.all(func(e entry) bool {
		out[e.seg] = append(out[e.seg], e.span())
		return true
	})
	for _, list := range out {
		slices.SortFunc(list, func(a, b span) int { return int(a.lo) - int(b.lo) })
	}
	return out
}

// readFronts finds what changed since the checkpoint.
func (r *recovery) readFronts() error {
	if r.rebuild {
		for _, num := range r.segNums() {
			if err := r.walk(r.st.segs[num], span{1, r.st.segs[num].pages}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := r.readOpen(); err != nil {
		return err
	}
	for _, a := range r.active {
		seg := r.st.segs[a.seg]
		if seg == nil {
			continue
		}
		if a.hi > seg.pages {
			return errkind.Corrupt.Wrap("checkpoint names page %d of %s, which has %d", a.hi, segName(a.seg), seg.pages)
		}
		if err := r.walk(seg, a.span); err != nil {
			return err
		}
	}
	return nil
}

func (r *recovery) segNums() []uint32 {
	nums := make([]uint32, 0, len(r.st.segs))
	for num := range r.st.segs {
		nums = append(nums, num)
	}
	slices.Sort(nums)
	return nums
}

// readOpen looks again at the chunks that were open at the checkpoint.
func (r *recovery) readOpen() error {
	var open []entry
	r.st.idx.all(func(e entry) bool {
		if e.state == chunk.StateOpen {
			open = append(open, e)
		}
		return true
	})
	for _, e := range open {
		seg := r.st.segs[e.seg]
		r.st.wrote(seg)
		page := make([]byte, pageSize)
		if _, err := seg.file.ReadAt(page, int64(e.page)*pageSize); err != nil {
			return wrapIO("read front page of chunk "+e.key().String(), err)
		}
		kind, f := decodeFront(page, seg.place(e.page))
		r.st.idx.drop(e.key())
		r.st.changed = append(r.st.changed, e.key())
		if kind == frontOpen || kind == frontSeal {
			if err := r.found(seg, e.page, kind, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk looks at each page of a range that no chunk covers. It cannot stop at
// the first page without a chunk: after a power failure a front page may be
// there whose predecessors are lost, and it must not be left in free space.
func (r *recovery) walk(seg *segment, in span) error {
	r.st.wrote(seg)
	pr := pageReader{seg: seg}
	for page := in.lo; page < in.hi; {
		p, err := pr.read(page, in.hi)
		if err != nil {
			return wrapIO("read "+segName(seg.num), err)
		}
		kind, f := decodeFront(p, seg.place(page))
		pages := uint32(1)
		switch kind {
		case frontOpen:
			pages = reservedPages(f.header.Reserve)
		case frontSeal:
			pages = reservedPages(f.length)
		}
		if page+pages > in.hi {
			kind, pages = frontNone, 1
		}
		if kind == frontOpen || kind == frontSeal {
			if err := r.found(seg, page, kind, f); err != nil {
				return err
			}
		}
		page += pages
	}
	return nil
}

// found enters a chunk into the index, unless it is not whole.
func (r *recovery) found(seg *segment, page uint32, kind frontKind, f front) error {
	e := keyEntry(f.header.Key)
	e.seg, e.page, e.pages, e.state = seg.num, page, uint16(reservedPages(f.header.Reserve)), chunk.StateOpen
	if kind == frontSeal {
		e.state, e.length, e.digest, e.pages = chunk.StateSealed, f.length, f.digest, uint16(reservedPages(f.length))
		if !r.rebuild && !intact(seg, page, &f) {
			// Its sync never ended: the seal reached the disk, the data did not.
			r.log.Warn("a chunk whose seal was not acknowledged is dropped", "disk", r.id.Disk.String(), "chunk", e.key().String())
			return r.discard(e)
		}
	}
	if old, ok := r.st.idx.get(e.key()); ok {
		// An open chunk that was deleted and begun again elsewhere.
		if old.state == chunk.StateSealed && e.state == chunk.StateOpen {
			return r.discard(e)
		}
		if err := r.discard(old); err != nil {
			return err
		}
	}
	r.st.idx.put(e)
	r.st.changed = append(r.st.changed, e.key())
	return nil
}

// discard overwrites a front page that must not count.
func (r *recovery) discard(e entry) error {
	seg := r.st.segs[e.seg]
	r.st.wrote(seg)
	if err := r.freeFront(seg, e); err != nil && r.writable() == nil {
		return err
	}
	return nil
}

// countSpace derives the free ranges.
func (r *recovery) countSpace() {
	used := r.occupied()
	for _, num := range r.segNums() {
		seg := r.st.segs[num]
		seg.free = spans(used[num]).complement(1, seg.pages)
		seg.punched = seg.punched.intersect(seg.free)
		for _, x := range seg.punched {
			// Perhaps recorded and not done.
			if err := seg.file.Punch(int64(x.lo)*pageSize, int64(x.pages())*pageSize); err != nil {
				r.log.Warn("cannot punch", "segment", segName(num), "err", r.failed("punch "+segName(num), err))
				return
			}
		}
	}
	for num := range r.segs {
		if r.st.segs[num] == nil {
			r.st.changedSegs = append(r.st.changedSegs, num)
		}
	}
	slices.Sort(r.st.changedSegs)
}
