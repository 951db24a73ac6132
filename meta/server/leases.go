package server

import (
	"maps"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Times of leases. A lease runs out at the client, which counts from when it
// asked, before it does here, also when their clocks drift by a tenth.
const (
	leaseTerm    = time.Second
	leaseGranted = leaseTerm * 9 / 10
	leaseQuiet   = 2 * time.Second // without a change by another session, before a lease is granted
)

// leases knows which sessions answer lookups and attributes from memory, and
// keeps back what would make them wrong (metadata rule 10; the one lease that
// there is covers the whole tree). Nothing of it is logged: a new leader keeps
// all changes back for as long as a lease of its predecessor might hold.
type leases struct {
	holders  map[ids.Session]time.Duration // until when
	recalled map[ids.Session]struct{}      // holders that were asked to give up
	held     []heldBack                    // changes that wait, oldest first
	closed   time.Duration                 // until then all changes wait
	timer    bool                          // somebody will look at held again
	// flying counts each session's changes on their way to being applied; one
	// whose end is unknown counts for as long as this leader leads.
	flying map[ids.Session]int
	total  int
	recent [2]change // the last change, and the last of any other session
}

type heldBack struct {
	session ids.Session
	stream  *Stream
	id      uint64
	p       proposal
}

type change struct {
	session ids.Session
	at      time.Duration
	known   bool
}

func newLeases() leases {
	return leases{
		holders: make(map[ids.Session]time.Duration), recalled: make(map[ids.Session]struct{}), flying: make(map[ids.Session]int),
	}
}

// arrived counts a change by a session; landed must follow.
func (e *leases) arrived(id ids.Session, now time.Duration) {
	e.flying[id]++
	e.total++
	if !e.recent[0].known || e.recent[0].session != id {
		e.recent[1] = e.recent[0]
	}
	e.recent[0] = change{id, now, true}
}

// landed says that a change is applied, or never will be.
func (e *leases) landed(id ids.Session) {
	e.total--
	if e.flying[id]--; e.flying[id] == 0 {
		delete(e.flying, id)
	}
}

// blocked reports whether a change by a session must wait, and until when at most.
func (e *leases) blocked(id ids.Session, now time.Duration) (until time.Duration, yes bool) {
	until = e.closed
	for h, t := range e.holders {
		if h != id {
			until = max(until, t)
		}
	}
	return until, until > now
}

// mayGrant reports whether no other session has changed anything lately.
func (e *leases) mayGrant(id ids.Session, now time.Duration) bool {
	for _, c := range e.recent {
		if c.known && c.session != id && now-c.at < leaseQuiet {
			return false
		}
	}
	return e.total == e.flying[id] && now >= e.closed
}

// gate proposes a change at once, or once no other session's lease forbids it;
// with mu held.
func (s *Server) gate(l *leader, r *inbound, p proposal, acts *actions) {
	e, now := &l.leases, s.cfg.Sched.Now()
	e.arrived(r.h.Session, now)
	until, blocked := e.blocked(r.h.Session, now)
	if !blocked {
		acts.proposals = append(acts.proposals, p)
		return
	}
	e.held = append(e.held, heldBack{r.h.Session, r.stream, r.id, p})
	s.recall(l, r.h.Session)
	s.lookAgain(l, until-now)
}

// recall asks every other holder to give up its lease.
func (s *Server) recall(l *leader, except ids.Session) {
	e := &l.leases
	for _, id := range slices.Sorted(maps.Keys(e.holders)) {
		if _, asked := e.recalled[id]; asked || id == except {
			continue
		}
		if x := l.sessions[id]; x != nil && x.stream != nil {
			e.recalled[id] = struct{}{}
			x.stream.pushRecall()
		}
	}
}

// lookAgain looks at what is held back after d, when the leases have run out.
func (s *Server) lookAgain(l *leader, d time.Duration) {
	if l.leases.timer {
		return
	}
	l.leases.timer = true
	s.cfg.Sched.AfterFunc(d, func() {
		var acts actions
		s.mu.Lock()
		l.leases.timer = false
		if s.mu.lead == l && !s.mu.closed {
			s.letGo(l, &acts)
		}
		s.mu.Unlock()
		s.perform(&acts)
	})
}

// letGo proposes the changes that nothing forbids any more; with mu held.
func (s *Server) letGo(l *leader, acts *actions) {
	e, now := &l.leases, s.cfg.Sched.Now()
	for id, until := range e.holders {
		if until <= now {
			e.drop(id)
		}
	}
	var next time.Duration
	held := e.held[:0]
	for _, h := range e.held {
		if until, blocked := e.blocked(h.session, now); blocked {
			held, next = append(held, h), max(next, until)
			continue
		}
		acts.proposals = append(acts.proposals, h.p)
	}
	clear(e.held[len(held):])
	e.held = held
	if len(held) > 0 {
		s.lookAgain(l, next-now)
	}
}

func (e *leases) drop(id ids.Session) {
	delete(e.holders, id)
	delete(e.recalled, id)
}

// lease handles Lease; with mu held.
func (s *Server) lease(l *leader, q *read, acts *actions) (answered bool, err error) {
	var m api.Lease
	if err := codec.Decode(q.body, &m); err != nil {
		return false, errkind.Invalid.Wrap("Lease: %v", err)
	}
	if m.Return {
		l.leases.drop(q.h.Session)
		s.letGo(l, acts)
		q.stream.reply(q.id, api.EncodeReply(&api.Reply{}, &api.Leased{}))
		return true, nil
	}
	q.answer = func(kv.Reader) ([]byte, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		var granted api.Leased
		if m.Ino == 0 && s.mu.lead == l {
			granted.Millis = l.grant(q, s.cfg.Sched.Now())
		}
		// Sent here, so that it is never behind the recall of what it grants.
		q.stream.reply(q.id, api.EncodeReply(&api.Reply{Epoch: l.epoch}, &granted))
		return nil, nil
	}
	return false, nil
}

// grant gives or extends a lease, in milliseconds for the client; zero when it
// cannot be had now.
func (l *leader) grant(q *read, now time.Duration) uint32 {
	x, e := l.sessions[q.h.Session], &l.leases
	if x == nil || x.stream != q.stream || !e.mayGrant(x.id, now) {
		return 0
	}
	if _, asked := e.recalled[x.id]; asked {
		return 0
	}
	e.holders[x.id] = now + leaseTerm
	return uint32(leaseGranted / time.Millisecond)
}
