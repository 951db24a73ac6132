package meta

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const lockBytes = 12 // size of the model's file

type lockOwner struct {
	session ids.Session
	space   api.LockSpace
	owner   uint64
}

// lockModel keeps, for each owner, the type of lock on each byte.
type lockModel struct {
	r     *rig
	ino   ids.Ino
	who   []lockOwner
	bytes map[lockOwner]*[lockBytes]api.LockType
}

func newLockModel(t tester) *lockModel {
	m := &lockModel{r: newRig(t), bytes: map[lockOwner]*[lockBytes]api.LockType{}}
	m.ino = m.r.file(1, "f")
	for i := range 3 {
		s := m.r.open(byte(10 + i))
		for _, space := range []api.LockSpace{api.LockFlock, api.LockPOSIX, api.LockOFD} {
			o := lockOwner{s, space, 7}
			m.who = append(m.who, o)
			m.bytes[o] = new([lockBytes]api.LockType)
		}
	}
	return m
}

// blocker returns an owner that stands in the way.
func (m *lockModel) blocker(o lockOwner, typ api.LockType, lo, hi int) (lockOwner, bool) {
	for _, other := range m.who {
		if other == o || (other.space == api.LockFlock) != (o.space == api.LockFlock) || typ == api.Unlock {
			continue
		}
		for i := lo; i <= hi; i++ {
			if held := m.bytes[other][i]; held == api.WriteLock || held == api.ReadLock && typ == api.WriteLock {
				return other, true
			}
		}
	}
	return lockOwner{}, false
}

func (m *lockModel) draw(t *rapid.T) (o lockOwner, l api.Lock, lo, hi int) {
	o = rapid.SampledFrom(m.who).Draw(t, "owner")
	lo = rapid.IntRange(0, lockBytes-1).Draw(t, "lo")
	hi = rapid.IntRange(lo, lockBytes-1).Draw(t, "hi")
	if o.space == api.LockFlock {
		lo, hi = 0, lockBytes-1
	}
	typ := rapid.SampledFrom([]api.LockType{api.Unlock, api.ReadLock, api.WriteLock}).Draw(t, "type")
	l = api.Lock{Ino: m.ino, Space: o.space, Type: typ, Owner: o.owner, Start: uint64(lo), End: uint64(hi)}
	return o, l, lo, hi
}

func (m *lockModel) lock(t *rapid.T) {
	o, l, lo, hi := m.draw(t)
	_, blocked := m.blocker(o, l.Type, lo, hi)
	_, err := m.r.try(o.session, &l)
	if blocked {
		require.ErrorIs(t, err, errkind.WouldBlock)
		return
	}
	require.NoError(t, err)
	for i := lo; i <= hi; i++ {
		m.bytes[o][i] = l.Type
	}
}

func (m *lockModel) test(t *rapid.T) {
	o, l, lo, hi := m.draw(t)
	if l.Type == api.Unlock {
		return
	}
	body, err := m.r.m.Query(m.r.kv, &api.Header{Session: o.session}, (*api.TestLock)(&l))
	require.NoError(t, err)
	_, blocked := m.blocker(o, l.Type, lo, hi)
	require.Equal(t, blocked, body.(*api.LockInfo).Type != api.Unlock)
}

// end ends a session: its locks count no more, at once.
func (m *lockModel) end(t *rapid.T) {
	i := rapid.IntRange(0, 30).Draw(t, "which")
	if i >= len(m.who) {
		return
	}
	s := m.who[i].session
	m.r.must(&api.EndSessions{Sessions: []ids.Session{s}})
	var left []lockOwner
	for _, o := range m.who {
		if o.session != s {
			left = append(left, o)
		}
	}
	if m.who = left; len(left) == 0 {
		m.who = newLockModelOwners(m)
	}
	if rapid.Bool().Draw(t, "clean") {
		m.r.drain()
	}
}

func newLockModelOwners(m *lockModel) []lockOwner {
	o := lockOwner{m.r.open(byte(m.r.seq)), api.LockPOSIX, 1}
	m.bytes[o] = new([lockBytes]api.LockType)
	return []lockOwner{o}
}

func (m *lockModel) verify(t *rapid.T) {
	require.NoError(t, Check(m.r.kv))
	runs := 0
	for _, o := range m.who {
		for i, typ := range m.bytes[o] {
			if typ != api.Unlock && (i == 0 || m.bytes[o][i-1] != typ) {
				runs++
			}
		}
	}
	v := &view{base: m.r.kv}
	var held locks
	v.load(inoKey(spaceLock, m.ino), &held)
	kept := 0
	for i := range held.List {
		if _, ok := v.liveSession(held.List[i].Session); ok {
			kept++
		}
	}
	require.Equal(t, runs, kept, fmt.Sprint(held.List))
}

func TestLocksAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newLockModel(t)
		t.Repeat(map[string]func(*rapid.T){"lock": m.lock, "lock2": m.lock, "test": m.test, "end": m.end, "": m.verify})
	})
}

func TestSuspectLosesItsLocksOnConflictOnly(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	a, b := r.open(20), r.open(21)
	all := api.Lock{Ino: f, Space: api.LockPOSIX, Type: api.WriteLock, End: api.MaxFileSize, Wait: true}
	r.as(a, &all)
	r.must(&api.SuspectSessions{Sessions: []ids.Session{a}})
	r.as(a, &api.SetAttr{Ino: f}) // the session is heard of: it resumes
	_, err := r.try(b, &all)
	require.ErrorIs(t, err, errkind.WouldBlock)

	r.must(&api.SuspectSessions{Sessions: []ids.Session{a}})
	r.must(&api.SuspectSessions{Resumed: []ids.Session{a}})
	_, err = r.try(b, &all)
	require.ErrorIs(t, err, errkind.WouldBlock)

	r.must(&api.SuspectSessions{Sessions: []ids.Session{a}})
	r.as(b, &all)
	_, err = r.try(a, &api.SetAttr{Ino: f})
	require.ErrorIs(t, err, errkind.Expired)
	r.check()
	r.drain()
	r.check()
}

func TestWaitingLockIsProposedAgain(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	a, b := r.open(20), r.open(21)
	l := api.Lock{Ino: f, Space: api.LockFlock, Type: api.WriteLock, Wait: true}
	r.as(a, &l)
	who, err := ReadBlockers(r.kv, b, &l)
	require.NoError(t, err)
	require.Equal(t, []LockHolder{{Session: a, Space: api.LockFlock}}, who)
	cmd := r.encode(b, &l)
	reply, _, err := api.DecodeReply(api.KindLock, r.applyRaw(cmd))
	require.NoError(t, err)
	require.ErrorIs(t, reply.Failure(), errkind.WouldBlock)
	l.Type = api.Unlock
	r.as(a, &l)
	reply, _, err = api.DecodeReply(api.KindLock, r.applyRaw(cmd))
	require.NoError(t, err)
	require.NoError(t, reply.Failure(), "the same command, proposed again, is granted")
}

func TestLocksOfARemovedInodeGo(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	for i := range byte(freeBatch + 5) {
		s := r.open(100 + i)
		r.as(s, &api.Lock{Ino: f, Space: api.LockPOSIX, Type: api.ReadLock, Owner: uint64(i), Start: uint64(i), End: 1000})
	}
	r.do(&api.Unlink{Parent: 1, Name: []byte("f")})
	r.reapAll()
	r.check()
	require.Zero(t, countSpace(r, spaceLock))
	require.Zero(t, countSpace(r, spaceLocked))
}
