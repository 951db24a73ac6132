package fs

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Meta is the metadata service. Do sends a request, retrying until it is
// answered or ctx ends, and decodes the reply's body; errors wrap an errkind.
// Safe for concurrent use.
type Meta interface {
	Do(ctx context.Context, req api.Request, reply codec.Message) error
}

// Leases tell for how long answers of the metadata service stay right. Safe for
// concurrent use.
type Leases interface {
	// Lease names the lease that is held now; zero when none is.
	Lease() uint64
	// Lend returns for how long, at most limit, what was answered since the
	// lease was named may be used without asking: 0 when it has ended. The lease
	// is given back only after that.
	Lend(lease uint64, limit time.Duration) time.Duration
}

// Engine reads and writes the contents of files; file.Engine through
// FileEngine is the real one. Safe for concurrent use.
type Engine interface {
	// Open registers the inode as open and says what is known of it then.
	Open(ctx context.Context, ino ids.Ino, fl file.OpenFlags) (File, Opened, error)
	// OpenCreated makes a handle of an inode that a Create with Open made.
	OpenCreated(attr api.Attr, fl file.OpenFlags) File
	// Truncate sets the size, commits, and returns the attributes then.
	Truncate(ctx context.Context, ino ids.Ino, size int64) (api.Attr, error)
	// CopyRange copies up to n bytes between files of this engine.
	CopyRange(ctx context.Context, dst File, dstOff int64, src File, srcOff, n int64) (int64, error)
	// FlushIno commits everything written to the inode so far.
	FlushIno(ctx context.Context, ino ids.Ino) error
	// Overlay puts uncommitted changes over attributes.
	Overlay(a *api.Attr)
	// DirtyInos lists the inodes with uncommitted changes.
	DirtyInos() []ids.Ino
	// Close commits everything and ends the engine.
	Close(ctx context.Context) error
}

// Opened is what Engine.Open tells besides the handle.
type Opened struct {
	Attr      api.Attr
	KeepCache bool // the kernel's pages of the file are still right
}

// File is one open file; see file.Handle for what each method promises.
type File interface {
	// ReadView reads into p, or refers v to the bytes.
	ReadView(ctx context.Context, p []byte, off int64, v *file.View) (int, error)
	WriteAt(ctx context.Context, p []byte, off int64, fl file.WriteFlags) (int, error)
	Flush(ctx context.Context) error
	Sync(ctx context.Context) error
	Seek(ctx context.Context, off int64, w file.Whence) (int64, error)
	Allocate(ctx context.Context, mode file.AllocMode, off, n int64) error
	Release()
}

// ReadMode says how files opened only for reading are read.
type ReadMode uint8

// The read modes. Whatever the mode, files open for writing use direct I/O.
const (
	// ReadAuto reads small files through the kernel's page cache and large
	// ones (directFrom) past it.
	ReadAuto ReadMode = iota
	// ReadCached reads through the kernel's page cache.
	ReadCached
	// ReadDirect brings every read to the daemon. Shared maps still work.
	ReadDirect
)

// Config is what a file system needs. Zero numbers take the default.
type Config struct {
	Meta   Meta
	Engine Engine
	Sched  sched.Sched
	Log    *slog.Logger

	// KernelTimeout caps how long the kernel may use a name or attributes
	// without asking (data-path rule 28), at most 200 ms; zero: not at all. What
	// counts is the smaller of it and what is left of the lease.
	KernelTimeout time.Duration
	Leases        Leases // nil: nothing is cached
	// OpTimeout bounds every operation but a wait for a lock (60 s).
	OpTimeout time.Duration
	// Grace is how long an operation goes on after a signal (1 s).
	Grace time.Duration
	// BlockSize is st_blksize, in bytes (128 KiB).
	BlockSize uint32
	ReadMode  ReadMode
	// Atime is the policy that the mount was given.
	Atime      fuseconn.Atime
	NoDirAtime bool
	// Wall gives file times in ns since 1970, corrected to the servers' clock;
	// nil is Sched.Wall.
	Wall func() int64
	// Session is the mount's own session; nil when it is the only one.
	Session func() ids.Session
}

// The defaults.
const (
	DefaultOpTimeout = 60 * time.Second
	DefaultGrace     = time.Second
	DefaultBlockSize = 128 << 10
)

// FS is the file system of one mount. It implements fuseconn.RawFileSystem;
// all methods may be called concurrently.
type FS struct {
	fuseconn.RawFileSystem // answers ENOSYS to what is not implemented

	cfg   Config
	nodes nodes
	files table[*openFile]
	dirs  table[*openDir]

	dirOpens dirOpens
	locks    lockOwners
	atimes   atimes
	inval    invalidations

	complain *rate.Limiter  // of log lines about unexpected errors
	tasks    sync.WaitGroup // background work of interrupted operations
}

// New returns a file system that is not mounted yet.
func New(cfg Config) *FS {
	if cfg.OpTimeout == 0 {
		cfg.OpTimeout = DefaultOpTimeout
	}
	if cfg.Grace == 0 {
		cfg.Grace = DefaultGrace
	}
	if cfg.BlockSize == 0 {
		cfg.BlockSize = DefaultBlockSize
	}
	if cfg.Wall == nil {
		cfg.Wall = func() int64 { return cfg.Sched.Wall().UnixNano() }
	}
	f := &FS{
		RawFileSystem: fuseconn.NewDefaults(),
		cfg:           cfg,
		complain:      rate.NewLimiter(rate.Every(time.Second), 20),
	}
	f.files.init()
	f.dirs.init()
	f.inval.init()
	return f
}

// String names the file system in mount tables.
func (f *FS) String() string { return "ckptfs" }

func (f *FS) now() int64 { return f.cfg.Wall() }
