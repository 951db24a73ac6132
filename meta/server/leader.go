package server

import (
	"maps"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// leader is what a leader keeps in memory for one term of raft. Server.mu
// guards all of it.
type leader struct {
	term   uint64
	since  time.Duration // when it began
	epoch  ids.Epoch     // for the header of replies
	ready  bool          // the state is loaded: requests are served
	parked []parked
	// parkedBytes is the size of the parked requests.
	parkedBytes int
	loading     bool // such a step is under way
	founded     bool // by this leader: there was none before it
	sessions    map[ids.Session]*session
	opens       opens
	locks       locks
	leases      leases
	cluster     clusterState
	jobs        jobs
	frees       frees
	expiring    bool // a command about sessions is under way
	verify      bool // a session may have ended by another's command
}

// session is one living session.
type session struct {
	id      ids.Session
	heard   time.Duration // when it was last heard of
	suspect bool          // in the state
	full    bool          // it has registered its open inodes with this leader
	floor   uint64        // lowest block counter that it may still commit
	inos    map[ids.Ino]struct{}
	stream  *Stream // the newest one, or nil
}

func newLeader(raftTerm uint64, now time.Duration) *leader {
	return &leader{
		term: raftTerm, since: now,
		sessions: make(map[ids.Session]*session),
		opens:    newOpens(),
		locks:    newLocks(),
		leases:   newLeases(),
		cluster:  newClusterState(),
		jobs:     newJobs(),
	}
}

// runLeader does the leader's periodic work until the server closes.
func (s *Server) runLeader() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var next time.Duration // when the periodic work is due
	for !s.mu.closed {
		l, now := s.mu.lead, s.cfg.Sched.Now()
		wait := next - now
		if wait <= 0 {
			s.reapStreams()
			next, wait = now+tickEvery, tickEvery
			if l != nil && l.ready {
				s.steps(l, s.expireSessions, s.verifySessions, s.watchServers, s.reapOrphans, s.planJobs, s.recordUsage)
			}
		}
		if l != nil && !l.ready && !s.mu.closed {
			s.load(l)
			wait = tickEvery / 10
		}
		if l != nil && l.ready {
			s.steps(l, s.freeStep, s.freeChunks, s.scanDead, s.refresh)
		}
		if !s.mu.closed && s.mu.lead == l && (l == nil || !l.urgent()) {
			s.wake.WaitFor(wait)
		}
	}
}

// urgent reports whether there is more to do at once.
func (l *leader) urgent() bool {
	return l.frees.more || l.jobs.scan.more || len(l.frees.freed) > 0 && !l.frees.logging
}

// steps runs parts of the leader's work, with mu held; each releases it while
// it reads the state or proposes.
func (s *Server) steps(l *leader, steps ...func(*leader)) {
	for _, step := range steps {
		if s.mu.lead != l || s.mu.closed {
			return
		}
		step(l)
	}
}

// reapStreams ends the streams whose clients take nothing; with mu held.
func (s *Server) reapStreams() {
	now := s.cfg.Sched.Now()
	for _, n := range slices.Sorted(maps.Keys(s.mu.streams)) {
		if st := s.mu.streams[n]; st.stalled(now) {
			s.cfg.Log.Warn("metadata stream takes no replies", "from", st.name)
			st.kill("stalled")
		}
	}
}

// view reads the state with mu released.
func (s *Server) view(fn func(kv.Reader) error) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return s.cfg.Replica.View(fn)
}

