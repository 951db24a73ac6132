// Package meta is the metadata service's deterministic state machine and the
// queries on its state. It has no clock, no randomness and no I/O: time and
// ids travel in the commands, records live behind meta/kv. The records are
// described in docs/format/metadata.md, the rules in docs/design/metadata.md.
package meta

import (
	"fmt"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// FeatureLevel is the highest feature level that this code can apply.
const FeatureLevel = 1

// TermMillis is the length of a session's term, in milliseconds.
const TermMillis = 10_000

// Machine applies commands. It keeps nothing in memory: all state is in the
// records, so one Machine may serve any number of views at once, as long as
// Apply is called from one goroutine a store.
type Machine struct{}

var _ kv.StateMachine = (*Machine)(nil)

// New returns a state machine.
func New() *Machine { return &Machine{} }

// Apply runs one command and returns the encoded reply. A refused command
// changes nothing but its place in the session's window, where the refusal is
// the stored answer (WouldBlock alone is not stored: the leader proposes a
// waiting lock again). The error is not nil only when the view failed. A panic
// is left to the caller, who drops the write set.
func (m *Machine) Apply(t kv.Txn, index uint64, cmd []byte) ([]byte, error) {
	h, req, err := api.DecodeRequest(cmd)
	if err != nil {
		return api.EncodeError(errkind.Invalid.Wrap("command %d: %v", index, err), 0), nil
	}
	s := newState(t, &h)
	if s.err != nil {
		return nil, fmt.Errorf("apply %s at %d: %w", h.Kind, index, s.err)
	}
	reply, err := s.apply(req)
	if err != nil {
		return nil, fmt.Errorf("apply %s at %d: %w", h.Kind, index, err)
	}
	s.own.flush(t)
	return reply, nil
}

// apply wraps a command in the session's window.
func (s *state) apply(req api.Request) ([]byte, error) {
	if stored, err := s.admit(req); s.err != nil {
		return nil, s.err
	} else if err != nil {
		s.drop()
		return api.EncodeError(err, s.id.Epoch), nil
	} else if stored != nil {
		s.drop()
		return stored, nil
	}
	body, err := s.run(req)
	s.saveGlobals(err)
	if s.err != nil {
		return nil, s.err
	}
	if s.own.over {
		err = errkind.Split.Wrap("%s touches more than %d records: divide it", s.h.Kind, api.MaxRecords)
	}
	var reply []byte
	if err != nil {
		s.drop()
		reply = api.EncodeError(err, s.id.Epoch)
	} else {
		reply = api.EncodeReply(&api.Reply{Epoch: s.id.Epoch}, body)
	}
	if s.h.Seq != 0 && errkind.Of(err) != errkind.WouldBlock {
		s.own.limit = api.MaxRecords + 1
		s.put(windowKey(s.h.Session, s.h.Place), &window{Seq: s.h.Seq, Reply: reply})
	}
	return reply, nil
}

// admit checks that the command may run: the cluster is founded, the session
// lives, the place in its window is free. It returns the stored reply of a
// command that was applied before.
func (s *state) admit(req api.Request) ([]byte, error) {
	if !req.Kind().Mutation() {
		return nil, errkind.Invalid.Wrap("%s is not a mutation", req.Kind())
	}
	if s.id.Epoch == 0 && req.Kind() != api.KindFound {
		return nil, errkind.Unavailable.Wrap("%s: the cluster is not founded yet", req.Kind())
	}
	h := s.h
	if h.Session == 0 {
		if h.Seq != 0 {
			return nil, errkind.Invalid.Wrap("%s: sequence %d without a session", h.Kind, h.Seq)
		}
		return nil, nil
	}
	sess, ok := s.liveSession(h.Session)
	if !ok {
		return nil, errkind.Expired.Wrap("%s: session %d is unknown or has ended: mount anew", h.Kind, h.Session)
	}
	if sess.State == SessionSuspect {
		sess.State = SessionLive
		s.put(sessionKey(h.Session), sess)
	}
	if h.Seq == 0 {
		return nil, nil
	}
	if h.Place >= api.Places {
		return nil, errkind.Invalid.Wrap("%s: place %d of session %d: a window has %d", h.Kind, h.Place, h.Session, api.Places)
	}
	var w window
	if s.load(windowKey(h.Session, h.Place), &w) {
		switch {
		case h.Seq == w.Seq:
			return w.Reply, nil
		case h.Seq < w.Seq:
			return nil, errkind.Invalid.Wrap("%s: session %d place %d is at sequence %d, got %d",
				h.Kind, h.Session, h.Place, w.Seq, h.Seq)
		}
	}
	return nil, nil
}

// run executes one command on the state.
func (s *state) run(req api.Request) (codec.Message, error) {
	switch r := req.(type) {
	case *api.Create:
		return s.create(r)
	case *api.Link:
		return s.link(r)
	case *api.Unlink:
		return s.unlink(r)
	case *api.Rename:
		return s.rename(r)
	case *api.SetAttr:
		return s.setAttr(r)
	case *api.SetXattr:
		return s.setXattr(r)
	case *api.RemoveXattr:
		return s.removeXattr(r)
	case *api.SetLayout:
		return s.setLayout(r)
	case *api.Commit:
		return s.commit(r)
	case *api.Lock:
		return s.lock(r)
	case *api.CreateSession:
		return s.createSession(r)
	case *api.SuspectSessions:
		return s.suspectSessions(r)
	case *api.EndSessions:
		return s.endSessions(r)
	}
	return s.runService(req)
}

// runService executes the commands of the leader and the chunk servers.
func (s *state) runService(req api.Request) (codec.Message, error) {
	switch r := req.(type) {
	case *api.Found:
		return s.found(r)
	case *api.Reap:
		return s.reap(r)
	case *api.FreeStep:
		return s.freeStep(r)
	case *api.ChunksFreed:
		return s.chunksFreed(r)
	case *api.PlaceChunk:
		return s.placeChunk(r)
	case *api.QueueRepair:
		return s.queueRepair(r)
	case *api.RegisterServer:
		return s.registerServer(r)
	case *api.UpdateDisks:
		return s.updateDisks(r)
	case *api.SetFeature:
		return s.setFeature(r)
	}
	return nil, errkind.Unsupported.Wrap("command %s", req.Kind())
}

// state is the view of one command, with its writes.
type state struct {
	view
	h      *api.Header
	id     identity
	oldID  identity
	now    int64 // logged time: max(previous + 1, the leader's clock)
	counts Counts
	before Counts
}

func newState(t kv.Txn, h *api.Header) *state {
	s := &state{view: view{base: t, own: &writes{limit: api.MaxRecords}}, h: h}
	s.load(keyCluster, &s.id)
	var last number
	s.load(keyClock, &last)
	s.now = max(int64(last)+1, h.Time)
	s.load(keyCounts, &s.counts)
	s.oldID, s.before = s.id, s.counts
	return s
}

// saveGlobals writes the records that every command shares, unless it failed.
func (s *state) saveGlobals(err error) {
	if err != nil {
		return
	}
	now := number(s.now)
	s.put(keyClock, &now)
	if s.id != s.oldID {
		s.put(keyCluster, &s.id)
	}
	if s.counts != s.before {
		s.put(keyCounts, &s.counts)
	}
}

// drop forgets what the command wrote.
func (s *state) drop() { s.own = &writes{limit: api.MaxRecords} }

func (s *state) put(key []byte, rec codec.Message) { s.own.put(key, encodeRecord(rec)) }

func (s *state) delete(key []byte) { s.own.put(key, nil) }

// enqueue makes a record of a queue; true when it was not there.
func (s *state) enqueue(key []byte, rec codec.Message, count *uint64) bool {
	if s.has(key) {
		return false
	}
	s.put(key, rec)
	*count++
	return true
}

// dequeue removes a record of a queue; true when it was there.
func (s *state) dequeue(key []byte, count *uint64) bool {
	if !s.has(key) {
		return false
	}
	s.delete(key)
	*count--
	return true
}
