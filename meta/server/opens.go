package server

import (
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// opens knows who has which inode open, and which orphans may go.
type opens struct {
	count map[ids.Ino]int // sessions that have it open
	// creating numbers the Create commands with Open that are under way: what
	// they make is open, although nobody has registered it yet.
	creating map[uint64]struct{}
	next     uint64
	reaping  map[ids.Ino]struct{} // named by a Reap that is under way
	// candidates were orphans, open nowhere, in the last scan; scanned is what
	// next was before it.
	candidates []ids.Ino
	scanned    uint64
	after      ids.Ino // where the next scan begins
}

func newOpens() opens {
	return opens{count: make(map[ids.Ino]int), creating: make(map[uint64]struct{}), reaping: make(map[ids.Ino]struct{})}
}

func (o *opens) add(x *session, ino ids.Ino) (added bool) {
	if _, ok := x.inos[ino]; ok {
		return false
	}
	x.inos[ino] = struct{}{}
	o.count[ino]++
	return true
}

func (o *opens) remove(x *session, ino ids.Ino) {
	if _, ok := x.inos[ino]; !ok {
		return
	}
	delete(x.inos, ino)
	if o.count[ino]--; o.count[ino] == 0 {
		delete(o.count, ino)
	}
}

func (o *opens) dropSession(x *session) {
	for ino := range x.inos {
		o.remove(x, ino)
	}
}

// registerOpen notes the open before the state is read (metadata rule 16).
func (l *leader) registerOpen(q *read) error {
	var m api.Open
	if err := codec.Decode(q.body, &m); err != nil {
		return errkind.Invalid.Wrap("Open: %v", err)
	}
	x := l.sessions[q.h.Session]
	if x == nil {
		return errkind.Expired.Wrap("open inode %d: session %d is unknown or has ended", m.Ino, q.h.Session)
	}
	if _, going := l.opens.reaping[m.Ino]; going {
		// It has no name and nobody has it open; a view might still show it.
		return errkind.Stale.Wrap("open inode %d: it is being removed", m.Ino)
	}
	l.opens.add(x, m.Ino)
	return nil
}

// openFailed takes back the registration of an inode that does not exist.
func (l *leader) openFailed(q *read) {
	var m api.Open
	if x := l.sessions[q.h.Session]; x != nil && codec.Decode(q.body, &m) == nil {
		l.opens.remove(x, m.Ino)
	}
}

// releaseOpens takes inodes out of the session's open set, in the order in
// which the stream brings Open and Release.
func (l *leader) releaseOpens(r *inbound) error {
	var m api.Release
	if err := codec.Decode(r.body, &m); err != nil {
		return errkind.Invalid.Wrap("Release: %v", err)
	}
	if x := l.sessions[r.h.Session]; x != nil {
		for _, ino := range m.Inos {
			l.opens.remove(x, ino)
		}
	}
	return nil
}

// createOpens prepares the registration of what a Create makes.
func (l *leader) createOpens(r *inbound) (func(reply []byte), error) {
	var m api.Create
	if err := codec.Decode(r.body, &m); err != nil {
		return nil, errkind.Invalid.Wrap("Create: %v", err)
	}
	if !m.Open && !m.Orphan {
		return nil, nil
	}
	n := l.opens.next
	l.opens.next++
	l.opens.creating[n] = struct{}{}
	id := r.h.Session
	return func(reply []byte) {
		delete(l.opens.creating, n)
		var h api.Reply
		var e api.Entry
		rest, err := codec.DecodePrefix(reply, &h)
		if err != nil || h.Err != errkind.OK || codec.Decode(rest, &e) != nil {
			return
		}
		if x := l.sessions[id]; x != nil {
			l.opens.add(x, e.Attr.Ino)
		}
	}, nil
}

// mayReap reports whether every session has had, and used, the chance to say
// what it has open.
func (l *leader) mayReap(now time.Duration) bool {
	if now-l.since < term {
		return false
	}
	for _, x := range l.sessions {
		if !x.full {
			return false
		}
	}
	return true
}

// settled reports whether no Create that was under way when the candidates
// were found is still under way: such a one may have made a candidate.
func (o *opens) settled() bool {
	for n := range o.creating {
		if n < o.scanned {
			return false
		}
	}
	return true
}

// maxReap bounds one Reap, and one scan.
const maxReap = 512

// reapOrphans removes the orphans of the last scan that are still open
// nowhere, and scans for others; with mu held.
func (s *Server) reapOrphans(l *leader) {
	o := &l.opens
	if !l.mayReap(s.cfg.Sched.Now()) || !o.settled() || len(o.reaping) > 0 {
		return
	}
	var reap []ids.Ino
	for _, ino := range o.candidates {
		if o.count[ino] == 0 {
			reap = append(reap, ino)
		}
	}
	o.candidates = nil
	if len(reap) > 0 {
		for _, ino := range reap {
			o.reaping[ino] = struct{}{}
		}
		s.own(&api.Reap{Inos: reap}, func([]byte, error) {
			clear(o.reaping)
			l.frees.more = true
			s.wake.Broadcast()
		})
	}
	if s.mu.lead != l {
		return
	}
	o.scanned = o.next
	var found []ids.Ino
	if err := s.view(func(r kv.Reader) (err error) { found, err = meta.ReadOrphans(r, o.after, maxReap); return err }); err != nil {
		s.cfg.Log.Error("metadata: list orphans", "err", err)
		return
	}
	o.after = 0
	if len(found) == maxReap {
		o.after = found[len(found)-1]
	}
	for _, ino := range found {
		if _, going := o.reaping[ino]; !going && o.count[ino] == 0 {
			o.candidates = append(o.candidates, ino)
		}
	}
}
