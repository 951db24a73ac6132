package client

import (
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Bounds of one request of a sender.
const (
	putTimeout = 5 * time.Second
	minBackoff = 10 * time.Millisecond
	maxBackoff = time.Second
	maxCorrupt = 3 // puts that arrived damaged, in a row
)

// sender is the way of one chunk to its server. Guarded by the writer's lock.
type sender struct {
	peer
	index  int
	credit int           // bytes from the chunk's start that may be sent
	acked  int           // bytes from the chunk's start that the server holds
	q      []*item       // not acknowledged, in order
	sums   []uint64      // of all cells so far
	late   bool          // behind the quorum: kept in the late pool, sent one by one
	lost   bool          // this chunk will not be finished
	why    error         // of lost
	flight int           // requests in flight
	paused bool          // a timer will go on
	asking bool          // waits for more credit
	fails  int           // transient failures in a row
	bad    int           // damaged puts in a row
	failed time.Duration // since when it fails; 0 when it does not

	sealSent bool // a seal may have reached the server
	sealing  bool
	sealed   bool
	took     time.Duration // of its seal
}

// item is one cell on its way. Its bytes are the stripe's (then it counts in
// refs), or its own.
type item struct {
	of     *stripe
	off    int
	data   []byte
	sums   []uint64
	shared bool      // refers to the stripe's memory
	buf    *buffer   // own memory
	next   *buffer   // own copy that takes over once the transport lets go
	late   *lateCell // its place in the late pool
	sent   bool
	acked  bool
	dead   bool // frees itself when the transport lets go
	cancel func()
}

func (it *item) end() int { return it.off + len(it.data) }

// drop frees an item, at once or when the transport lets go of it.
func (w *writer) drop(it *item) {
	w.c.late.release(it.late)
	it.late = nil
	if it.sent {
		it.dead = true
		it.cancel()
		return
	}
	w.c.free(it.buf)
	w.c.free(it.next)
	it.buf, it.next, it.data = nil, nil, nil
	if it.shared {
		it.shared = false
		it.of.refs--
		w.settle(it.of)
	}
}

// absorb moves the cells of decided stripes that a late sender still owes into
// the late pool, so that the caller's memory is free.
func (w *writer) absorb(s *sender) {
	for _, it := range s.q {
		if s.lost {
			return
		}
		if it.acked || !it.of.resolved || it.late != nil {
			continue
		}
		it.late = w.c.late.keep(len(it.data), func() { w.dropped(s, it) })
		if it.late == nil {
			w.lose(s, errkind.NoSpace.Wrap("no room for late cells"))
			return
		}
		if !it.shared {
			continue
		}
		own := w.c.buffer(len(it.data))
		copy(own.p, it.data)
		it.next = own
		if it.sent {
			it.cancel()
		} else {
			w.switchOver(it)
		}
	}
}

// switchOver lets an item use its own copy.
func (w *writer) switchOver(it *item) {
	it.buf, it.next, it.data, it.shared = it.next, nil, it.next.p, false
	it.of.refs--
	w.settle(it.of)
}

// dropped is the late pool's word that an item had to make room.
func (w *writer) dropped(s *sender, it *item) {
	w.mu.Lock()
	defer w.unlock()
	if !s.lost && !it.acked && !it.dead {
		w.lose(s, errkind.NoSpace.Wrap("dropped from the late pool"))
		w.progress()
	}
}

// lose gives a chunk up.
func (w *writer) lose(s *sender, why error) {
	if s.lost || s.sealed {
		return
	}
	s.lost, s.why = true, why
	if w.mu.stop == nil {
		// What follows is better off in a block that has all its chunks (rule 10).
		w.mu.stop = errkind.Unavailable.Wrap("block %s: chunk %d on disk %d is lost: %v", w.what.Key.Block, s.index, s.disk, why)
		w.cond.Broadcast()
	}
	q := s.q
	s.q = nil
	for _, it := range q {
		if !it.acked {
			w.drop(it)
		}
	}
	if w.mu.phase != phaseEnded {
		w.c.log.Info("chunk lost while writing", "chunk", w.key(s.index).String(), "disk", s.disk, "why", why)
	}
	if !s.sealSent {
		w.c.forget(s.peer, w.key(s.index))
	}
	if w.mu.phase == phaseCommitted {
		w.c.finish.rebuild(w.what, w.mu.block, s.index)
	}
}

// pump sends what the server's credit allows.
func (w *writer) pump(s *sender) {
	limit := w.c.cfg.Window
	if s.late {
		limit = 1
	}
	for _, it := range s.q {
		if s.lost || s.paused || s.asking || s.flight >= limit {
			return
		}
		if it.sent || it.acked {
			continue
		}
		if it.end() > s.credit {
			if s.flight == 0 {
				w.askCredit(s)
			}
			return
		}
		w.put(s, it)
	}
}

func (w *writer) put(s *sender, it *item) {
	req := &wire.Request{
		Op: wire.OpPut, Payload: [][]byte{it.data},
		Body: &wire.Put{Disk: s.disk, Key: w.key(s.index), Off: uint32(it.off), Sums: it.sums},
	}
	if s.late {
		req.Class = wire.ClassBackground
	}
	it.sent = true
	s.flight++
	it.cancel = w.c.send(s.peer, req, putTimeout, func(r reply) { w.putDone(s, it, r) })
}

func (w *writer) putDone(s *sender, it *item, r reply) {
	w.mu.Lock()
	defer w.unlock()
	it.sent, it.cancel = false, nil
	s.flight--
	if it.dead {
		w.drop(it)
		w.progress()
		return
	}
	moved := it.next != nil
	if moved {
		w.switchOver(it)
	}
	if g, ok := grantOf(r); ok {
		s.credit = max(s.credit, int(g.Credit))
	}
	switch {
	case r.err == nil:
		it.acked = true
		w.recovered(s)
		w.drop(it)
		w.advance(s)
	case moved && r.Response == nil:
		// Our own cancel: the copy goes out next.
	default:
		w.troubled(s, r)
	}
	w.pump(s)
	w.progress()
}

func (w *writer) recovered(s *sender) { s.fails, s.bad, s.failed = 0, 0, 0 }

// advance takes acknowledged items off the front of the queue.
func (w *writer) advance(s *sender) {
	for len(s.q) > 0 && s.q[0].acked {
		s.acked = s.q[0].of.end
		s.q = s.q[1:]
	}
	if len(s.q) == 0 {
		s.late = false
	}
}

// troubled handles a failed request: what may succeed later is tried again.
func (w *writer) troubled(s *sender, r reply) {
	now := w.c.sched.Now()
	if errkind.Of(r.err) == errkind.Corrupt && s.bad < maxCorrupt {
		s.bad++ // damaged on the way: send again
	} else if !transient(r.err) {
		w.lose(s, r.err)
		return
	}
	if s.failed == 0 {
		s.failed = now
	}
	if now-s.failed > w.c.cfg.LateTimeout && w.spare(s) {
		w.lose(s, r.err)
		return
	}
	if errkind.Of(r.err) == errkind.Busy {
		w.pause(s, r.busyDelay())
		return
	}
	if !s.late {
		s.late = true
		w.absorb(s)
	}
	s.fails++
	w.pause(s, min(minBackoff<<min(s.fails-1, 10), maxBackoff))
}

// spare reports whether a quorum is left without the sender.
func (w *writer) spare(s *sender) bool {
	n := 0
	for _, o := range w.mu.senders {
		if o != s && !o.lost && (o.sealed || o.failed == 0) {
			n++
		}
	}
	return n >= w.l.Quorum() || w.mu.phase >= phaseSealed
}

// pause stops a sender for a while.
func (w *writer) pause(s *sender, d time.Duration) {
	if s.paused {
		return
	}
	s.paused = true
	w.c.sched.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.unlock()
		s.paused = false
		if s.lost || w.mu.phase == phaseEnded {
			return
		}
		w.pump(s)
		w.progress()
	})
}

// askCredit asks for the grant again: with nothing in flight no reply would
// bring more credit.
func (w *writer) askCredit(s *sender) {
	s.asking = true
	m := w.what
	m.Disk, m.Key = s.disk, w.key(s.index)
	had := s.credit
	w.c.send(s.peer, &wire.Request{Op: wire.OpOpen, Body: &m}, putTimeout, func(r reply) {
		w.mu.Lock()
		defer w.unlock()
		s.asking = false
		switch g, ok := grantOf(r); {
		case s.lost || w.mu.phase == phaseEnded:
			return
		case !ok:
			w.troubled(s, r)
		default:
			w.recovered(s)
			s.credit = max(s.credit, int(g.Credit))
			if s.credit == had {
				w.pause(s, minBackoff)
			}
		}
		w.pump(s)
		w.progress()
	})
}
