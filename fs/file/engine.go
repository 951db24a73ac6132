package file

import (
	"context"
	"log/slog"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Meta is the metadata service as the engine sees it. Do sends a request,
// retrying until it is answered or ctx ends, and decodes the reply's body;
// errors wrap an errkind. Safe for concurrent use.
type Meta interface {
	Do(ctx context.Context, req api.Request, reply codec.Message) error
}

// IDs makes block ids of the mount's session. It must not block: it is called
// with a lock held.
type IDs interface {
	NextBlockID(slot ids.Slot) ids.BlockID
}

// Config is what an engine needs. Zero values of the numbers take the default.
type Config struct {
	Meta   Meta
	IDs    IDs
	Blocks chunk.Blocks
	Sched  sched.Sched
	Log    *slog.Logger
	// Budget bounds the buffers of the engine, in bytes (1 GiB).
	Budget int64
	// OpTimeout bounds every wait (60 s). An inode whose bytes could not be
	// stored for that long loses them, and every handle gets the error.
	OpTimeout time.Duration
	// FlushEvery bounds how long a written byte stays uncommitted, and a block
	// open (5 s).
	FlushEvery time.Duration
	// Wall gives file times in ns since 1970, corrected to the servers' clock;
	// nil is Sched.Wall.
	Wall func() int64
	// Invalidate is called, from a task that holds no lock, when pages that the
	// kernel may hold from off on are wrong: dirty bytes were dropped (err says
	// why), or an append landed elsewhere (err is nil). May be nil.
	Invalidate func(ino ids.Ino, off uint64, err error)
}

// Engine serves all files of one mount. Safe for concurrent use.
type Engine struct{}

// New starts an engine. End it with Close.
func New(cfg Config) *Engine { return &Engine{} }

// Open registers the inode as open and fetches its attributes and extent map.
// Errors are those of Meta.
func (e *Engine) Open(ctx context.Context, ino ids.Ino, fl OpenFlags) (*Handle, error) {
	return nil, errkind.Unsupported
}

// OpenCreated makes a handle of an inode that a Create with Open has just
// made. For an entry that existed call Open.
func (e *Engine) OpenCreated(attr api.Attr, fl OpenFlags) *Handle { return &Handle{} }

// Truncate sets the size and commits that before it returns; no handle is
// needed. The attributes afterwards are returned, overlaid.
func (e *Engine) Truncate(ctx context.Context, ino ids.Ino, size int64) (api.Attr, error) {
	return api.Attr{}, errkind.Unsupported
}

// CopyRange copies n bytes, fewer at the end of src, and returns how many.
// Ranges of one file that overlap are Invalid.
func (e *Engine) CopyRange(ctx context.Context, dst *Handle, dstOff int64, src *Handle, srcOff, n int64) (int64, error) {
	return 0, errkind.Unsupported
}

// FlushIno commits everything written to the inode so far; nil at once when
// there is nothing. Call it for the source of a rename, and before a change of
// times. A kept error stays for the handles.
func (e *Engine) FlushIno(ctx context.Context, ino ids.Ino) error { return nil }

// Overlay puts the inode's uncommitted size, times, stored bytes and killed
// privileges over attributes from the metadata service (rule 29), and learns
// from them that the file changed elsewhere. Call it on every attribute that
// goes to the kernel.
func (e *Engine) Overlay(a *api.Attr) {}

// DirtyInos lists the inodes with uncommitted changes, oldest first.
func (e *Engine) DirtyInos() []ids.Ino { return nil }

// OpenInos lists the inodes that are registered as open, in ascending order:
// what a Renew with Full must tell.
func (e *Engine) OpenInos() []ids.Ino { return nil }

// Floor is the lowest block counter that the session may still commit (rule 17).
func (e *Engine) Floor() uint64 { return 0 }

// Close flushes every inode, sends what releases are pending and ends all
// tasks. It returns the first error of a flush.
func (e *Engine) Close(ctx context.Context) error { return nil }
