package fuseconn

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Atime is the mount's policy for access times.
type Atime uint8

// The policies.
const (
	AtimeNone   Atime = iota // noatime
	AtimeRel                 // relatime
	AtimeStrict              // strictatime
)

const (
	defaultMaxRead       = 1 << 20
	defaultMaxBackground = 512
	defaultReadAhead     = 4 << 20
	defaultProbe         = 5 * time.Second
	// wantPages lets one request hold 1 MiB that starts in the middle of a
	// page: 257 pages, where the kernel's default limit is 256.
	wantPages = 512
)

// Options describe a mount. The zero value of each field is its default.
type Options struct {
	Source  string // first column of df; default Subtype
	Subtype string // the type is fuse.SUBTYPE; default "ckptfs"

	AllowOther bool // users other than the daemon's may enter
	ReadOnly   bool
	Dev        bool // device files work
	Suid       bool // set-id bits work
	NoExec     bool
	Atime      Atime
	NoDirAtime bool

	MaxRead       int           // bytes of one READ; default 1 MiB
	MaxWrite      int           // bytes of one WRITE; default 1 MiB and, where the kernel lets it, one page more
	MaxBackground int           // asynchronous requests at a time; default 512
	ReadAhead     int           // bytes that the kernel reads ahead; default 4 MiB
	Probe         time.Duration // how long an old mount on the path may take to answer; default 5 s

	Log   *slog.Logger // required
	Debug bool         // log every request
}

func (o Options) withDefaults() Options {
	if o.Subtype == "" {
		o.Subtype = "ckptfs"
	}
	if o.Source == "" {
		o.Source = o.Subtype
	}
	if o.MaxRead == 0 {
		o.MaxRead = defaultMaxRead
	}
	if o.MaxBackground == 0 {
		o.MaxBackground = defaultMaxBackground
	}
	if o.ReadAhead == 0 {
		o.ReadAhead = defaultReadAhead
	}
	if o.Probe == 0 {
		o.Probe = defaultProbe
	}
	if o.MaxWrite == 0 {
		o.MaxWrite = 1<<20 + os.Getpagesize()
	}
	return o
}

// flags are those of mount(2).
func (o *Options) flags() uintptr {
	var f uintptr
	set := func(on bool, bit uintptr) {
		if on {
			f |= bit
		}
	}
	set(o.ReadOnly, unix.MS_RDONLY)
	set(!o.Dev, unix.MS_NODEV)
	set(!o.Suid, unix.MS_NOSUID)
	set(o.NoExec, unix.MS_NOEXEC)
	set(o.NoDirAtime, unix.MS_NODIRATIME)
	set(o.Atime == AtimeNone, unix.MS_NOATIME)
	set(o.Atime == AtimeRel, unix.MS_RELATIME)
	set(o.Atime == AtimeStrict, unix.MS_STRICTATIME)
	return f
}

// data is the option string of mount(2). Permissions are always the kernel's
// to check: the daemon knows no caller's supplementary groups.
func (o *Options) data(fd int, rootMode uint32) string {
	parts := []string{
		fmt.Sprintf("fd=%d", fd),
		fmt.Sprintf("rootmode=%o", rootMode),
		fmt.Sprintf("user_id=%d", os.Geteuid()),
		fmt.Sprintf("group_id=%d", os.Getegid()),
		fmt.Sprintf("max_read=%d", o.MaxRead),
		"default_permissions",
	}
	if o.AllowOther {
		parts = append(parts, "allow_other")
	}
	return strings.Join(parts, ",")
}

// wanted are the capabilities that are asked for beyond the library's own.
const wanted = fuse.CAP_POSIX_ACL | fuse.CAP_DONT_MASK | fuse.CAP_HANDLE_KILLPRIV_V2 | fuse.CAP_SETXATTR_EXT |
	fuse.CAP_EXPORT_SUPPORT | fuse.CAP_PARALLEL_DIROPS | fuse.CAP_READDIRPLUS | fuse.CAP_READDIRPLUS_AUTO |
	fuse.CAP_ASYNC_DIO | fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_FLOCK_LOCKS | fuse.CAP_POSIX_LOCKS |
	fuse.CAP_DIRECT_IO_ALLOW_MMAP | fuse.CAP_CACHE_SYMLINKS | fuse.CAP_MAX_PAGES | fuse.CAP_BIG_WRITES | fuse.CAP_ASYNC_READ

// refused are capabilities that the library would ask for, or might.
//
// AUTO_INVAL_DATA asks the daemon for attributes before every cached read.
// EXPLICIT_INVAL_DATA is not asked for either: with it, the kernel keeps the
// page at the old end of a file that has grown elsewhere, and serves its zeros.
// With neither a changed size drops the pages, and open decides the rest.
const refused = fuse.CAP_AUTO_INVAL_DATA | fuse.CAP_EXPLICIT_INVAL_DATA | fuse.CAP_WRITEBACK_CACHE |
	fuse.CAP_PASSTHROUGH | fuse.CAP_NO_OPEN_SUPPORT

func (o *Options) library() *fuse.MountOptions {
	return &fuse.MountOptions{
		MaxBackground:        o.MaxBackground,
		MaxWrite:             o.MaxWrite,
		FsName:               o.Source,
		Name:                 o.Subtype,
		EnableLocks:          true,
		EnableSymlinkCaching: true,
		EnableAcl:            true,
		// Data comes from memory: through a pipe it would be copied twice, and
		// 1 MiB with its header does not fit one.
		DisableSplice:        true,
		ExtraCapabilities:    wanted,
		DisabledCapabilities: refused,
		Debug:                o.Debug,
		Logger:               slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn),
		PanicHandler: func(v any) Status {
			o.Log.Error("panic in a file system operation", "panic", v, "stack", stack())
			return fuse.EIO
		},
	}
}

// capNames name the wanted capabilities, for the log.
var capNames = []struct {
	bit  uint64
	name string
}{
	{fuse.CAP_POSIX_ACL, "posix_acl"},
	{fuse.CAP_DONT_MASK, "dont_mask"},
	{fuse.CAP_HANDLE_KILLPRIV_V2, "handle_killpriv_v2"},
	{fuse.CAP_SETXATTR_EXT, "setxattr_ext"},
	{fuse.CAP_EXPORT_SUPPORT, "export_support"},
	{fuse.CAP_PARALLEL_DIROPS, "parallel_dirops"},
	{fuse.CAP_READDIRPLUS, "readdirplus"},
	{fuse.CAP_READDIRPLUS_AUTO, "readdirplus_auto"},
	{fuse.CAP_ASYNC_DIO, "async_dio"},
	{fuse.CAP_ATOMIC_O_TRUNC, "atomic_o_trunc"},
	{fuse.CAP_FLOCK_LOCKS, "flock_locks"},
	{fuse.CAP_POSIX_LOCKS, "posix_locks"},
	{fuse.CAP_DIRECT_IO_ALLOW_MMAP, "direct_io_allow_mmap"},
	{fuse.CAP_CACHE_SYMLINKS, "cache_symlinks"},
	{fuse.CAP_MAX_PAGES, "max_pages"},
	{fuse.CAP_BIG_WRITES, "big_writes"},
	{fuse.CAP_ASYNC_READ, "async_read"},
}

// missing names the wanted capabilities that the kernel does not offer.
func missing(offered uint64) []string {
	var names []string
	for _, c := range capNames {
		if offered&c.bit == 0 {
			names = append(names, c.name)
		}
	}
	return names
}
