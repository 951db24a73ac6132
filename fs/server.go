package fs

import (
	"context"
	"errors"
	"sync"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Server is a mounted file system.
type Server struct {
	f    *FS
	conn *fuseconn.Conn
	done chan struct{}
	err  error // of closing; set before done is closed
}

// Mount mounts f on dir and serves it until it is unmounted, by Unmount or by
// anyone else; f can be mounted once. The server closes the engine then. For
// errors see fuseconn.Mount. ctx bounds only the mounting.
func Mount(ctx context.Context, dir string, f *FS, o fuseconn.Options) (*Server, error) {
	if o.Log == nil {
		o.Log = f.cfg.Log
	}
	o.Atime, o.NoDirAtime = f.cfg.Atime, f.cfg.NoDirAtime
	conn, err := fuseconn.Mount(ctx, dir, f, o)
	if err != nil {
		return nil, err
	}
	s := &Server{f: f, conn: conn, done: make(chan struct{})}
	f.tasks.Go(func() { f.inval.run(f, conn) })
	go s.finish()
	return s, nil
}

// finish commits everything once the kernel asks no more.
func (s *Server) finish() {
	defer close(s.done)
	<-s.conn.Done()
	s.f.inval.shut()
	s.f.dirOpens.shut()
	s.f.tasks.Wait()
	o := s.f.background()
	defer o.end()
	s.err = s.f.cfg.Engine.Close(o)
	if s.err != nil {
		s.f.cfg.Log.Error("not everything that was written could be stored", "mount", s.conn.Dir(), "err", s.err)
	}
}

// Dir is the mount point, free of symbolic links.
func (s *Server) Dir() string { return s.conn.Dir() }

// Conn is the connection to the kernel, for its abort.
func (s *Server) Conn() *fuseconn.Conn { return s.conn }

// Done is closed when the file system is unmounted and everything is committed.
func (s *Server) Done() <-chan struct{} { return s.done }

// Wait waits for Done and returns the first error of what was committed last.
func (s *Server) Wait() error {
	<-s.done
	return s.err
}

// Unmount unmounts and returns when everything is committed. Kind Busy when
// files are in use: nothing has changed then. When ctx ends first, the rest
// goes on.
func (s *Server) Unmount(ctx context.Context) error {
	if err := s.conn.Unmount(); err != nil {
		return err
	}
	select {
	case <-s.done:
		return s.err
	case <-ctx.Done():
		return errkind.Timeout.Wrap("unmount %s: what was written is still being committed: %v", s.conn.Dir(), ctx.Err())
	}
}

// Kill takes the mount away whatever happens: out of the tree, and every
// request on it fails. What was not committed yet still is.
func (s *Server) Kill() error {
	aborted := s.conn.Abort()
	return errors.Join(aborted, s.conn.UnmountLazy(), s.Wait())
}

// OpenInos lists the directories that are open, in no order: with those of the
// engine, what a Renew with Full must tell.
func (f *FS) OpenInos() []ids.Ino { return f.dirOpens.list() }

// Invalidate makes the kernel drop the pages that it holds of a file from off
// on, some time later. It never waits, so it may be the engine's Invalidate.
func (f *FS) Invalidate(ino ids.Ino, off uint64, err error) {
	if err != nil {
		f.status("write behind", uint64(ino), err)
	}
	f.inval.add(ino, off)
}

// invalidations are pages to drop, at most one entry a file. The kernel may
// wait for a read that is under way, so one task does it that nobody waits for
// but the end of the mount, when no read is under way any more.
type invalidations struct {
	wake chan struct{}
	mu   struct {
		sync.Mutex
		all    shrinkMap[ids.Ino, uint64]
		closed bool
	}
}

func (v *invalidations) init() { v.wake = make(chan struct{}, 1) }

func (v *invalidations) add(ino ids.Ino, off uint64) {
	v.mu.Lock()
	if old, ok := v.mu.all.m[ino]; ok {
		off = min(off, old)
	}
	v.mu.all.set(ino, off)
	v.mu.Unlock()
	v.poke()
}

func (v *invalidations) poke() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

func (v *invalidations) shut() {
	v.mu.Lock()
	v.mu.closed = true
	v.mu.Unlock()
	v.poke()
}

// next returns one entry; more is false when there is none.
func (v *invalidations) next() (ino ids.Ino, off uint64, more, closed bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for ino, off := range v.mu.all.m {
		v.mu.all.remove(ino)
		return ino, off, true, v.mu.closed
	}
	return 0, 0, false, v.mu.closed
}

func (v *invalidations) run(f *FS, conn *fuseconn.Conn) {
	for range v.wake {
		for {
			ino, off, more, closed := v.next()
			if closed {
				return
			}
			if !more {
				break
			}
			if err := conn.InvalData(uint64(ino), int64(off), 0); err != nil {
				f.status("invalidate pages", uint64(ino), err)
			}
		}
	}
}
