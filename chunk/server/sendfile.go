package server

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// warm reads a section into the page cache, so that the disk is waited for
// here, by a worker of the disk, and not by the connection's writer, behind
// whom the replies of other disks would wait too.
func warm(f *os.File, off int64, n int) {
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	// Errors are left to sendfile, which will meet them again.
	_ = rc.Control(func(fd uintptr) {
		_ = unix.Fadvise(int(fd), off, int64(n), unix.FADV_WILLNEED)
		var b [1]byte
		const step = 512 << 10 // the kernel may cap what one advice reads
		for at := off; at < off+int64(n); at += step {
			_, _ = unix.Pread(int(fd), b[:], at)
		}
		_, _ = unix.Pread(int(fd), b[:], off+int64(n)-1)
	})
}

// sendFile sends n bytes of f from off. When it returns some of them may still
// be on their way, as references to the page cache: if the chunk is deleted and
// its space written anew in that moment, the client receives other bytes. It
// finds them by their checksums; nothing refers to a deleted chunk any more.
func sendFile(dst syscall.RawConn, f *os.File, off int64, n int) error {
	src, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	ctl := src.Control(func(in uintptr) {
		err := dst.Write(func(out uintptr) bool {
			for n > 0 {
				m, err := unix.Sendfile(int(out), int(in), &off, n)
				switch {
				case err == nil && m == 0:
					failure = io.ErrUnexpectedEOF
					return true
				case err == nil:
					n -= m
				case errors.Is(err, unix.EAGAIN):
					return false
				case !errors.Is(err, unix.EINTR):
					failure = fmt.Errorf("sendfile: %w", err)
					return true
				}
			}
			return true
		})
		failure = errors.Join(failure, err)
	})
	return errors.Join(failure, ctl)
}

// sendMore sends p and tells the kernel that more follows at once, so that a
// header leaves in one packet with the start of its payload.
func sendMore(dst syscall.RawConn, p []byte) error {
	var failure error
	err := dst.Write(func(out uintptr) bool {
		for len(p) > 0 {
			m, err := unix.SendmsgN(int(out), p, nil, nil, unix.MSG_MORE|unix.MSG_NOSIGNAL)
			switch {
			case err == nil:
				p = p[m:]
			case errors.Is(err, unix.EAGAIN):
				return false
			case !errors.Is(err, unix.EINTR):
				failure = fmt.Errorf("sendmsg: %w", err)
				return true
			}
		}
		return true
	})
	return errors.Join(failure, err)
}
