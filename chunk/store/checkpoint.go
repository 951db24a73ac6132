package store

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// changeBound is the number of changes that force a checkpoint.
const changeBound = 256 << 10

// mark is what a checkpoint took from the state when it began.
type mark struct {
	idx     index
	changed []ids.ChunkKey
	segs    []segRecord
	segNums []uint32
	active  []activeRun
	written int64
	ticket  uint64
}

// checkpoint makes the index durable as of now.
// Called under the ckpt gate. full writes all of it into a new log file.
func (s *Store) checkpoint(full bool) error { return s.checkpointWith(nil, full) }

// checkpointWith also makes r the standby, if not nil.
func (s *Store) checkpointWith(r *run, full bool) error {
	if err := s.writable(); err != nil {
		return err
	}
	if s.clog == nil || s.clog.end > 8<<20+2*48*int64(s.chunks()) {
		full = true
	}
	m := s.beginCheckpoint(r, full)
	// What the log will call sealed, or deleted, must be so on the disk before.
	err := s.Sync(m.ticket)
	if err == nil {
		err = s.writeCheckpoint(m, full)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.mu.changed = append(m.changed, s.mu.changed...)
		s.mu.changedSegs = append(m.segNums, s.mu.changedSegs...)
		s.mu.written += m.written
		return fmt.Errorf("checkpoint disk %s: %w", s.id.Disk, err)
	}
	if r != nil {
		s.mu.standby.retire()
		s.mu.standby = r
	}
	s.mu.lastCkpt = s.cfg.Sched.Now()
	return nil
}

func (s *Store) chunks() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.idx.len()
}

// beginCheckpoint takes the state at one moment, between two allocations.
func (s *Store) beginCheckpoint(r *run, full bool) *mark {
	s.alloc.lock()
	defer s.alloc.unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &s.mu.state
	m := &mark{
		idx: st.idx.snapshot(), changed: st.changed, segNums: st.changedSegs,
		written: st.written, ticket: st.newTicket(),
	}
	st.changed, st.changedSegs, st.written = nil, nil, 0
	runs := st.runs()
	if r != nil {
		runs = append(runs, r)
	}
	for _, r := range runs {
		for _, x := range r.left {
			m.active = append(m.active, activeRun{r.seg.num, x})
		}
	}
	nums := slices.Clone(m.segNums)
	if full {
		nums = slices.AppendSeq(nums, maps.Keys(st.segs))
	}
	slices.Sort(nums)
	for _, num := range slices.Compact(nums) {
		if seg := st.segs[num]; seg != nil {
			m.segs = append(m.segs, segRecord{num: num, uuid: seg.uuid, pages: seg.pages, punched: slices.Clone(seg.punched)})
		} else if !full {
			m.segs = append(m.segs, segRecord{num: num, removed: true})
		}
	}
	return m
}

// writeCheckpoint appends what changed, or writes everything anew.
func (s *Store) writeCheckpoint(m *mark, full bool) error {
	var p packer
	for _, seg := range m.segs {
		p.add(25+8*len(seg.punched), func(b *batch) { b.segs = append(b.segs, seg) })
	}
	if full {
		return s.rewriteLog(m, &p)
	}
	keys := slices.Clone(m.changed)
	slices.SortFunc(keys, compareKeys)
	for _, key := range slices.Compact(keys) {
		if e, ok := m.idx.get(key); ok {
			p.add(47, func(b *batch) { b.puts = append(b.puts, e) })
		} else {
			p.add(17, func(b *batch) { b.drops = append(b.drops, key) })
		}
	}
	if err := s.clog.append(p.finish(m.active)); err != nil {
		return s.failed("write checkpoint", err)
	}
	return nil
}

// rewriteLog writes a log file of the next generation and removes older ones.
func (s *Store) rewriteLog(m *mark, p *packer) error {
	m.idx.all(func(e entry) bool {
		p.add(47, func(b *batch) { b.puts = append(b.puts, e) })
		return true
	})
	all := p.finish(m.active)
	next := func() *batch {
		if len(all) == 0 {
			return nil
		}
		b := &all[0]
		all = all[1:]
		return b
	}
	gen, seq := uint64(1), uint64(0)
	if s.clog != nil {
		gen, seq = s.clog.gen+1, s.clog.seq
	} else if gens, err := generations(s.fs); err != nil {
		return s.failed("list checkpoints", err)
	} else if len(gens) > 0 {
		gen = gens[len(gens)-1] + 1
	}
	l, err := createLog(s.fs, s.id.Disk, gen, seq, next)
	if err != nil {
		return s.failed("write checkpoint", err)
	}
	if s.clog != nil {
		s.clog.file.Close()
	}
	s.clog = l
	s.removeOldLogs()
	return nil
}

// removeOldLogs is only tidying: a restart reads the newest generation.
func (s *Store) removeOldLogs() {
	gens, err := generations(s.fs)
	for _, gen := range gens {
		if gen < s.clog.gen {
			err = errors.Join(err, s.fs.Remove(logName(gen)))
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("cannot remove old checkpoints", "disk", s.id.Disk.String(), "err", err)
	}
}

// packer divides a checkpoint into batches of bounded size.
type packer struct {
	done []batch
	now  batch
	size int
}

func (p *packer) add(size int, put func(*batch)) {
	if p.size+size > batchTarget {
		p.now.more = true
		p.done = append(p.done, p.now)
		p.now, p.size = batch{}, 0
	}
	p.size += size
	put(&p.now)
}

// finish returns the batches; the last one names the runs.
func (p *packer) finish(active []activeRun) []batch {
	p.now.setActive, p.now.active = true, active
	return append(p.done, p.now)
}

func compareKeys(a, b ids.ChunkKey) int {
	if c := a.Block.Compare(b.Block); c != 0 {
		return c
	}
	return int(a.Index) - int(b.Index)
}
