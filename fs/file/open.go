package file

import (
	"context"
	"fmt"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Open registers the inode as open and fetches its attributes and extent map.
// Errors are those of Meta.
func (e *Engine) Open(ctx context.Context, ino ids.Ino, fl OpenFlags) (*Handle, error) {
	n := e.get(ino)
	if err := e.reopen(ctx, n); err != nil {
		e.unhold(n)
		return nil, errkind.Of(err).Wrap("open inode %s: an earlier release is under way", ino)
	}
	var reply api.Opened
	opctx, stop := e.opContext(ctx)
	err := e.cfg.Meta.Do(opctx, &api.Open{Ino: ino, Write: fl.Write}, &reply)
	stop()
	if err != nil {
		e.unhold(n)
		return nil, fmt.Errorf("open inode %s: %w", ino, err)
	}
	h := &Handle{n: n, write: fl.Write}
	n.mu.Lock()
	defer n.mu.Unlock()
	e.recall(n, &reply.Attr)
	n.install(&reply.Attr, false, 0)
	n.addMap(&reply.Map)
	h.keep = !n.mu.foreign && n.mu.pagesVer == n.mu.attr.MapVersion
	// Without KEEP_CACHE this open drops the kernel's pages: what it caches
	// from now on is of this version.
	n.mu.foreign = false
	n.mu.pagesVer = n.mu.attr.MapVersion
	e.adopt(n, h)
	return h, nil
}

// OpenCreated makes a handle of an inode that a Create with Open has just
// made. For an entry that existed call Open.
func (e *Engine) OpenCreated(attr api.Attr, fl OpenFlags) *Handle {
	n := e.get(attr.Ino)
	e.mu.Lock()
	n.registered = true
	e.mu.Unlock()
	h := &Handle{n: n, write: fl.Write}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.install(&attr, false, 0)
	if attr.Size == 0 {
		n.addMap(&api.Map{Off: 0, End: infinity, Version: attr.MapVersion})
	}
	n.mu.pagesVer = n.mu.attr.MapVersion
	e.adopt(n, h)
	return h
}

// recall remembers, for an inode that was closed before, of which version the
// kernel's pages are.
func (e *Engine) recall(n *inode, a *api.Attr) {
	if n.mu.attr.Ino != 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	v, ok := e.mu.lastSeen.take(n.ino)
	n.mu.foreign = !ok || v != version{a.MapVersion, a.Size}
	n.mu.pagesVer = v.mapVersion
}

// adopt makes the handle start behind the errors that others have returned;
// an error that nobody has seen is this handle's too.
func (e *Engine) adopt(n *inode, h *Handle) {
	e.mu.Lock()
	lost, ok := e.mu.lost.take(n.ino)
	e.mu.Unlock()
	if ok {
		n.mu.err = lost
		n.mu.errSeq++
		n.mu.errSeen = false
	}
	h.mu.seen = n.mu.errSeq
	if n.mu.err != nil && !n.mu.errSeen {
		h.mu.seen--
	}
}
