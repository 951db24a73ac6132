package server

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// reads are the queries on their way: waiting for a leadership check to begin,
// under the one that runs, and ready to be answered. All that wait share the
// next check.
type reads struct {
	waiting []*read
	checked []*read
	running bool
	ready   []*read
}

// read is one query.
type read struct {
	inbound
	lead *leader
	// answer is nil for what the state machine answers. With neither reply nor
	// error it has replied itself.
	answer func(r kv.Reader) ([]byte, error)
}

// maxBatch is how many queries share one view.
const maxBatch = 16

// query queues a query behind the next leadership check; with mu held.
func (s *Server) query(l *leader, r *inbound, acts *actions) {
	q := &read{inbound: *r, lead: l}
	var err error
	var answered bool
	switch r.h.Kind {
	case api.KindOpen:
		err = l.registerOpen(q)
	case api.KindRelease:
		err = l.releaseOpens(r)
	case api.KindRenew:
		err = s.renew(l, q)
	case api.KindHeartbeat:
		err = s.heartbeat(l, q)
	case api.KindVerdicts:
		err = s.verdicts(l, q)
	case api.KindGetCluster:
		q.answer = func(kv.Reader) ([]byte, error) { return s.clusterReply(l, r.body) }
	case api.KindStatFS, api.KindStatus:
		s.totals(l, q)
	case api.KindLease:
		answered, err = s.lease(l, q, acts)
	case api.KindCancel:
		s.cancelRequest(r)
		return
	}
	if err != nil {
		r.stream.fail(r.id, err)
		return
	}
	if answered {
		return
	}
	if r.h.Kind == api.KindRelease {
		r.stream.reply(r.id, api.EncodeReply(&api.Reply{}, &api.Empty{}))
		return
	}
	s.mu.reads.waiting = append(s.mu.reads.waiting, q)
	acts.barrier = true
}

// barrier starts a leadership check for the waiting queries, unless one runs.
func (s *Server) barrier() {
	s.mu.Lock()
	b := &s.mu.reads
	if b.running || len(b.waiting) == 0 {
		s.mu.Unlock()
		return
	}
	b.running = true
	b.checked, b.waiting = b.waiting, nil
	s.mu.Unlock()
	s.cfg.Replica.Barrier(s.barrierDone)
}

// barrierDone releases the queries whose check is over.
func (s *Server) barrierDone(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &s.mu.reads
	batch := b.checked
	b.checked, b.running = nil, false
	if err == nil {
		b.ready = append(b.ready, batch...)
	} else {
		// Those that came meanwhile would fare no better, and nobody else
		// starts a check for them.
		for _, q := range append(batch, b.waiting...) {
			s.refuseProposal(q.stream, q.id, err)
		}
		b.waiting = nil
	}
	s.readable.Broadcast()
}

// runQueries answers queries until the server closes.
func (s *Server) runQueries() {
	for {
		batch := s.takeReads()
		if batch == nil {
			return
		}
		s.barrier() // for those that came during the last check
		ran := false
		err := s.cfg.Replica.View(func(r kv.Reader) error {
			ran = true
			for _, q := range batch {
				s.answer(r, q)
			}
			return nil
		})
		if err != nil && !ran {
			for _, q := range batch {
				q.stream.refuse(q.id, errkind.Unavailable, err.Error(), "")
			}
		}
	}
}

func (s *Server) takeReads() []*read {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &s.mu.reads
	for len(b.ready) == 0 && !s.mu.closed {
		s.readable.Wait()
	}
	if s.mu.closed {
		return nil
	}
	n := min(len(b.ready), maxBatch)
	batch := append([]*read(nil), b.ready[:n]...)
	b.ready = append(b.ready[:0], b.ready[n:]...)
	return batch
}

// answer runs one query on a view.
func (s *Server) answer(r kv.Reader, q *read) {
	var reply []byte
	var err error
	if q.answer != nil {
		reply, err = q.answer(r)
	} else {
		reply, err = query(r, q)
	}
	if err != nil {
		reply = api.EncodeError(err, q.h.Epoch)
	} else if reply == nil {
		return
	}
	q.stream.reply(q.id, reply)
	if q.h.Kind == api.KindOpen && replyGone(reply) {
		s.mu.Lock()
		q.lead.openFailed(q)
		s.mu.Unlock()
	}
}

// replyGone reports whether a reply says that the inode does not exist.
func replyGone(reply []byte) bool {
	var h api.Reply
	_, err := codec.DecodePrefix(reply, &h)
	return err == nil && (h.Err == errkind.NotFound || h.Err == errkind.Stale)
}

// cancelRequest handles CancelRequest, the message that does what a cancel
// frame does, and has no reply either; with mu held.
func (s *Server) cancelRequest(r *inbound) {
	var m api.CancelRequest
	if codec.Decode(r.body, &m) == nil {
		s.cancel(r.stream, m.Request)
	}
	r.stream.mu.Lock()
	r.stream.mu.inflight--
	r.stream.mu.Unlock()
}
