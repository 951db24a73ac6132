package server

import (
	"container/list"
	"fmt"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// openState is where an open chunk is in its life.
type openState uint8

const (
	stateOpening openState = iota
	stateOpen
	stateSealing
	stateAborting
)

// openChunk is a chunk that was granted and is not sealed. Guarded by Server.mu.
//
// The bytes [end, credit) may still come, and budget is reserved for them in
// window: window = credit − end, or 0 when the chunk has lapsed.
type openChunk struct {
	at    chunkAt
	disk  *disk
	msg   *wire.Open
	state openState

	end      int64 // the end of what was received
	credit   int64 // what the client was told
	window   int64
	lapsed   bool // idle so long that the budget was taken back
	unwanted bool // aborted while it was being opened

	used   time.Duration // of the last request
	idle   *list.Element // in Server.mu.byIdle
	conn   *Conn         // that the grant went to, while nothing has been put
	openID uint64
}

// takePut takes budget for n bytes of a disk's open chunks; s.mu is held. One
// disk that hangs cannot take the budget of all.
func (s *Server) takePut(d *disk, n int64) bool {
	if d.puts+n > d.share || !s.mu.puts.take(n) {
		return false
	}
	d.puts += n
	return true
}

func (s *Server) givePut(d *disk, n int64) {
	s.mu.puts.give(n)
	d.puts -= n
}

// window is the credit that a chunk gets ahead of its data now.
func (s *Server) window() int64 {
	if s.mu.puts.used < s.mu.puts.limit/2 {
		return s.lim.Window
	}
	return max(s.lim.Window/2, wire.MaxPayload)
}

// submitOpen answers an open at once, or puts it on the disk's queue, or lets
// it wait for buffers.
func (s *Server) submitOpen(it *item, m *wire.Open) {
	s.mu.Lock()
	r, err := s.placeOpen(it, m)
	s.mu.Unlock()
	if err != nil {
		s.finish(it, fail(err))
	} else if r != nil {
		s.finish(it, r)
	}
}

func (s *Server) placeOpen(it *item, m *wire.Open) (*Reply, error) {
	if m.Reserve == 0 || m.Reserve > ids.MaxChunk || m.Granule < 12 || m.Granule > 20 || m.Layout.IsZero() {
		return nil, errkind.Invalid.Wrap("open chunk %s on disk %d: reserve of %d bytes, granule 2^%d, layout %s", m.Key, m.Disk, m.Reserve, m.Granule, m.Layout)
	}
	if it.cancelled || s.mu.closing {
		return nil, errCancelled
	}
	if oc := s.mu.open[chunkAt{m.Disk, m.Key}]; oc != nil {
		switch {
		case oc.state == stateOpening || oc.state == stateAborting:
			return nil, s.busy(5*time.Millisecond, fmt.Sprintf("chunk %s on disk %d is being opened or aborted", m.Key, m.Disk))
		case !sameOpen(oc.msg, m):
			return nil, errkind.Conflict.Wrap("open chunk %s on disk %d: it is open with another header", m.Key, m.Disk)
		}
		s.touch(oc)
		return &Reply{Response: wire.Response{Body: &wire.Grant{Credit: uint32(oc.credit)}}}, nil
	}
	if len(s.mu.open) >= s.lim.OpenChunks {
		return nil, s.busy(100*time.Millisecond, fmt.Sprintf("%d chunks are open", len(s.mu.open)))
	}
	if s.mu.waiting.Len() == 0 {
		if done, err := s.tryOpen(it, m); done {
			return nil, err
		}
	}
	if s.mu.waiting.Len() >= s.lim.OpenQueue {
		return nil, s.busyOpen()
	}
	it.state = itemWaiting
	s.mu.waiting.PushBack(it)
	s.clock.AfterFunc(s.lim.OpenWait, func() { s.openTimedOut(it) })
	return nil, nil
}

func (s *Server) busyOpen() error {
	return s.busy(s.lim.OpenWait+time.Duration(s.mu.waiting.Len())*time.Millisecond, "all buffers are granted")
}

func sameOpen(a, b *wire.Open) bool {
	return a.Layout == b.Layout && a.Ino == b.Ino && a.FileOff == b.FileOff && a.Reserve == b.Reserve && a.Granule == b.Granule &&
		slices.Equal(a.Siblings, b.Siblings)
}

// tryOpen reserves buffers and queues the open on its disk. It reports false
// when there are no buffers.
func (s *Server) tryOpen(it *item, m *wire.Open) (bool, error) {
	need := min(int64(m.Reserve), s.window())
	if !s.takePut(it.disk, need) {
		return false, nil
	}
	oc := &openChunk{at: chunkAt{m.Disk, m.Key}, disk: it.disk, msg: m, credit: need, window: need}
	if s.mu.open[oc.at] != nil {
		s.givePut(it.disk, need)
		return true, s.busy(5*time.Millisecond, "the chunk is being opened")
	}
	if err := s.enqueue(it); err != nil {
		s.givePut(it.disk, need)
		return true, err
	}
	it.chunk = oc
	s.mu.open[oc.at] = oc
	oc.used = s.clock.Now()
	oc.idle = s.mu.byIdle.PushBack(oc)
	return true, nil
}

// admitWaiting hands free buffers to the opens that wait, oldest first. One
// that waits only for its own disk's share lets the next go ahead.
func (s *Server) admitWaiting() {
	type failed struct {
		it  *item
		err error
	}
	var drop []failed
	s.mu.Lock()
	now := s.clock.Now()
	for e := s.mu.waiting.Front(); e != nil; {
		it, this := e.Value.(*item), e
		e = e.Next()
		m := it.req.Body.(*wire.Open)
		if it.cancelled || it.due > 0 && now >= it.due {
			s.mu.waiting.Remove(this)
			drop = append(drop, failed{it, errCancelled})
			continue
		}
		if min(int64(m.Reserve), s.window()) > s.mu.puts.limit-s.mu.puts.used {
			break
		}
		done, err := s.tryOpen(it, m)
		if done {
			s.mu.waiting.Remove(this)
		}
		if err != nil {
			drop = append(drop, failed{it, err})
		}
	}
	for _, f := range drop {
		f.it.state = itemDone
	}
	s.mu.Unlock()
	for _, f := range drop {
		s.finish(f.it, fail(f.err))
	}
}

// openTimedOut tells an open that still waits to come again.
func (s *Server) openTimedOut(it *item) {
	s.mu.Lock()
	if it.state != itemWaiting {
		s.mu.Unlock()
		return
	}
	s.unqueue(it)
	err := s.busyOpen()
	s.mu.Unlock()
	s.finish(it, fail(err))
}

// takeWaiting removes all waiting opens; s.mu is held.
func (s *Server) takeWaiting() []*item {
	var all []*item
	for e := s.mu.waiting.Front(); e != nil; e = e.Next() {
		it := e.Value.(*item)
		it.state = itemDone
		all = append(all, it)
	}
	s.mu.waiting.Init()
	return all
}

// admitPut decides about the payload of a Put before it is read.
func (s *Server) admitPut(it *item, m *wire.Put, n int64) error {
	oc := s.mu.open[chunkAt{m.Disk, m.Key}]
	if oc == nil || oc.state == stateAborting {
		it.refuse = errkind.NoChunk.Wrap("put to chunk %s on disk %d: it is not open", m.Key, m.Disk)
		return nil
	}
	if oc.state == stateSealing {
		it.refuse = errkind.Conflict.Wrap("put to chunk %s on disk %d: it is being sealed", m.Key, m.Disk)
		return nil
	}
	end := int64(m.Off) + n
	if oc.state == stateOpening || end > int64(oc.msg.Reserve) || end > oc.credit && !oc.lapsed {
		return fmt.Errorf("put to chunk %s on disk %d up to %d, granted was %d: %w", m.Key, m.Disk, end, oc.credit, ErrCredit)
	}
	// What lies beyond the received bytes has its buffers reserved. A range
	// that is sent again has not.
	reserved := int64(0)
	if !oc.lapsed {
		reserved = max(end-oc.end, 0)
	}
	if n > reserved && !s.takePut(oc.disk, n-reserved) {
		it.refuse = s.busy(20*time.Millisecond, "no buffers for bytes that were not granted")
		return nil
	}
	if reserved > n {
		s.givePut(oc.disk, reserved-n)
	}
	oc.window -= reserved
	oc.end, oc.credit = max(oc.end, end), max(oc.credit, end)
	s.ungrant(oc)
	s.touch(oc)
	it.chunk, it.held, it.from = oc, n, &s.mu.puts
	return nil
}

// extend gives the chunk more credit once a put has freed its buffer of freed
// bytes, and writes it into the reply; s.mu is held.
func (s *Server) extend(oc *openChunk, r *Reply, freed int64) {
	s.touch(oc)
	g, ok := r.Body.(*wire.Grant)
	if !ok || r.Status != errkind.OK {
		return
	}
	if oc.state == stateOpen {
		target := max(min(int64(oc.msg.Reserve), oc.end+s.window()), oc.credit)
		grow := target - oc.end - oc.window
		if s.mu.waiting.Len() > 0 {
			grow = min(grow, freed)
		}
		if !oc.lapsed {
			grow = min(grow, s.mu.puts.limit-s.mu.puts.used, oc.disk.share-oc.disk.puts)
		}
		if grow > 0 && oc.end+oc.window+grow >= oc.credit && s.takePut(oc.disk, grow) {
			oc.window += grow
			oc.credit, oc.lapsed = oc.end+oc.window, false
		}
	}
	g.Credit = uint32(oc.credit)
}

// touch marks a chunk as used now.
func (s *Server) touch(oc *openChunk) {
	oc.used = s.clock.Now()
	if oc.idle != nil {
		s.mu.byIdle.MoveToBack(oc.idle)
	}
}

// ungrant forgets which request opened the chunk: a cancel no longer undoes it.
func (s *Server) ungrant(oc *openChunk) {
	if oc.conn != nil {
		delete(oc.conn.granted, oc.openID)
		oc.conn = nil
	}
}

// giveWindow takes the chunk's credit back; s.mu is held.
func (s *Server) giveWindow(oc *openChunk) {
	s.givePut(oc.disk, oc.window)
	oc.window, oc.lapsed = 0, true
}

// forget drops a chunk that is no longer open; s.mu is held.
func (s *Server) forget(oc *openChunk) {
	s.giveWindow(oc)
	s.ungrant(oc)
	delete(s.mu.open, oc.at)
	s.mu.byIdle.Remove(oc.idle)
	oc.idle = nil
}

// submitAbort drops a chunk, but only while it is open: a late abort must never
// touch a chunk that was sealed, which may be part of a file. The answer does
// not wait for the disk.
func (s *Server) submitAbort(it *item, m *wire.ChunkRef) {
	r := &Reply{}
	s.mu.Lock()
	if oc := s.mu.open[chunkAt{m.Disk, m.Key}]; oc != nil {
		switch oc.state {
		case stateOpening:
			oc.unwanted = true
		case stateOpen:
			s.beginAbort(oc)
		case stateSealing:
			r = fail(errkind.Conflict.Wrap("abort chunk %s on disk %d: it is being sealed", m.Key, m.Disk))
		}
	}
	s.mu.Unlock()
	s.finish(it, r)
}

// beginAbort starts to delete an open chunk that nobody wants any more.
func (s *Server) beginAbort(oc *openChunk) {
	if oc.state != stateOpen {
		return
	}
	oc.state = stateAborting
	s.giveWindow(oc)
	s.ungrant(oc)
	it := &item{disk: oc.disk, chunk: oc, arrived: s.clock.Now(), state: itemQueued}
	it.req = &wire.Request{Op: wire.OpAbort, Class: wire.ClassBackground, Body: &wire.ChunkRef{Disk: oc.at.disk, Key: oc.at.key}}
	oc.disk.push(it)
}

// sweep looks after chunks whose clients went away: first they lose their
// credit, much later their bytes. Bytes that were put are kept long, because a
// client that comes back cannot send them again.
func (s *Server) sweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.mu.closing {
		s.sweepOnce(s.clock.Now())
		s.unlocked(s.admitWaiting)
		if !s.mu.closing {
			s.drained.WaitFor(time.Second)
		}
	}
}

func (s *Server) sweepOnce(now time.Duration) {
	for e := s.mu.byIdle.Front(); e != nil; e = e.Next() {
		oc := e.Value.(*openChunk)
		idle := now - oc.used
		if idle < s.lim.LapseAfter {
			return
		}
		switch {
		case oc.state != stateOpen: // its disk is at work
		case oc.end == 0 && idle >= s.lim.DropAfter || idle >= s.lim.AbortAfter:
			s.beginAbort(oc)
		case !oc.lapsed:
			s.giveWindow(oc)
		}
	}
}
