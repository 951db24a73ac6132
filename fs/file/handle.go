package file

import (
	"context"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// OpenFlags say what a handle is for.
type OpenFlags struct {
	Write bool
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
type Handle struct{}

// Ino returns the file's inode number.
func (h *Handle) Ino() ids.Ino { return 0 }

// Attr returns the attributes as this engine knows them, overlaid.
func (h *Handle) Attr() api.Attr { return api.Attr{} }

// KeepCache reports whether the pages that the kernel holds of the file since
// its last close here are still right (FOPEN_KEEP_CACHE).
func (h *Handle) KeepCache() bool { return false }

// ReadAt reads up to len(p) bytes; fewer only at the end of the file, without
// an error. Holes are zeros. Errors: Corrupt, Unavailable, Timeout, Stale,
// Interrupted (ctx).
func (h *Handle) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return 0, errkind.Unsupported
}

// WriteAt copies p and returns; storing goes on in the background. It takes
// all of p or, on an error, none (up to MaxWrite). A kept error of write-behind
// is returned once to each handle.
func (h *Handle) WriteAt(ctx context.Context, p []byte, off int64, fl WriteFlags) (int, error) {
	return 0, errkind.Unsupported
}

// Flush is close(2): it returns when everything written to the inode so far,
// through any handle, is durable and committed, or with the kept error.
// When ctx ends first, it returns Interrupted and the flush goes on.
func (h *Handle) Flush(ctx context.Context) error { return errkind.Unsupported }

// Sync is fsync(2); it does what Flush does.
func (h *Handle) Sync(ctx context.Context) error { return errkind.Unsupported }

// Release gives the handle up and does not wait. Bytes written since the last
// flush are committed in the background (rule 31).
func (h *Handle) Release() {}

// Seek finds the first data or hole at or after off. NoData when there is none.
func (h *Handle) Seek(ctx context.Context, off int64, w Whence) (int64, error) {
	return 0, errkind.Unsupported
}

// Allocate changes the range [off, off+n); it is committed with the next flush.
func (h *Handle) Allocate(ctx context.Context, mode AllocMode, off, n int64) error {
	return errkind.Unsupported
}
