package store

import (
	"fmt"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Delete durably removes chunks, open or sealed. Unknown keys are ignored.
// After an error some of them may be gone.
func (s *Store) Delete(keys []ids.ChunkKey) error {
	if len(keys) == 0 {
		return nil
	}
	s.del.lock()
	defer s.del.unlock()
	if err := s.writable(); err != nil {
		return err
	}
	var durable []ids.ChunkKey
	for _, key := range keys {
		sealed, err := s.deleteOne(key)
		if err != nil {
			return fmt.Errorf("delete chunk %s: %w", key, err)
		}
		if sealed {
			durable = append(durable, key)
		}
	}
	if len(durable) == 0 {
		// An open chunk is never read and does not outlive the process, and its
		// space is not reused before a checkpoint has synced the zeros.
		return nil
	}
	s.mu.Lock()
	t := s.mu.newTicket()
	s.mu.Unlock()
	if err := s.Sync(t); err != nil {
		return fmt.Errorf("delete %d chunks: %w", len(durable), err)
	}
	return s.logDrops(durable)
}

// deleteOne overwrites the front page and takes the chunk out of the index.
// Its space is reused after a checkpoint, which syncs the page first: so no
// valid front page is ever left in free space.
func (s *Store) deleteOne(key ids.ChunkKey) (sealed bool, err error) {
	s.mu.Lock()
	oc := s.mu.open[key]
	s.mu.Unlock()
	if oc != nil {
		oc.gate.lock()
		defer oc.gate.unlock()
	}
	s.mu.Lock()
	e, ok := s.mu.idx.get(key)
	seg := s.mu.segs[e.seg]
	s.mu.Unlock()
	if !ok {
		return false, nil
	}
	if err := s.freeFront(seg, e); err != nil {
		return false, err
	}
	if oc != nil && !oc.sealed {
		s.forget(oc)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.wrote(seg)
	s.mu.free(seg, e)
	return e.state == chunk.StateSealed, nil
}

// freeFront overwrites the front page of a chunk with zeros.
func (s *Store) freeFront(seg *segment, e entry) error {
	buf, put := frontBuffer(0)
	defer put()
	clear(buf)
	if _, err := seg.file.WriteAt(buf, int64(e.page)*pageSize); err != nil {
		return s.failed("delete chunk "+e.key().String(), err)
	}
	return nil
}

// free takes a chunk whose front page is gone out of the index; its space
// is free once nobody reads it.
func (st *state) free(seg *segment, e entry) {
	key := e.key()
	st.idx.drop(key)
	st.changed = append(st.changed, key)
	st.seen.drop(e.spot())
	if p := st.pins[e.spot()]; p != nil {
		p.freed = append(p.freed, e.span())
		return
	}
	seg.free = seg.free.add(e.span())
}

// logDrops records deletions at once, so that a restart does not list the
// chunks again. A log that cannot grow is no harm: the front pages are gone.
func (s *Store) logDrops(keys []ids.ChunkKey) error {
	s.ckpt.lock()
	defer s.ckpt.unlock()
	if err := s.writable(); err != nil {
		return err
	}
	const most = 32 << 10
	var bs []batch
	for len(keys) > 0 {
		n := min(len(keys), most)
		bs = append(bs, batch{drops: keys[:n]})
		keys = keys[n:]
	}
	if s.clog == nil {
		return nil // there was no room for a log yet; the next checkpoint tells
	}
	if err := s.clog.append(bs); err != nil && !isFull(err) {
		return s.failed("record deletions", err)
	}
	return nil
}
