// Package fuseconn is the one way to the kernel's FUSE driver. It owns the
// device descriptor, the mount and its tuning, and wraps the protocol library,
// whose types the rest of fs knows only by the names given here.
package fuseconn

import "github.com/hanwen/go-fuse/v2/fuse"

// The protocol's structures, as the kernel sends and expects them. They are
// valid only until the method that got them returns.
type (
	Status          = fuse.Status
	Attr            = fuse.Attr
	InHeader        = fuse.InHeader
	EntryOut        = fuse.EntryOut
	AttrOut         = fuse.AttrOut
	GetAttrIn       = fuse.GetAttrIn
	SetAttrIn       = fuse.SetAttrIn
	StatxIn         = fuse.StatxIn
	StatxOut        = fuse.StatxOut
	MknodIn         = fuse.MknodIn
	MkdirIn         = fuse.MkdirIn
	RenameIn        = fuse.RenameIn
	LinkIn          = fuse.LinkIn
	AccessIn        = fuse.AccessIn
	SetXAttrIn      = fuse.SetXAttrIn
	CreateIn        = fuse.CreateIn
	CreateOut       = fuse.CreateOut
	OpenIn          = fuse.OpenIn
	OpenOut         = fuse.OpenOut
	ReadIn          = fuse.ReadIn
	ReadResult      = fuse.ReadResult
	WriteIn         = fuse.WriteIn
	LseekIn         = fuse.LseekIn
	LseekOut        = fuse.LseekOut
	LkIn            = fuse.LkIn
	LkOut           = fuse.LkOut
	ReleaseIn       = fuse.ReleaseIn
	CopyFileRangeIn = fuse.CopyFileRangeIn
	IoctlIn         = fuse.IoctlIn
	IoctlOut        = fuse.IoctlOut
	FlushIn         = fuse.FlushIn
	FsyncIn         = fuse.FsyncIn
	FallocateIn     = fuse.FallocateIn
	DirEntry        = fuse.DirEntry
	DirEntryList    = fuse.DirEntryList
	StatfsOut       = fuse.StatfsOut
	RawFileSystem   = fuse.RawFileSystem
)

// NewDefaults returns an implementation that answers ENOSYS to everything.
func NewDefaults() RawFileSystem { return fuse.NewDefaultRawFileSystem() }

// NewDirEntryList collects directory entries into buf; for tests of listings.
func NewDirEntryList(buf []byte, off uint64) *DirEntryList { return fuse.NewDirEntryList(buf, off) }

// Bytes returns a read result of p, which must stay untouched until the
// request buffer that it came from is given back.
func Bytes(p []byte) ReadResult { return fuse.ReadResultData(p) }

// Flags of the protocol.
const (
	OK = fuse.OK

	GetattrFh = fuse.FUSE_GETATTR_FH

	SetMode     = fuse.FATTR_MODE
	SetUID      = fuse.FATTR_UID
	SetGID      = fuse.FATTR_GID
	SetSize     = fuse.FATTR_SIZE
	SetAtime    = fuse.FATTR_ATIME
	SetMtime    = fuse.FATTR_MTIME
	SetAtimeNow = fuse.FATTR_ATIME_NOW
	SetMtimeNow = fuse.FATTR_MTIME_NOW
	SetKillPriv = fuse.FATTR_KILL_SUIDGID

	OpenDirectIO  = fuse.FOPEN_DIRECT_IO
	OpenKeepCache = fuse.FOPEN_KEEP_CACHE
	OpenKillPriv  = fuse.OPEN_KILL_SUIDGID

	WriteCache    = fuse.WRITE_CACHE
	WriteKillPriv = fuse.WRITE_KILL_SUIDGID

	XattrACLKillSgid = fuse.SETXATTR_ACL_KILL_SGID

	LockFlock = fuse.LK_FLOCK
	// ReleaseFlockUnlock in ReleaseFlags: the handle held an flock of LockOwner.
	ReleaseFlockUnlock = 1 << 1

	FsyncDataOnly = 1 << 0
)

// Parts returns a read result of n bytes in parts, which must stay untouched
// until done is called: when they have been sent, or cannot be.
func Parts(parts [][]byte, n int, done func()) ReadResult { return &partsResult{parts, n, done} }

// partsResult makes the library send the parts with one writev.
type partsResult struct {
	parts [][]byte
	n     int
	done  func()
}

func (r *partsResult) Slices() ([][]byte, Status) { return r.parts, OK }
func (r *partsResult) Size() int                  { return r.n }
func (r *partsResult) Done()                      { r.done() }

// Bytes is for callers that do not know Slices.
func (r *partsResult) Bytes(buf []byte) ([]byte, Status) {
	buf = buf[:0]
	for _, p := range r.parts {
		buf = append(buf, p...)
	}
	return buf, OK
}
