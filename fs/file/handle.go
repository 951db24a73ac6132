package file

import (
	"context"
	"sync"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// OpenFlags say what a handle is for.
type OpenFlags struct {
	Write bool // bytes may be written through it
}

// WriteFlags qualify one write.
type WriteFlags struct {
	// Append ignores the offset and writes at the file's end; the final place
	// is decided at commit (rule 14). The bytes of one call of at most MaxWrite
	// bytes stay together.
	Append bool
	// KillPriv clears the set-id bits and capabilities with the next commit.
	KillPriv bool
	// Writeback marks pages that the kernel writes back: they may use a
	// reserve of the budget that other writers cannot.
	Writeback bool
}

// MaxWrite is the longest write that is all or nothing, in bytes. Longer ones
// are done in pieces.
const MaxWrite = 1 << 20

// Whence selects what Seek looks for.
type Whence uint8

// What Seek looks for.
const (
	SeekData Whence = iota
	SeekHole
)

// AllocMode selects what Allocate does.
type AllocMode uint8

// The modes. AllocExtend reserves no space (rule 35) and only raises the size;
// AllocKeep does nothing. AllocPunch never changes the size.
const (
	AllocExtend AllocMode = iota
	AllocKeep
	AllocPunch
	AllocZero     // zero the range, raising the size to its end
	AllocZeroKeep // zero the range inside the size
)

// Handle is one open file. Safe for concurrent use.
type Handle struct {
	n     *inode
	keep  bool
	write bool
	mu    struct {
		sync.Mutex
		seen     uint64 // the last error of write-behind that it returned
		released bool
	}
}

// Ino returns the file's inode number.
func (h *Handle) Ino() ids.Ino { return h.n.ino }

// Attr returns the attributes as this engine knows them, overlaid.
func (h *Handle) Attr() api.Attr {
	h.n.mu.Lock()
	defer h.n.mu.Unlock()
	a := h.n.mu.attr
	h.n.overlayAttr(&a)
	return a
}

// KeepCache reports whether the pages that the kernel holds of the file since
// its last close here are still right (FOPEN_KEEP_CACHE).
func (h *Handle) KeepCache() bool { return h.keep }

// kept returns an error of write-behind that this handle has not returned yet.
// The inode's lock is held.
func (h *Handle) kept() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.seen == h.n.mu.errSeq {
		return nil
	}
	h.mu.seen = h.n.mu.errSeq
	h.n.mu.errSeen = true
	return h.n.mu.err
}

// ReadAt reads up to len(p) bytes; fewer only at the end of the file, without
// an error. Holes are zeros. Errors: Corrupt, Unavailable, Timeout, Stale,
// Interrupted (ctx).
func (h *Handle) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, errkind.Invalid.Wrap("read inode %s at %d", h.n.ino, off)
	}
	if len(p) == 0 {
		return 0, nil
	}
	return h.n.read(ctx, p, uint64(off), nil)
}

// WriteAt copies p and returns; storing goes on in the background. It takes
// all of p or, on an error, none (up to MaxWrite, less with a budget under
// 8 MiB). A kept error of write-behind is returned once to each handle.
func (h *Handle) WriteAt(ctx context.Context, p []byte, off int64, fl WriteFlags) (int, error) {
	if off < 0 {
		return 0, errkind.Invalid.Wrap("write inode %s at %d", h.n.ino, off)
	}
	done := 0
	for done < len(p) {
		part := p[done:min(len(p), done+h.n.e.maxPiece)]
		if err := h.n.write(ctx, h, part, uint64(off)+uint64(done), fl); err != nil {
			return done, err
		}
		done += len(part)
	}
	return done, nil
}

// Flush is close(2): it returns when everything written to the inode so far,
// through any handle, is durable and committed, or with the kept error.
// When ctx ends first, it returns Interrupted and the flush goes on. A handle
// that cannot write waits for nothing.
func (h *Handle) Flush(ctx context.Context) error {
	if h.write {
		return h.Sync(ctx)
	}
	h.n.mu.Lock()
	defer h.n.mu.Unlock()
	return h.kept()
}

// Sync is fsync(2): what Flush does for a handle that can write.
func (h *Handle) Sync(ctx context.Context) error {
	h.n.mu.Lock()
	defer h.n.mu.Unlock()
	failed, err := h.n.flushLocked(ctx)
	if kept := h.kept(); kept != nil {
		return kept
	}
	if failed {
		return nil // another call of this handle has returned it
	}
	return err
}

// Release gives the handle up and does not wait. Bytes written since the last
// flush are committed in the background (rule 31).
func (h *Handle) Release() {
	h.mu.Lock()
	again := h.mu.released
	h.mu.released = true
	h.mu.Unlock()
	if again {
		return
	}
	n := h.n
	n.mu.Lock()
	if n.mu.dirty {
		n.startFlush()
	}
	n.mu.Unlock()
	n.e.unhold(n)
	n.e.mu.Lock()
	full := len(n.e.mu.releases) >= releaseBatch && len(n.e.mu.releasing) == 0
	n.e.mu.Unlock()
	if full {
		n.e.task("release", n.e.sendReleases)
	}
}