// load fills a new leader's memory from the state; with mu held. An empty
// state is founded first.
func (s *Server) load(l *leader) {
	if l.loading {
		return
	}
	var f facts
	if err := s.view(func(r kv.Reader) error { return f.read(r) }); err != nil {
		s.cfg.Log.Error("metadata: a new leader cannot read its state", "err", err)
		return
	}
	if s.mu.lead != l || s.mu.closed {
		return
	}
	if !f.info.Founded {
		s.found(l)
		return
	}
	now := s.cfg.Sched.Now()
	for _, x := range f.sessions {
		l.sessions[x.ID] = &session{
			id: x.ID, heard: now, suspect: x.State == meta.SessionSuspect, floor: x.Floor, inos: make(map[ids.Ino]struct{}),
		}
	}
	s.mu.cluster, l.epoch = f.info.Cluster, f.info.Epoch
	l.cluster.load(&f.cluster, f.info.Layout, now)
	s.publish(l)
	l.ready = true
	if !l.founded {
		l.leases.closed = l.since + leaseTerm
	}
	s.cfg.Log.Info("metadata: ready", "term", l.term, "sessions", len(l.sessions), "servers", len(f.cluster.Servers))
	s.unpark(l)
}

// unpark handles what waited for the leader to be ready.
func (s *Server) unpark(l *leader) {
	waiting := l.parked
	l.parked, l.parkedBytes = nil, 0
	var acts actions
	for _, p := range waiting {
		p.stream.mu.Lock()
		p.stream.mu.inflight-- // request counts it again
		p.stream.mu.Unlock()
		s.request(p.stream, p.id, p.body, &acts)
	}
	s.mu.Unlock()
	defer s.mu.Lock()
	s.perform(&acts)
}

// found creates the cluster; with mu held.
func (s *Server) found(l *leader) {
	id := s.cfg.Cluster
	if id.IsZero() {
		id = sched.NewUUID(s.cfg.Sched)
	}
	l.loading, l.founded = true, true
	s.cfg.Log.Info("metadata: founding a cluster", "cluster", id, "layout", s.cfg.Layout)
	s.own(&api.Found{Cluster: id, Layout: s.cfg.Layout, UID: s.cfg.UID, GID: s.cfg.GID}, func([]byte, error) {
		l.loading = false // on a failure the next round tries again
		s.wake.Broadcast()
	})
}

// own proposes one of the leader's commands with mu released; done, which may
// be nil, runs with mu held.
func (s *Server) own(req api.Request, done func(body []byte, err error)) {
	s.mu.Unlock()
	defer s.mu.Lock()
	s.command(req, func(body []byte, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if done != nil {
			done(body, err)
		}
	})
}

// bind makes st the stream of a session. It is false for a stream that an
// earlier life of the connection left behind: what it still brings was sent
// before, and again on the newer one.
func (l *leader) bind(st *Stream, id ids.Session) bool {
	x := l.sessions[id]
	if x == nil || x.stream == st {
		return true
	}
	if x.stream != nil && x.stream.num > st.num {
		return false
	}
	x.stream = st
	return true
}

func (l *leader) unbind(st *Stream) {
	for _, x := range l.sessions {
		if x.stream == st {
			x.stream = nil
		}
	}
}

// sessionCreated notes the session of a reply to CreateSession.
func (l *leader) sessionCreated(reply []byte, now time.Duration) {
	var h api.Reply
	var m api.SessionOpened
	rest, err := codec.DecodePrefix(reply, &h)
	if err != nil || h.Err != errkind.OK || codec.Decode(rest, &m) != nil {
		return
	}
	if x := l.sessions[m.Session]; x != nil {
		x.heard = now // a retry
		return
	}
	// What it opens, it opens with this leader.
	l.sessions[m.Session] = &session{id: m.Session, heard: now, full: true, inos: make(map[ids.Ino]struct{})}
}

// renew handles Renew; with mu held. The answer comes behind a leadership
// check, and tells whether the state still knows the session.
func (s *Server) renew(l *leader, q *read) error {
	var m api.Renew
	if err := codec.Decode(q.body, &m); err != nil {
		return errkind.Invalid.Wrap("Renew: %v", err)
	}
	x := l.sessions[q.h.Session]
	if x == nil {
		return errkind.Expired.Wrap("Renew: session %d is unknown or has ended", q.h.Session)
	}
	x.heard = s.cfg.Sched.Now()
	x.floor = max(x.floor, m.Floor)
	for _, i := range m.Opens {
		l.opens.add(x, i)
	}
	x.full = x.full || m.Full
	was := x.suspect
	q.answer = func(r kv.Reader) ([]byte, error) {
		live, err := sessionLives(r, x.id)
		if err == nil && !live {
			err = errkind.Expired.Wrap("Renew: session %d has ended", x.id)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			if errkind.Of(err) == errkind.Expired && s.mu.lead == l {
				s.sessionsEnded(l, []ids.Session{x.id})
			}
			return nil, err
		}
		return api.EncodeReply(&api.Reply{}, &api.Renewed{
			TermMillis: uint32(term / time.Millisecond), ClusterVersion: l.cluster.cmap.Version, Suspect: was, LeaderTerm: l.term,
		}), nil
	}
	return nil
}

