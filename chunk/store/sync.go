package store

import (
	"slices"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// group is the group commit. A ticket is given when the writes that it stands
// for have ended; a commit covers the tickets given before it started.
type group struct {
	ticket  uint64 // last one given
	synced  uint64 // all up to this one are durable
	running bool
	failed  error
	// waiting are the chunks that were sealed but are not durable yet, in the
	// order of their tickets.
	waiting []waitingSeal
}

type waitingSeal struct {
	ticket uint64
	key    ids.ChunkKey
}

// Sync returns when everything up to ticket is durable.
func (s *Store) Sync(ticket uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &s.mu.group
	if ticket > g.ticket {
		return errkind.Invalid.Wrap("sync disk %s: ticket %d was never given", s.id.Disk, ticket)
	}
	for {
		switch {
		case ticket <= g.synced:
			return nil
		case g.failed != nil:
			return g.failed
		case s.mu.closed:
			return s.mu.alive()
		case g.running:
			s.synced.Wait()
		default:
			s.commitGroup()
		}
	}
}

// commitGroup syncs what has been written so far. Called with mu held, which
// it releases meanwhile.
func (s *Store) commitGroup() {
	g := &s.mu.group
	g.running = true
	upTo := g.ticket
	dirty := s.mu.dirty
	s.mu.dirty = nil
	for _, seg := range dirty {
		seg.dirty = false
	}
	s.mu.Unlock()
	slices.SortFunc(dirty, func(a, b *segment) int { return int(a.num) - int(b.num) })
	var err error
	for _, seg := range dirty {
		if err = seg.file.Sync(); err != nil {
			err = s.failedSync(seg, err)
			break
		}
	}
	s.mu.Lock()
	g.running = false
	if err != nil {
		s.mu.failGroup(err)
	} else {
		g.synced = upTo
		n := 0
		for n < len(g.waiting) && g.waiting[n].ticket <= upTo {
			n++
		}
		g.waiting = slices.Delete(g.waiting, 0, n)
	}
	s.synced.Broadcast()
}

// failedSync makes the disk refuse changes, whatever the error is: after a
// failed fdatasync nobody knows what of the group is on the disk.
func (s *Store) failedSync(seg *segment, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log.Error("sync failed; the disk refuses new chunks and goes on serving reads",
		"disk", s.id.Disk.String(), "segment", segName(seg.num), "err", err)
	why := errkind.ReadOnly.Wrap("disk %s refuses new chunks since a sync of %s failed: %v", s.id.Disk, segName(seg.num), err)
	if s.mu.readOnly == nil {
		s.mu.readOnly = why
	}
	return why
}

// failGroup fails all tickets that are not durable, for ever, and forgets the
// chunks behind them: their pages may be gone from memory and from the disk.
func (st *state) failGroup(err error) {
	st.group.failed = err
	for _, w := range st.group.waiting {
		st.idx.drop(w.key)
	}
	st.group.waiting = nil
}

// wrote notes that the next commit must sync the segment. Called after the write.
func (st *state) wrote(seg *segment) {
	if !seg.dirty {
		seg.dirty = true
		st.dirty = append(st.dirty, seg)
	}
}

// newTicket stands for everything that has been written so far.
func (st *state) newTicket() uint64 {
	st.group.ticket++
	return st.group.ticket
}
