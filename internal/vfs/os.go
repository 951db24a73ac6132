package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OS is the directory tree below a root directory of the machine.
type OS struct{ root string }

// NewOS returns the tree below root, which must be an existing directory.
func NewOS(root string) (*OS, error) {
	st, err := os.Stat(root)
	if err != nil {
		return nil, fmt.Errorf("open directory: %w", err)
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("open directory %s: %w", root, unix.ENOTDIR)
	}
	return &OS{root: root}, nil
}

// Root returns the directory that the tree's names are relative to.
func (o *OS) Root() string { return o.root }

func (o *OS) path(name string) string { return filepath.Join(o.root, filepath.FromSlash(name)) }

// Create makes a new file.
func (o *OS) Create(name string) (File, error) {
	f, err := os.OpenFile(o.path(name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return &osFile{f: f}, nil
}

// Open opens an existing file; for reading alone when the file system is read-only.
func (o *OS) Open(name string) (File, error) {
	f, err := os.OpenFile(o.path(name), os.O_RDWR, 0)
	if errors.Is(err, unix.EROFS) {
		f, err = os.Open(o.path(name))
	}
	if err != nil {
		return nil, err
	}
	return &osFile{f: f}, nil
}

// Remove removes a file or an empty directory.
func (o *OS) Remove(name string) error { return os.Remove(o.path(name)) }

// Rename moves a file, replacing what is at the new name.
func (o *OS) Rename(from, to string) error { return os.Rename(o.path(from), o.path(to)) }

// MkdirAll makes a directory and its parents.
func (o *OS) MkdirAll(dir string) error { return os.MkdirAll(o.path(dir), 0o700) }

// List returns the names in dir in ascending order.
func (o *OS) List(dir string) ([]string, error) {
	ents, err := os.ReadDir(o.path(dir))
	if err != nil {
		return nil, err
	}
	names := make([]string, len(ents))
	for i, e := range ents {
		names[i] = e.Name()
	}
	return names, nil
}

// SyncDir makes the names in dir durable.
func (o *OS) SyncDir(dir string) error {
	d, err := os.Open(o.path(dir))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Space returns the file system's size and what an unprivileged user may still
// write, in bytes.
func (o *OS) Space() (size, free uint64, err error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(o.root, &st) }); err != nil {
		return 0, 0, fmt.Errorf("statfs %s: %w", o.root, err)
	}
	return st.Blocks * uint64(st.Bsize), st.Bavail * uint64(st.Bsize), nil
}

// Lock takes the tree for this process alone until the Closer is closed; it
// fails at once with EWOULDBLOCK when another holds it. It needs no write
// access, so it works on a read-only disk.
func (o *OS) Lock() (io.Closer, error) {
	d, err := os.Open(o.root)
	if err != nil {
		return nil, err
	}
	if err := retry(func() error { return unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		d.Close()
		return nil, fmt.Errorf("lock %s: %w", o.root, err)
	}
	return d, nil
}

// Limits of WriteDirect.
const (
	directAlign  = 4096    // of address, offset and length
	bounceBuffer = 1 << 20 // bytes that are copied at a time when the address is not aligned
)

// osFile has a second descriptor with O_DIRECT once somebody wants it.
type osFile struct {
	f      *os.File
	direct sync.Once
	d      *os.File // nil where O_DIRECT does not work
}

var bounce = sync.Pool{New: func() any {
	p := alignedBuffer(bounceBuffer)
	return &p
}}

// alignedBuffer returns n bytes that start at a multiple of directAlign.
func alignedBuffer(n int) []byte {
	p := make([]byte, n+directAlign)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(p))) % directAlign)
	return p[skip : skip+n : skip+n]
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error)  { return f.f.ReadAt(p, off) }
func (f *osFile) WriteAt(p []byte, off int64) (int, error) { return f.f.WriteAt(p, off) }
func (f *osFile) Truncate(size int64) error                { return f.f.Truncate(size) }

// WriteDirect writes past the page cache where that is possible: off and
// len(p) are multiples of 4096 and the file system knows O_DIRECT. Elsewhere it
// is WriteAt. It makes nothing durable. Its caller must not write the same
// pages in both ways at once.
func (f *osFile) WriteDirect(p []byte, off int64) (int, error) {
	if off%directAlign != 0 || len(p)%directAlign != 0 {
		return f.f.WriteAt(p, off)
	}
	f.direct.Do(func() {
		// By descriptor, since the name may mean another file by now.
		self := fmt.Sprintf("/proc/self/fd/%d", f.f.Fd())
		if d, err := os.OpenFile(self, os.O_RDWR|unix.O_DIRECT, 0); err == nil {
			f.d = d
		}
	})
	if f.d == nil {
		return f.f.WriteAt(p, off)
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(p)))%directAlign == 0 {
		return f.d.WriteAt(p, off)
	}
	buf, _ := bounce.Get().(*[]byte)
	defer bounce.Put(buf)
	var done int
	for done < len(p) {
		n, err := f.d.WriteAt((*buf)[:copy(*buf, p[done:])], off+int64(done))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// Close closes the file.
func (f *osFile) Close() error {
	f.direct.Do(func() {})
	if f.d != nil {
		f.d.Close()
	}
	return f.f.Close()
}

// OSFile gives the descriptor, for sendfile.
func (f *osFile) OSFile() *os.File { return f.f }

func (f *osFile) do(op string, call func(fd int) error) error {
	c, err := f.f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = c.Control(func(fd uintptr) {
		inner = retry(func() error { return call(int(fd)) })
	})
	if err == nil {
		err = inner
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: f.f.Name(), Err: err}
	}
	return nil
}

// Allocate reserves space. On a file system without fallocate it only grows
// the size, and the space is not guaranteed.
func (f *osFile) Allocate(off, n int64) error {
	err := f.do("fallocate", func(fd int) error { return unix.Fallocate(fd, 0, off, n) })
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	size, err := f.Size()
	if err != nil || size >= off+n {
		return err
	}
	return f.Truncate(off + n)
}

// Punch gives space back; where holes cannot be made, zeros are written.
func (f *osFile) Punch(off, n int64) error {
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	err := f.do("punch", func(fd int) error { return unix.Fallocate(fd, mode, off, n) })
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	size, err := f.Size()
	if err != nil {
		return err
	}
	zeros := make([]byte, min(n, 1<<20))
	for end := min(off+n, size); off < end; {
		w, err := f.WriteAt(zeros[:min(int64(len(zeros)), end-off)], off)
		if err != nil {
			return err
		}
		off += int64(w)
	}
	return nil
}

func (f *osFile) Sync() error { return f.do("fdatasync", unix.Fdatasync) }

func (f *osFile) Size() (int64, error) {
	st, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

func retry(call func() error) error {
	for {
		err := call()
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