// maxSessions bounds one command about sessions.
const maxSessions = 256

// expireSessions makes silent sessions suspect, takes suspicion from those
// that came back, and ends the long silent ones; with mu held.
func (s *Server) expireSessions(l *leader) {
	if l.expiring {
		return
	}
	now := s.cfg.Sched.Now()
	var end, suspect, resumed []ids.Session
	for _, id := range slices.Sorted(maps.Keys(l.sessions)) {
		x := l.sessions[id]
		silent := now - x.heard
		switch {
		case silent > endAfter && len(end) < maxSessions:
			end = append(end, id)
		case silent > term && !x.suspect && len(suspect) < maxSessions:
			suspect = append(suspect, id)
		case silent <= term && x.suspect && len(resumed) < maxSessions:
			resumed = append(resumed, id)
		}
	}
	if len(suspect)+len(resumed) > 0 {
		s.setSuspect(l, suspect, resumed)
	}
	if len(end) > 0 && s.mu.lead == l {
		s.cfg.Log.Warn("metadata: sessions end after a long silence", "sessions", end)
		s.endSessions(l, end)
	}
}

func (s *Server) setSuspect(l *leader, suspect, resumed []ids.Session) {
	l.expiring = true
	s.own(&api.SuspectSessions{Sessions: suspect, Resumed: resumed}, func(_ []byte, err error) {
		l.expiring = false
		if err != nil || s.mu.lead != l {
			return
		}
		for _, id := range suspect {
			if x := l.sessions[id]; x != nil {
				x.suspect = true
			}
		}
		for _, id := range resumed {
			if x := l.sessions[id]; x != nil {
				x.suspect = false
			}
		}
		s.wakeLocks(l, nil) // a suspect's locks may be taken
	})
}

func (s *Server) endSessions(l *leader, end []ids.Session) {
	l.expiring = true
	s.own(&api.EndSessions{Sessions: end}, func(_ []byte, err error) {
		l.expiring = false
		if err == nil && s.mu.lead == l {
			s.sessionsEnded(l, end)
		}
	})
}

// verifySessions finds the sessions that ended by a command of another: they
// were replaced, or lost a lock while suspect; with mu held.
func (s *Server) verifySessions(l *leader) {
	if !l.verify {
		return
	}
	l.verify = false
	known := slices.Sorted(maps.Keys(l.sessions))
	var ended []ids.Session
	err := s.view(func(r kv.Reader) error {
		for _, id := range known {
			live, err := sessionLives(r, id)
			if err != nil {
				return err
			}
			if !live {
				ended = append(ended, id)
			}
		}
		return nil
	})
	if err != nil {
		s.cfg.Log.Error("metadata: read sessions", "err", err)
		return
	}
	if len(ended) > 0 && s.mu.lead == l {
		s.sessionsEnded(l, ended)
	}
}

// anySuspect reports whether a lock might be taken from someone.
func (l *leader) anySuspect() bool {
	for _, x := range l.sessions {
		if x.suspect {
			return true
		}
	}
	return false
}

// sessionsEnded forgets sessions that have ended; with mu held.
func (s *Server) sessionsEnded(l *leader, end []ids.Session) {
	for _, id := range end {
		x := l.sessions[id]
		if x == nil {
			continue
		}
		l.opens.dropSession(x)
		delete(l.sessions, id)
		if x.stream != nil {
			x.stream.pushEnded()
		}
	}
	s.wakeLocks(l, nil)
}
