package fs

import (
	"sync"
	"syscall"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// lockEnd is the last byte that a lock can cover.
const lockEnd = 1<<63 - 1

// lockKey is an owner of locks. The kernel numbers owners: a process for POSIX
// locks, an open file description for flock and for OFD locks. The protocol
// does not tell the last two kinds of fcntl lock apart, and need not: both
// conflict by owner. Only their ends differ: a process's locks go when it
// closes any descriptor of the file, which FLUSH tells, a description's when it
// is released.
type lockKey struct {
	space api.LockSpace
	owner uint64
}

// lockOwners remembers who may have locks on what, and through which handle he
// took the last, so that files without locks cost no call when closed.
type lockOwners struct {
	mu struct {
		sync.Mutex
		all shrinkMap[ids.Ino, map[lockKey]uint64]
	}
}

func (l *lockOwners) note(ino ids.Ino, k lockKey, fh uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.mu.all.m[ino]
	if m == nil {
		m = make(map[lockKey]uint64)
		l.mu.all.set(ino, m)
	}
	m[k] = fh
}

// take forgets an owner and reports whether he was known.
func (l *lockOwners) take(ino ids.Ino, k lockKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.mu.all.m[ino]
	_, ok := m[k]
	delete(m, k)
	if len(m) == 0 {
		l.mu.all.remove(ino)
	}
	return ok
}

// takeHandle forgets the owners that came through a handle, and returns them.
func (l *lockOwners) takeHandle(ino ids.Ino, fh uint64) []lockKey {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.mu.all.m[ino]
	var keys []lockKey
	for k, h := range m {
		if h == fh {
			keys = append(keys, k)
			delete(m, k)
		}
	}
	if len(m) == 0 {
		l.mu.all.remove(ino)
	}
	return keys
}

func space(in *fuseconn.LkIn) api.LockSpace {
	if in.LkFlags&fuseconn.LockFlock != 0 {
		return api.LockFlock
	}
	return api.LockPOSIX
}

// lockRequest translates a request; false for a type that does not exist.
func lockRequest(in *fuseconn.LkIn) (*api.Lock, bool) {
	req := &api.Lock{
		Ino: ids.Ino(in.NodeId), Space: space(in), Owner: in.Owner, PID: in.Lk.Pid,
		Start: in.Lk.Start, End: min(in.Lk.End, lockEnd),
	}
	switch in.Lk.Typ {
	case syscall.F_RDLCK:
		req.Type = api.ReadLock
	case syscall.F_WRLCK:
		req.Type = api.WriteLock
	case syscall.F_UNLCK:
		req.Type = api.Unlock
	default:
		return nil, false
	}
	return req, true
}

// GetLk tells which lock would conflict. A holder on another mount has no
// process here: its number is 0.
func (f *FS) GetLk(cancel <-chan struct{}, in *fuseconn.LkIn, out *fuseconn.LkOut) fuseconn.Status {
	req, ok := lockRequest(in)
	if !ok {
		return fuseconn.Status(syscall.EINVAL)
	}
	o := f.begin(cancel)
	defer o.end()
	var info api.LockInfo
	if err := f.cfg.Meta.Do(o, (*api.TestLock)(req), &info); err != nil {
		return f.inodeStatus("getlk", in.NodeId, err)
	}
	out.Lk = in.Lk
	switch info.Type {
	case api.ReadLock:
		out.Lk.Typ = syscall.F_RDLCK
	case api.WriteLock:
		out.Lk.Typ = syscall.F_WRLCK
	default:
		out.Lk.Typ = syscall.F_UNLCK
		return fuseconn.OK
	}
	out.Lk.Start, out.Lk.End, out.Lk.Pid = info.Start, info.End, info.PID
	if f.cfg.Session != nil && info.Session != f.cfg.Session() {
		out.Lk.Pid = 0
	}
	return fuseconn.OK
}

// SetLk takes or releases a lock, or fails at once.
func (f *FS) SetLk(cancel <-chan struct{}, in *fuseconn.LkIn) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	return f.setLock(o, in, false)
}

// SetLkw takes a lock, waiting as long as its caller does.
func (f *FS) SetLkw(cancel <-chan struct{}, in *fuseconn.LkIn) fuseconn.Status {
	o := beginWait(cancel)
	defer o.end()
	return f.setLock(o, in, true)
}

func (f *FS) setLock(o *op, in *fuseconn.LkIn, wait bool) fuseconn.Status {
	req, ok := lockRequest(in)
	if !ok {
		return fuseconn.Status(syscall.EINVAL)
	}
	req.Wait = wait && req.Type != api.Unlock
	if req.Type != api.Unlock {
		// Before it is taken: one that is granted after its caller has given up
		// must be released at close, too.
		f.locks.note(req.Ino, lockKey{req.Space, req.Owner}, in.Fh)
	}
	err := f.cfg.Meta.Do(o, req, &api.Empty{})
	return f.inodeStatus("lock", in.NodeId, err)
}

// unlock releases all that an owner holds on an inode.
func (f *FS) unlock(o *op, ino ids.Ino, k lockKey) {
	req := &api.Lock{Ino: ino, Space: k.space, Type: api.Unlock, Owner: k.owner, End: lockEnd}
	if err := f.cfg.Meta.Do(o, req, &api.Empty{}); err != nil {
		f.inodeStatus("unlock", uint64(ino), err)
	}
}
