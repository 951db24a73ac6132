package server

import (
	"encoding/binary"
	"fmt"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// actions are what handling a message asks for once no lock is held any more.
type actions struct {
	proposals []proposal
	barrier   bool
}

func (s *Server) perform(a *actions) {
	for _, p := range a.proposals {
		s.propose(p)
	}
	if a.barrier {
		s.barrier()
	}
}

// parked is a request that waits until a new leader is ready.
type parked struct {
	stream *Stream
	id     uint64
	body   []byte
}

// stamp writes the logged time into an encoded command.
func stamp(cmd []byte, at int64) {
	binary.LittleEndian.PutUint64(cmd[api.TimeOffset:], uint64(at))
}

// replyBody returns what follows the header of an encoded reply, or the
// failure that it holds.
func replyBody(reply []byte) ([]byte, error) {
	var h api.Reply
	body, err := codec.DecodePrefix(reply, &h)
	if err != nil {
		return nil, errkind.Corrupt.Wrap("own reply: %v", err)
	}
	return body, h.Failure()
}

func replyError(reply []byte) error {
	_, err := replyBody(reply)
	return err
}

// request handles one request; with mu held.
func (s *Server) request(st *Stream, id uint64, body []byte, acts *actions) {
	st.begin()
	l := s.mu.lead
	if l == nil {
		s.refuseFollower(st, id)
		return
	}
	if !l.ready {
		if len(l.parked) >= maxParked || l.parkedBytes+len(body) > maxParkedBytes {
			st.refuse(id, errkind.Busy, "a new leader is getting ready", "")
			return
		}
		l.parked, l.parkedBytes = append(l.parked, parked{st, id, body}), l.parkedBytes+len(body)
		return
	}
	var h api.Header
	rest, err := codec.DecodePrefix(body, &h)
	switch {
	case err != nil:
		st.fail(id, errkind.Invalid.Wrap("request header: %v", err))
	case h.Version == 0 || h.Version > api.Version:
		st.fail(id, errkind.Version.Wrap("request of protocol version %d, this server speaks 1 to %d", h.Version, api.Version))
	case !l.bind(st, h.Session):
		st.kill("a newer stream of the same session came")
	case h.Kind.Mutation():
		s.mutation(l, &inbound{st, id, h, rest}, body, acts)
	default:
		s.query(l, &inbound{st, id, h, rest}, acts)
	}
}

// refuseFollower sends the client to the leader.
func (s *Server) refuseFollower(st *Stream, id uint64) {
	r := s.cfg.Replica.Status()
	leader := r.LeaderAddr
	if r.Leader == r.ID {
		leader = "" // ourselves, but not for long or not yet
	}
	st.refuse(id, errkind.NotLeader, fmt.Sprintf("server %d does not lead", r.ID), leader)
}

// inbound is one request that is being handled.
type inbound struct {
	stream *Stream
	id     uint64
	h      api.Header
	body   []byte
}

// allowed says whether a client may send a mutation of its kind at all.
func (r *inbound) allowed() error {
	switch r.h.Kind {
	case api.KindCreateSession, api.KindRegisterServer, api.KindQueueRepair, api.KindSetLayout:
		return nil
	case api.KindFound, api.KindSuspectSessions, api.KindReap, api.KindFreeStep, api.KindChunksFreed, api.KindUpdateDisks, api.KindSetFeature:
		return errkind.Perm.Wrap("%s: only the leader itself does that", r.h.Kind)
	}
	if r.h.Session == 0 || r.h.Seq == 0 {
		return errkind.Invalid.Wrap("%s: needs a session", r.h.Kind)
	}
	return nil
}

// mutation proposes a client's mutation; with mu held.
func (s *Server) mutation(l *leader, r *inbound, cmd []byte, acts *actions) {
	if err := r.allowed(); err != nil {
		r.stream.fail(r.id, err)
		return
	}
	var after func(reply []byte) // runs with mu held once the command is applied
	var err error
	switch r.h.Kind {
	case api.KindCreate:
		after, err = l.createOpens(r)
	case api.KindLock:
		s.proposeLock(l, r, cmd, acts)
		return
	case api.KindCreateSession:
		after = func(reply []byte) {
			l.sessionCreated(reply, s.cfg.Sched.Now())
			l.verify = true // it may have replaced another
		}
	case api.KindEndSessions:
		after, err = s.endOwn(l, r)
	case api.KindRegisterServer:
		after = func([]byte) { s.refreshCluster(l) }
	case api.KindQueueRepair, api.KindPlaceChunk, api.KindCommit:
		after = func([]byte) { l.jobs.changed = true }
	}
	if err != nil {
		r.stream.fail(r.id, err)
		return
	}
	p := proposal{cmd, func(reply []byte, err error) { s.applied(l, r.stream, r.id, reply, err, after) }}
	if !r.h.Kind.ChangesTree() {
		acts.proposals = append(acts.proposals, p)
		return
	}
	p.done = func(reply []byte, err error) {
		s.applied(l, r.stream, r.id, reply, err, func(reply []byte) {
			if err == nil || !mayYetApply(err) {
				l.leases.landed(r.h.Session)
			}
			if after != nil {
				after(reply)
			}
		})
	}
	s.gate(l, r, p, acts)
}

// mayYetApply reports whether a proposal that failed might be applied all the same.
func mayYetApply(err error) bool {
	k := errkind.Of(err)
	return k == errkind.Timeout || k == errkind.Unavailable
}

// applied answers a mutation.
func (s *Server) applied(l *leader, st *Stream, id uint64, reply []byte, err error, after func([]byte)) {
	if after != nil {
		s.mu.Lock()
		if err != nil {
			reply = nil
		}
		after(reply)
		s.mu.Unlock()
	}
	if err != nil {
		s.refuseProposal(st, id, err)
		return
	}
	st.reply(id, reply)
}

// refuseProposal maps an error of the replica: nothing of it is final but a
// command that can never be proposed.
func (s *Server) refuseProposal(st *Stream, id uint64, err error) {
	switch k := errkind.Of(err); k {
	case errkind.TooBig:
		st.fail(id, err)
	case errkind.NotLeader:
		s.refuseFollower(st, id)
	case errkind.Busy:
		st.refuse(id, k, err.Error(), "")
	default:
		st.refuse(id, errkind.Unavailable, err.Error(), "")
	}
}

// endOwn lets a client end its own session and no other.
func (s *Server) endOwn(l *leader, r *inbound) (func([]byte), error) {
	var m api.EndSessions
	if err := codec.Decode(r.body, &m); err != nil {
		return nil, errkind.Invalid.Wrap("EndSessions: %v", err)
	}
	if len(m.Sessions) != 1 || m.Sessions[0] != r.h.Session {
		return nil, errkind.Perm.Wrap("EndSessions: a client ends its own session, %d, and no other", r.h.Session)
	}
	return func(reply []byte) {
		if reply != nil && replyError(reply) == nil {
			s.sessionsEnded(l, []ids.Session{r.h.Session})
		}
	}, nil
}
