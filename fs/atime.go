package fs

import (
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// relatimeAge is how old an access time may be under relatime.
const relatimeAge = 24 * time.Hour

// atimes holds access times that were not sent yet. They are sent at flush,
// fsync and release, and lost with the daemon: an access time is no promise.
type atimes struct {
	mu struct {
		sync.Mutex
		all shrinkMap[ids.Ino, int64]
	}
}

func (t *atimes) set(ino ids.Ino, ns int64) {
	t.mu.Lock()
	t.mu.all.set(ino, ns)
	t.mu.Unlock()
}

// drop forgets one and returns it.
func (t *atimes) drop(ino ids.Ino) (int64, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ns, ok := t.mu.all.m[ino]
	if ok {
		t.mu.all.remove(ino)
	}
	return ns, ok
}

func (t *atimes) overlay(a *api.Attr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ns, ok := t.mu.all.m[a.Ino]; ok {
		a.Atime = max(a.Atime, ns)
	}
}

// wantsAtime reports whether a use of the inode sets its access time.
func (f *FS) wantsAtime(a *api.Attr) bool {
	switch f.cfg.Atime {
	case fuseconn.AtimeStrict:
		return true
	case fuseconn.AtimeRel:
		return a.Atime <= a.Mtime || a.Atime <= a.Ctime || f.now()-a.Atime > int64(relatimeAge)
	}
	return false
}

func (f *FS) touchFile(h *openFile) {
	if f.cfg.Atime == fuseconn.AtimeStrict || h.read.CompareAndSwap(false, true) {
		f.atimes.set(h.ino, f.now())
	}
}

// sendAtime sends an access time that waits. It is best effort.
func (f *FS) sendAtime(o *op, ino ids.Ino) {
	if f.cfg.Atime == fuseconn.AtimeNone {
		return
	}
	ns, ok := f.atimes.drop(ino)
	if !ok {
		return
	}
	if err := f.cfg.Meta.Do(o, &api.SetAttr{Ino: ino, Valid: api.SetAtime, Atime: ns}, &api.Entry{}); err != nil {
		f.inodeStatus("set access time", uint64(ino), err)
	}
}
