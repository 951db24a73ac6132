package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// SessionState is how far a session has come.
type SessionState uint8

// The states of a session. A session without a record has ended too, if its
// number was ever given.
const (
	SessionLive    SessionState = iota
	SessionSuspect              // its term passed: locks may be taken; it may resume
	SessionEnded                // for good; what it left is being removed
)

// liveSession reads a session that has not ended.
func (v *view) liveSession(id ids.Session) (*session, bool) {
	sess := &session{}
	if id == 0 || !v.load(sessionKey(id), sess) || sess.State == SessionEnded {
		return nil, false
	}
	return sess, true
}

func (s *state) createSession(r *api.CreateSession) (codec.Message, error) {
	reply := &api.SessionOpened{Incarnation: s.id.Incarnation, Cluster: s.id.Cluster, TermMillis: TermMillis}
	var known number
	key := uuidKey(spaceSecret, r.Secret)
	if !r.Secret.IsZero() && s.load(key, &known) {
		if _, ok := s.liveSession(ids.Session(known)); ok {
			reply.Session = ids.Session(known)
			return reply, nil
		}
	}
	if !r.Replaces.IsZero() && r.Replaces != r.Secret && s.load(uuidKey(spaceSecret, r.Replaces), &known) {
		s.endSession(ids.Session(known))
	}
	var a alloc
	s.load(keyAlloc, &a)
	a.Session++
	s.put(keyAlloc, &a)
	s.put(sessionKey(a.Session), &session{Name: r.Name, Host: r.Host, Secret: r.Secret, Created: s.now})
	if !r.Secret.IsZero() {
		id := number(a.Session)
		s.put(key, &id)
	}
	s.counts.Sessions++
	reply.Session = a.Session
	return reply, nil
}

func (s *state) suspectSessions(r *api.SuspectSessions) (codec.Message, error) {
	for _, id := range r.Sessions {
		s.setSessionState(id, SessionSuspect)
	}
	for _, id := range r.Resumed {
		s.setSessionState(id, SessionLive)
	}
	return &api.Empty{}, nil
}

func (s *state) setSessionState(id ids.Session, to SessionState) {
	if sess, ok := s.liveSession(id); ok && sess.State != to {
		sess.State = to
		s.put(sessionKey(id), sess)
	}
}

func (s *state) endSessions(r *api.EndSessions) (codec.Message, error) {
	for _, id := range r.Sessions {
		s.endSession(id)
	}
	return &api.Empty{}, nil
}

// endSession ends a session for good. Its locks count no more from now on; the
// records go in steps.
func (s *state) endSession(id ids.Session) {
	sess, ok := s.liveSession(id)
	if !ok {
		return
	}
	sess.State = SessionEnded
	s.put(sessionKey(id), sess)
	s.counts.Sessions--
	s.enqueue(freeKey(freeSession, uint64(id), 0), &mark{}, &s.counts.Freeing)
}

// forgetSecret removes the way from a secret to a session that ended.
func (s *state) forgetSecret(id ids.Session, secret ids.UUID) {
	key := uuidKey(spaceSecret, secret)
	var known number
	if s.load(key, &known) && ids.Session(known) == id {
		s.delete(key)
	}
}
