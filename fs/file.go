package fs

import (
	"errors"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// maxCopy bounds one COPY_FILE_RANGE, in bytes: the program asks again.
const maxCopy = 256 << 20

// openFile is one open file description.
type openFile struct {
	file  File
	ino   ids.Ino
	touch bool        // reads set the access time
	read  atomic.Bool // it has been set for this handle (relatime)
}

// Open opens a file that exists.
func (f *FS) Open(cancel <-chan struct{}, in *fuseconn.OpenIn, out *fuseconn.OpenOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	ino := ids.Ino(in.NodeId)
	h, info, err := f.cfg.Engine.Open(o, ino, openFlags(in.Flags))
	if err == nil && in.Flags&syscall.O_TRUNC != 0 {
		info.Attr, err = f.truncateAtOpen(o, h, ino, in.Mode)
		info.KeepCache = false
	}
	if err != nil {
		return f.inodeStatus("open", in.NodeId, err)
	}
	f.nodes.see(&info.Attr, false)
	f.opened(out, h, &info.Attr, in.Flags, info.KeepCache)
	return fuseconn.OK
}

// opened gives an open file its handle.
func (f *FS) opened(out *fuseconn.OpenOut, h File, a *api.Attr, flags uint32, keep bool) {
	of := &openFile{file: h, ino: a.Ino}
	of.touch = flags&syscall.O_NOATIME == 0 && f.wantsAtime(a)
	out.Fh = f.files.add(of)
	out.OpenFlags = f.openMode(flags, a.Size, keep)
}

// directFrom is the size from which a file is read past the page cache when
// nothing else was asked for, in bytes. See docs/performance.md.
const directFrom = 4 << 20

// openMode chooses how the kernel does I/O on one open file. Direct I/O brings
// requests of up to 1 MiB at any offset straight to the daemon, which writes
// need for speed and O_DIRECT for its meaning; maps of such files still go
// through pages. Readers of small files use the page cache, so that they are
// read again without the daemon; a large one, a shard of a checkpoint, is read
// once and in large pieces, and would be copied twice, into fresh pages. Pages
// of another version of the file are dropped by not returning OpenKeepCache.
func (f *FS) openMode(flags uint32, size uint64, keep bool) uint32 {
	var mode uint32
	writer := flags&accessMode != syscall.O_RDONLY
	large := f.cfg.ReadMode == ReadAuto && size >= directFrom
	if writer || flags&openDirect != 0 || f.cfg.ReadMode == ReadDirect || large {
		mode |= fuseconn.OpenDirectIO
	}
	if keep {
		mode |= fuseconn.OpenKeepCache
	}
	return mode
}

func badHandle() fuseconn.Status { return fuseconn.Status(syscall.EBADF) }

// Read answers with memory of the engine, or reads into the reply's own buffer.
func (f *FS) Read(cancel <-chan struct{}, in *fuseconn.ReadIn, buf []byte) (fuseconn.ReadResult, fuseconn.Status) {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return nil, badHandle()
	}
	o := f.begin(cancel)
	defer o.end()
	v := new(file.View)
	n, err := h.file.ReadView(o, buf[:min(len(buf), int(in.Size))], int64(in.Offset), v)
	if err != nil && n == 0 {
		return nil, f.inodeStatus("read", in.NodeId, err)
	}
	if h.touch {
		f.touchFile(h)
	}
	if v.Parts != nil {
		return fuseconn.Parts(v.Parts, n, v.Release), fuseconn.OK
	}
	return fuseconn.Bytes(buf[:n]), fuseconn.OK
}

// Writev is not implemented: data that comes from the device is in one piece.
func (f *FS) Writev(<-chan struct{}, *fuseconn.WriteIn, [][]byte) (uint32, fuseconn.Status) {
	return 0, fuseconn.Status(syscall.ENOSYS)
}

// Write hands the bytes to the engine, which copies them.
func (f *FS) Write(cancel <-chan struct{}, in *fuseconn.WriteIn, data []byte) (uint32, fuseconn.Status) {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return 0, badHandle()
	}
	if in.Offset > api.MaxFileSize || uint64(len(data)) > api.MaxFileSize-in.Offset {
		return 0, fuseconn.Status(syscall.EFBIG)
	}
	o := f.begin(cancel)
	defer o.end()
	paged := in.WriteFlags&fuseconn.WriteCache != 0
	fl := file.WriteFlags{
		// The flags of a page that is written back are not those of its writer.
		Append:    !paged && in.Flags&syscall.O_APPEND != 0,
		KillPriv:  in.WriteFlags&fuseconn.WriteKillPriv != 0,
		Writeback: paged,
	}
	if f.nodes.bits(h.ino)&nodeCaps != 0 {
		if err := f.dropPrivileges(o, h.ino, false); err != nil {
			return 0, f.inodeStatus("write", in.NodeId, err)
		}
	}
	n, err := h.file.WriteAt(o, data, int64(in.Offset), fl)
	if err == nil && !paged && in.Flags&syscall.O_DSYNC != 0 {
		if err = h.file.Sync(o); err != nil {
			n = 0
		}
	}
	if err != nil && n == 0 {
		return 0, f.inodeStatus("write", in.NodeId, err)
	}
	return uint32(n), fuseconn.OK
}

// Fsync makes everything written so far durable.
func (f *FS) Fsync(cancel <-chan struct{}, in *fuseconn.FsyncIn) fuseconn.Status {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return badHandle()
	}
	o := f.begin(cancel)
	defer o.end()
	err := h.file.Sync(o)
	f.sendAtime(o, h.ino)
	return f.inodeStatus("fsync", in.NodeId, err)
}

