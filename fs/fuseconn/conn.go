package fuseconn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Conn is a mounted file system and the device behind it. Its methods may be
// called from any goroutine.
type Conn struct {
	dir    string
	id     int
	server *fuse.Server
	o      Options
	done   chan struct{}
}

// Mount mounts fs on dir and serves it. It first takes away what a dead daemon
// left there. It returns when the mount answers, which takes an answer of fs
// about the root; ctx bounds that. Kinds: NotFound and NotDir for a bad mount
// point, Busy when a live daemon has it, Perm when the caller may not mount.
func Mount(ctx context.Context, dir string, fs RawFileSystem, o Options) (*Conn, error) {
	o = o.withDefaults()
	dir, err := resolve(dir)
	if err != nil {
		return nil, err
	}
	if err := clearStale(ctx, dir, &o); err != nil {
		return nil, err
	}
	st, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("mount point %s: %w", dir, err)
	}
	if !st.IsDir() {
		return nil, errkind.NotDir.Wrap("mount point %s is not a directory", dir)
	}
	if err := raisePages(wantPages); err != nil {
		o.Log.Info("large requests stay smaller", "err", err)
	}
	c := &Conn{dir: dir, o: o, done: make(chan struct{})}
	if err := c.mount(fs); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.done)
		c.server.Serve()
	}()
	if err := c.ready(ctx); err != nil {
		c.giveUp()
		return nil, fmt.Errorf("mount %s: %w", dir, err)
	}
	c.tune()
	return c, nil
}

// mount opens the device, calls mount(2) and lets the library greet the kernel.
func (c *Conn) mount(fs RawFileSystem) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/fuse: %w; is the fuse module loaded?", err)
	}
	err = unix.Mount(c.o.Source, c.dir, "fuse."+c.o.Subtype, c.o.flags(), c.o.data(fd, unix.S_IFDIR))
	if err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EPERM) {
			return errkind.Perm.Wrap("mount on %s: mounting needs root (CAP_SYS_ADMIN)", c.dir)
		}
		return fmt.Errorf("mount on %s: %w", c.dir, err)
	}
	// The library closes fd when it ends; from here on it is the library's.
	c.server, err = fuse.NewServer(fs, fmt.Sprintf("/dev/fd/%d", fd), c.o.library())
	if err != nil {
		c.detach()
		return fmt.Errorf("greet the kernel for %s: %w", c.dir, err)
	}
	m, found, err := topMount(c.dir)
	if err == nil && !found {
		err = errkind.Internal.Wrap("the mount is not listed")
	}
	if err == nil {
		c.id, err = m.conn()
	}
	if err != nil {
		c.detach()
		return fmt.Errorf("find the mount on %s: %w", c.dir, err)
	}
	return nil
}

// ready makes the kernel ask once whether files can be polled, before the Go
// runtime does so on behalf of somebody who opens a file of this mount in this
// process: there it would block the thread that must answer. It also shows that
// the root answers.
func (c *Conn) ready(ctx context.Context) error {
	result := make(chan error, 1)
	go func() {
		fd, err := unix.Open(filepath.Join(c.dir, ".go-fuse-epoll-hack"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			unix.Close(fd)
		}
		result <- err
	}()
	select {
	case err := <-result:
		if err != nil {
			return fmt.Errorf("the root does not answer: %w", err)
		}
		return nil
	case <-ctx.Done():
		return errkind.Timeout.Wrap("the root did not answer: %v", ctx.Err())
	}
}

func (c *Conn) tune() {
	offered := c.server.KernelSettings().Flags64()
	if names := missing(offered); len(names) > 0 {
		c.o.Log.Warn("the kernel lacks FUSE features", "missing", names)
	}
	m, found, err := topMount(c.dir)
	if err == nil && found {
		err = setReadAhead(m.dev, c.o.ReadAhead)
	}
	if err != nil {
		c.o.Log.Info("kernel read-ahead stays small", "err", err)
	}
}

// Dir is the resolved mount point.
func (c *Conn) Dir() string { return c.dir }

// ID is the number of the FUSE connection, as /sys/fs/fuse/connections has it.
func (c *Conn) ID() int { return c.id }

// Unmount takes the mount away; kind Busy when files on it are in use. Wait
// tells when the last request has been answered.
func (c *Conn) Unmount() error {
	if c.ended() {
		return nil
	}
	err := unix.Unmount(c.dir, 0)
	switch {
	case err == nil, errors.Is(err, unix.EINVAL): // EINVAL: somebody else unmounted it
		return nil
	case errors.Is(err, unix.EBUSY):
		return errkind.Busy.Wrap("unmount %s: files on it are in use (`fuser -vm %s` lists them)", c.dir, c.dir)
	default:
		return fmt.Errorf("unmount %s: %w", c.dir, err)
	}
}

// UnmountLazy takes the mount out of the tree; it ends when its last file is closed.
func (c *Conn) UnmountLazy() error {
	if c.ended() {
		return nil
	}
	if err := unix.Unmount(c.dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s lazily: %w", c.dir, err)
	}
	return nil
}

// Abort ends the connection: callers that wait get ENOTCONN. Once the file
// system has ended it does nothing: the number may be another mount's by then.
func (c *Conn) Abort() error {
	if c.ended() {
		return nil
	}
	return Abort(c.id)
}

// ended reports whether the mount is gone: then its path, and its number, may
// be another's.
func (c *Conn) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// Done is closed when the file system has answered its last request.
func (c *Conn) Done() <-chan struct{} { return c.done }

func (c *Conn) detach() {
	if err := c.UnmountLazy(); err != nil {
		c.o.Log.Warn("mount left behind", "err", err)
	}
}

func (c *Conn) giveUp() {
	if err := c.Abort(); err != nil {
		c.o.Log.Warn("connection left behind", "err", err)
	}
	c.detach()
	<-c.done
}

// InvalAttr makes the kernel forget an inode's attributes. It takes no lock in
// the kernel and may be called anywhere. An inode that the kernel does not
// know is no error.
func (c *Conn) InvalAttr(ino uint64) error { return c.notify(ino, -1, 0) }

// InvalData makes the kernel drop an inode's pages in [off, off+n); n = 0 means
// to the end. It waits for reads of these pages that are under way, so it must
// only be called from a task whose end nothing waits for.
func (c *Conn) InvalData(ino uint64, off, n int64) error { return c.notify(ino, off, n) }

func (c *Conn) notify(ino uint64, off, n int64) error {
	switch st := c.server.InodeNotify(ino, off, n); st {
	case fuse.OK, fuse.ENOENT:
		return nil
	default:
		return fmt.Errorf("invalidate inode %d: %w", ino, unix.Errno(st))
	}
}
