package server

import (
	"cmp"
	"slices"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Limits of lock waiters.
const (
	maxWaiters      = 1 << 16
	maxWaitersInode = 1 << 12
)

// waiter is a Lock with Wait that could not be granted yet, or is proposed.
type waiter struct {
	stream    *Stream
	id        uint64 // of the request
	order     uint64
	m         api.Lock
	cmd       []byte
	proposed  bool // its command is in the log's hands
	again     bool // something was unlocked since
	cancelled bool
	gone      bool // the stream ended
}

// locks are the waiters of all inodes.
type locks struct {
	byIno map[ids.Ino][]*waiter // in order of arrival
	total int
	next  uint64
}

func newLocks() locks { return locks{byIno: make(map[ids.Ino][]*waiter)} }

// all lists the waiters in order of arrival.
func (k *locks) all() []*waiter {
	var all []*waiter
	for _, q := range k.byIno {
		all = append(all, q...)
	}
	slices.SortFunc(all, func(a, b *waiter) int { return cmp.Compare(a.order, b.order) })
	return all
}

func (k *locks) add(w *waiter) bool {
	if k.total >= maxWaiters || len(k.byIno[w.m.Ino]) >= maxWaitersInode {
		return false
	}
	k.next++
	w.order = k.next
	k.byIno[w.m.Ino] = append(k.byIno[w.m.Ino], w)
	k.total++
	return true
}

func (k *locks) remove(w *waiter) {
	q := k.byIno[w.m.Ino]
	i := slices.Index(q, w)
	if i < 0 {
		return
	}
	k.total--
	if len(q) == 1 {
		delete(k.byIno, w.m.Ino)
		return
	}
	k.byIno[w.m.Ino] = slices.Delete(q, i, i+1)
}

// drop forgets the waiters of a stream that ended; the client asks again.
func (k *locks) drop(st *Stream) {
	for _, w := range k.all() {
		if w.stream == st {
			w.gone = true
			k.remove(w)
		}
	}
}

// proposeLock proposes a Lock, and keeps one that waits; with mu held.
func (s *Server) proposeLock(l *leader, r *inbound, cmd []byte, acts *actions) {
	var m api.Lock
	if err := codec.Decode(r.body, &m); err != nil {
		r.stream.fail(r.id, errkind.Invalid.Wrap("Lock: %v", err))
		return
	}
	w := &waiter{stream: r.stream, id: r.id, m: m, cmd: cmd, proposed: true}
	if m.Wait && m.Type != api.Unlock && !l.locks.add(w) {
		r.stream.refuse(r.id, errkind.Busy, "too many requests wait for locks", "")
		return
	}
	acts.proposals = append(acts.proposals, s.lockProposal(l, w))
}

func (s *Server) lockProposal(l *leader, w *waiter) proposal {
	// Each proposal stamps its own copy: the log keeps the bytes.
	return proposal{slices.Clone(w.cmd), func(reply []byte, err error) { s.lockApplied(l, w, reply, err) }}
}

// lockApplied answers a Lock, or lets it wait on.
func (s *Server) lockApplied(l *leader, w *waiter, reply []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.lead != l && w.order != 0 {
		return // the waiters were refused together
	}
	w.proposed = false
	if err != nil {
		l.locks.remove(w)
		if !w.gone {
			s.refuseProposal(w.stream, w.id, err)
		}
		return
	}
	failure := replyError(reply)
	if w.order != 0 && !w.gone && errkind.Of(failure) == errkind.WouldBlock {
		s.lockBlocked(l, w)
		return
	}
	l.locks.remove(w)
	if !w.gone {
		w.stream.reply(w.id, reply)
	}
	if failure != nil {
		return
	}
	if w.m.Type != api.WriteLock {
		s.wakeLocks(l, &w.m) // a read lock may have replaced a write lock
	}
	l.verify = l.verify || l.anySuspect()
}

// lockBlocked keeps a waiter whose lock another holds.
func (s *Server) lockBlocked(l *leader, w *waiter) {
	switch {
	case w.cancelled:
		l.locks.remove(w)
		w.stream.fail(w.id, errkind.Interrupted.Wrap("lock inode %d", w.m.Ino))
	case w.again:
		w.again, w.proposed = false, true
		s.later(s.lockProposal(l, w))
	}
}

// later proposes from a task of its own: callbacks of the replica may run
// inside Propose.
func (s *Server) later(ps ...proposal) {
	if s.mu.closed {
		return
	}
	s.mu.tasks++
	s.cfg.Sched.Go("meta-lock", func() {
		defer func() {
			s.mu.Lock()
			s.mu.tasks--
			s.idle.Broadcast()
			s.mu.Unlock()
		}()
		for _, p := range ps {
			s.propose(p)
		}
	})
}

// wakeLocks has the waiters proposed again that changed may have made way for:
// all of them when it is nil; with mu held.
func (s *Server) wakeLocks(l *leader, changed *api.Lock) {
	var ps []proposal
	wake := func(w *waiter) {
		if w.proposed {
			w.again = true
			return
		}
		w.proposed = true
		ps = append(ps, s.lockProposal(l, w))
	}
	if changed == nil {
		for _, w := range l.locks.all() {
			wake(w)
		}
	} else {
		for _, w := range l.locks.byIno[changed.Ino] {
			if w.m.Space == api.LockFlock || w.m.Start <= changed.End && changed.Start <= w.m.End {
				wake(w)
			}
		}
	}
	if len(ps) > 0 {
		s.later(ps...)
	}
}

// cancel gives up on a waiting request; with mu held. One that is being
// proposed is answered by what becomes of it.
func (s *Server) cancel(st *Stream, id uint64) {
	l := s.mu.lead
	if l == nil {
		return
	}
	for _, w := range l.locks.all() {
		if w.stream != st || w.id != id {
			continue
		}
		if w.proposed {
			w.cancelled = true
			continue
		}
		l.locks.remove(w)
		st.fail(id, errkind.Interrupted.Wrap("lock inode %d", w.m.Ino))
	}
}