// Flush is a close(2) of one of the handle's descriptors. Locks of the closing
// process go after its bytes are safe, so that who gets the lock sees them.
func (f *FS) Flush(cancel <-chan struct{}, in *fuseconn.FlushIn) fuseconn.Status {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return badHandle()
	}
	o := f.begin(cancel)
	defer o.end()
	err := h.file.Flush(o)
	f.sendAtime(o, h.ino)
	key := lockKey{api.LockPOSIX, in.LockOwner}
	if !f.locks.take(h.ino, key) {
		return f.inodeStatus("flush", in.NodeId, err)
	}
	if errors.Is(err, errkind.Interrupted) {
		f.inBackground(func(o *op) {
			// The error stays with the inode; here only the order counts.
			_ = h.file.Flush(o)
			f.unlock(o, h.ino, key)
		})
	} else {
		f.unlock(o, h.ino, key)
	}
	return f.inodeStatus("flush", in.NodeId, err)
}

// inBackground runs fn as work that no caller waits for; closing does.
func (f *FS) inBackground(fn func(o *op)) {
	f.tasks.Go(func() {
		o := f.background()
		defer o.end()
		fn(o)
	})
}

// Release ends an open file description. Nobody waits for it.
func (f *FS) Release(_ <-chan struct{}, in *fuseconn.ReleaseIn) {
	h, ok := f.files.take(in.Fh)
	if !ok {
		return
	}
	o := f.background() // the kernel's interrupt of a release means nothing
	defer o.end()
	if keys := f.locks.takeHandle(h.ino, in.Fh); len(keys) > 0 {
		if err := h.file.Flush(o); err != nil {
			f.inodeStatus("release", in.NodeId, err)
		}
		for _, k := range keys {
			f.unlock(o, h.ino, k)
		}
	}
	f.sendAtime(o, h.ino)
	h.file.Release()
}

// Lseek finds data and holes; the kernel does the rest of lseek(2) itself.
func (f *FS) Lseek(cancel <-chan struct{}, in *fuseconn.LseekIn, out *fuseconn.LseekOut) fuseconn.Status {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return badHandle()
	}
	var w file.Whence
	switch in.Whence {
	case unix.SEEK_DATA:
		w = file.SeekData
	case unix.SEEK_HOLE:
		w = file.SeekHole
	default:
		return fuseconn.Status(syscall.EINVAL)
	}
	if in.Offset > api.MaxFileSize {
		return fuseconn.Status(syscall.ENXIO)
	}
	o := f.begin(cancel)
	defer o.end()
	off, err := h.file.Seek(o, int64(in.Offset), w)
	out.Offset = uint64(off)
	return f.inodeStatus("lseek", in.NodeId, err)
}

// allocModes are the modes of fallocate(2) that are known.
var allocModes = map[uint32]file.AllocMode{
	0:                         file.AllocExtend,
	unix.FALLOC_FL_KEEP_SIZE:  file.AllocKeep,
	unix.FALLOC_FL_ZERO_RANGE: file.AllocZero,
	unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE: file.AllocPunch,
	unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE: file.AllocZeroKeep,
}

// Fallocate changes a range of a file. It reserves no space.
func (f *FS) Fallocate(cancel <-chan struct{}, in *fuseconn.FallocateIn) fuseconn.Status {
	h, ok := f.files.get(in.Fh)
	if !ok {
		return badHandle()
	}
	mode, ok := allocModes[in.Mode]
	if !ok {
		return fuseconn.Status(syscall.EOPNOTSUPP)
	}
	if in.Length == 0 || in.Offset > api.MaxFileSize {
		return fuseconn.Status(syscall.EINVAL)
	}
	if in.Length > api.MaxFileSize-in.Offset {
		return fuseconn.Status(syscall.EFBIG)
	}
	o := f.begin(cancel)
	defer o.end()
	// The request has no flag for it; without CAP_FSETID the bits must go.
	err := f.dropPrivileges(o, h.ino, in.Uid != 0)
	if err == nil {
		err = h.file.Allocate(o, mode, int64(in.Offset), int64(in.Length))
	}
	return f.inodeStatus("fallocate", in.NodeId, err)
}

// CopyFileRange copies without the bytes passing through the kernel.
func (f *FS) CopyFileRange(cancel <-chan struct{}, in *fuseconn.CopyFileRangeIn) (uint32, fuseconn.Status) {
	src, ok := f.files.get(in.FhIn)
	dst, ok2 := f.files.get(in.FhOut)
	if !ok || !ok2 {
		return 0, badHandle()
	}
	if in.Flags != 0 || in.OffIn > api.MaxFileSize || in.OffOut > api.MaxFileSize {
		return 0, fuseconn.Status(syscall.EINVAL)
	}
	n := min(in.Len, maxCopy, api.MaxFileSize-in.OffIn, api.MaxFileSize-in.OffOut)
	o := f.begin(cancel)
	defer o.end()
	var done int64
	err := f.dropPrivileges(o, dst.ino, in.Uid != 0)
	if err == nil {
		done, err = f.cfg.Engine.CopyRange(o, dst.file, int64(in.OffOut), src.file, int64(in.OffIn), int64(n))
	}
	if err != nil && done == 0 {
		return 0, f.inodeStatus("copy_file_range", in.NodeId, err)
	}
	return uint32(done), fuseconn.OK
}

// Ioctl knows no request, and hands none on.
func (f *FS) Ioctl(<-chan struct{}, *fuseconn.IoctlIn, []byte, *fuseconn.IoctlOut, []byte) fuseconn.Status {
	return fuseconn.Status(syscall.ENOTTY)
}
