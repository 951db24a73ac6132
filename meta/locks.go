package meta

import (
	"cmp"
	"slices"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// maxLocks bounds the locks on one inode: they are one record.
const maxLocks = 4096

// sameOwner reports whether both locks are one owner's: they never conflict,
// the newer one changes the older.
func (l *lock) sameOwner(o *lock) bool {
	return l.Space == o.Space && l.Session == o.Session && l.Owner == o.Owner
}

// conflicts reports whether both cannot be granted at once. flock has a space
// of its own; POSIX and open-file-description locks see each other.
func (l *lock) conflicts(o *lock) bool {
	flock := l.Space == api.LockFlock
	return flock == (o.Space == api.LockFlock) && !l.sameOwner(o) &&
		(l.Type == api.WriteLock || o.Type == api.WriteLock) && l.Start <= o.End && o.Start <= l.End
}

func lockOrder(a, b lock) int {
	return cmp.Or(cmp.Compare(a.Space, b.Space), cmp.Compare(a.Start, b.Start), cmp.Compare(a.Session, b.Session),
		cmp.Compare(a.Owner, b.Owner))
}

// wantedLock checks a request and makes the lock that it asks for.
func wantedLock(r *api.Lock, session ids.Session) (*lock, error) {
	if r.Space > api.LockOFD || r.Type > api.WriteLock || r.Start > r.End || r.End > api.MaxFileSize {
		return nil, errkind.Invalid.Wrap("lock on inode %d: space %d, type %d, range %d to %d", r.Ino, r.Space, r.Type, r.Start, r.End)
	}
	l := &lock{
		Space: r.Space, Type: r.Type, Session: session, Owner: r.Owner, PID: r.PID, Start: r.Start, End: r.End,
	}
	if r.Space == api.LockFlock {
		l.Start, l.End = 0, api.MaxFileSize
	}
	return l, nil
}

func (s *state) lock(r *api.Lock) (codec.Message, error) {
	if s.h.Session == 0 {
		return nil, errkind.Invalid.Wrap("lock on inode %d without a session", r.Ino)
	}
	want, err := wantedLock(r, s.h.Session)
	if err != nil {
		return nil, err
	}
	if _, err := s.need(r.Ino); err != nil {
		return nil, err
	}
	var held locks
	s.load(inoKey(spaceLock, r.Ino), &held)
	if want.Type != api.Unlock {
		kept := held.List[:0:0]
		for i := range held.List {
			if !held.List[i].conflicts(want) {
				kept = append(kept, held.List[i])
				continue
			}
			if !s.revoke(&held.List[i]) {
				return nil, errkind.WouldBlock.Wrap("lock on inode %d: session %d holds %d to %d",
					r.Ino, held.List[i].Session, held.List[i].Start, held.List[i].End)
			}
		}
		held.List = kept
	}
	held.List = change(held.List, want)
	if len(held.List) > maxLocks {
		return nil, errkind.NoSpace.Wrap("lock on inode %d: it has %d", r.Ino, maxLocks)
	}
	s.setLocks(r.Ino, held)
	s.indexLocks(r.Ino, s.h.Session, held)
	return &api.Empty{}, nil
}

// revoke reports whether a lock that stands in the way goes: its session has
// ended, or is suspect and ends by this.
func (s *state) revoke(l *lock) bool {
	sess, ok := s.liveSession(l.Session)
	if !ok {
		return true
	}
	if sess.State != SessionSuspect {
		return false
	}
	s.endSession(l.Session)
	return true
}

// change applies want to the locks of its owner: a range has one type, ranges
// of one type that touch are one lock.
func change(list []lock, want *lock) []lock {
	w := *want
	var out []lock
	for _, l := range list {
		switch {
		case !l.sameOwner(want), l.End+1 < want.Start, want.End+1 < l.Start:
			out = append(out, l)
		case l.Type == want.Type:
			w.Start, w.End = min(w.Start, l.Start), max(w.End, l.End)
		default:
			if l.Start < want.Start {
				left := l
				left.End = min(l.End, want.Start-1)
				out = append(out, left)
			}
			if l.End > want.End {
				right := l
				right.Start = max(l.Start, want.End+1)
				out = append(out, right)
			}
		}
	}
	if w.Type != api.Unlock {
		out = append(out, w)
	}
	slices.SortFunc(out, lockOrder)
	return out
}

func (s *state) setLocks(ino ids.Ino, held locks) {
	key := inoKey(spaceLock, ino)
	if len(held.List) > 0 {
		s.put(key, &held)
	} else if s.has(key) {
		s.delete(key)
	}
}

// indexLocks keeps the record that finds a session's locks.
func (s *state) indexLocks(ino ids.Ino, session ids.Session, held locks) {
	key := lockedKey(session, ino)
	has := slices.ContainsFunc(held.List, func(l lock) bool { return l.Session == session })
	switch known := s.has(key); {
	case has && !known:
		s.put(key, &mark{})
	case !has && known:
		s.delete(key)
	}
}

// dropSessionLocks removes all locks of a session on an inode.
func (s *state) dropSessionLocks(ino ids.Ino, session ids.Session) {
	var held locks
	if s.load(inoKey(spaceLock, ino), &held) {
		held.List = slices.DeleteFunc(held.List, func(l lock) bool { return l.Session == session })
		s.setLocks(ino, held)
	}
	s.delete(lockedKey(session, ino))
}

// dropLocks removes some of the locks of a removed inode; true when none is left.
func (s *state) dropLocks(ino ids.Ino) bool {
	var held locks
	if !s.load(inoKey(spaceLock, ino), &held) {
		return true
	}
	for n := 0; len(held.List) > 0; n++ {
		if n == freeBatch {
			s.setLocks(ino, held)
			return false
		}
		session := held.List[0].Session
		held.List = slices.DeleteFunc(held.List, func(l lock) bool { return l.Session == session })
		s.delete(lockedKey(session, ino))
	}
	s.setLocks(ino, held)
	return true
}

// testLock finds a lock that would stand in the way.
func (v *view) testLock(h *api.Header, r *api.TestLock) (codec.Message, error) {
	want, err := wantedLock((*api.Lock)(r), h.Session)
	if err != nil {
		return nil, err
	}
	if want.Type == api.Unlock {
		return nil, errkind.Invalid.Wrap("test for no lock on inode %d", r.Ino)
	}
	if _, err := v.need(r.Ino); err != nil {
		return nil, err
	}
	var held locks
	v.load(inoKey(spaceLock, r.Ino), &held)
	for i := range held.List {
		l := &held.List[i]
		if !l.conflicts(want) {
			continue
		}
		if _, ok := v.liveSession(l.Session); ok {
			return &api.LockInfo{Type: l.Type, Start: l.Start, End: l.End, PID: l.PID, Session: l.Session}, nil
		}
	}
	return &api.LockInfo{}, nil
}
