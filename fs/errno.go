package fs

import (
	"context"
	"errors"
	"syscall"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// errnos is the only place where kinds of error become errno.
var errnos = map[errkind.Kind]syscall.Errno{
	errkind.OK:           0,
	errkind.Internal:     syscall.EIO,
	errkind.NotFound:     syscall.ENOENT,
	errkind.Exists:       syscall.EEXIST,
	errkind.NotDir:       syscall.ENOTDIR,
	errkind.IsDir:        syscall.EISDIR,
	errkind.NotEmpty:     syscall.ENOTEMPTY,
	errkind.NameTooLong:  syscall.ENAMETOOLONG,
	errkind.Invalid:      syscall.EINVAL,
	errkind.Perm:         syscall.EPERM,
	errkind.Access:       syscall.EACCES,
	errkind.NoSpace:      syscall.ENOSPC,
	errkind.Quota:        syscall.EDQUOT,
	errkind.Stale:        syscall.ESTALE,
	errkind.Fenced:       syscall.EIO,
	errkind.Busy:         syscall.EBUSY,
	errkind.Loop:         syscall.EINVAL, // rename of a directory below itself
	errkind.CrossDevice:  syscall.EXDEV,
	errkind.TooManyLinks: syscall.EMLINK,
	errkind.NoAttr:       syscall.ENODATA,
	errkind.Range:        syscall.ERANGE,
	errkind.TooBig:       syscall.EFBIG,
	errkind.NotLeader:    syscall.EIO,
	errkind.Unavailable:  syscall.EIO,
	errkind.Corrupt:      syscall.EIO,
	errkind.Split:        syscall.EIO,
	errkind.Changed:      syscall.EIO,
	errkind.Version:      syscall.EPROTO,
	errkind.WrongCluster: syscall.EIO,
	errkind.Unsupported:  syscall.EOPNOTSUPP,
	errkind.Interrupted:  syscall.EINTR,
	errkind.Timeout:      syscall.ETIMEDOUT,
	errkind.WouldBlock:   syscall.EAGAIN,
	errkind.Deadlock:     syscall.EDEADLK,
	errkind.ReadOnly:     syscall.EROFS,
	errkind.NoChunk:      syscall.EIO,
	errkind.Conflict:     syscall.EIO,
	errkind.NoData:       syscall.ENXIO,
	errkind.Expired:      syscall.EIO,
}

// errnoOf maps an error to errno.
func errnoOf(err error) syscall.Errno {
	var kind errkind.Kind
	var raw syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &kind):
		if no, ok := errnos[kind]; ok {
			return no
		}
		return syscall.EIO
	case errors.Is(err, context.Canceled):
		return syscall.EINTR
	case errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	case errors.As(err, &raw):
		return raw
	}
	return syscall.EIO
}

// unexpected are the errno that say that the store, not the caller, is at fault.
func unexpected(no syscall.Errno) bool {
	switch no {
	case syscall.EIO, syscall.ETIMEDOUT, syscall.EPROTO, syscall.ESTALE, syscall.EROFS:
		return true
	}
	return false
}

// status is the answer for err to an operation on ino.
func (f *FS) status(op string, ino uint64, err error) fuseconn.Status {
	if err == nil {
		return fuseconn.OK
	}
	no := errnoOf(err)
	if unexpected(no) && f.complain.Allow() {
		f.cfg.Log.Warn("operation failed", "op", op, "ino", ids.Ino(ino), "errno", no.Error(), "err", err)
	}
	return fuseconn.Status(no)
}

// inodeStatus is status for operations that name only an inode: there a missing
// one means that it is gone.
func (f *FS) inodeStatus(op string, ino uint64, err error) fuseconn.Status {
	if errors.Is(err, errkind.NotFound) {
		return fuseconn.Status(syscall.ESTALE)
	}
	return f.status(op, ino, err)
}
