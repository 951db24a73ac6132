package vfs

import (
	"io"
	"io/fs"
	"math/bits"
	"sync/atomic"
	"syscall"
)

type page [PageSize]byte

// inode is one file of a Mem, guarded by the Mem's lock. A page that is equal
// in cur and durable is shared between them, and copied when it is written.
type inode struct {
	cur, durable map[int64]*page
	// dirty pages are lost or kept in a crash, whichever the crash chooses.
	dirty       map[int64]struct{}
	size        int64
	durableSize int64
	sizeDirty   bool
	alloc       []uint64 // bit per page: space is held
	links       int
	opens       int
	released    bool // neither name nor handle: its space has been returned
}

func (n *inode) has(p int64) bool {
	return p>>6 < int64(len(n.alloc)) && n.alloc[p>>6]>>(p&63)&1 == 1
}

func (n *inode) hold(p int64, on bool) {
	for int64(len(n.alloc)) <= p>>6 {
		n.alloc = append(n.alloc, 0)
	}
	if on {
		n.alloc[p>>6] |= 1 << (p & 63)
	} else {
		n.alloc[p>>6] &^= 1 << (p & 63)
	}
}

// held counts the pages that have space.
func (n *inode) held() int64 {
	var sum int64
	for _, w := range n.alloc {
		sum += int64(bits.OnesCount64(w))
	}
	return sum
}

func (n *inode) missing(lo, hi int64) int64 {
	var sum int64
	for p := lo; p < hi; p++ {
		if !n.has(p) {
			sum++
		}
	}
	return sum
}

// writable returns page p of cur, unshared from the durable state.
func (n *inode) writable(p int64) *page {
	cur := n.cur[p]
	switch cur {
	case nil:
		cur = new(page)
	case n.durable[p]:
		c := *cur
		cur = &c
	}
	n.cur[p] = cur
	n.dirty[p] = struct{}{}
	return cur
}

func (n *inode) setSize(size int64) {
	if n.size != size {
		n.size, n.sizeDirty = size, true
	}
}

type memFile struct {
	fs     *Mem
	name   string
	ino    *inode
	life   int
	closed atomic.Bool
}

// enter locks the file system for an operation on the file.
func (f *memFile) enter(c Call, writes bool) error {
	c.Name = f.name
	if err := f.fs.before(c, writes); err != nil {
		return err
	}
	f.fs.mu.Lock()
	if f.closed.Load() || f.life != f.fs.mu.life {
		f.fs.mu.Unlock()
		return pathErr(string(c.Op), f.name, fs.ErrClosed)
	}
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, pathErr("read", f.name, syscall.EINVAL)
	}
	if err := f.enter(Call{Op: OpRead, Off: off, Len: int64(len(p))}, false); err != nil {
		return 0, err
	}
	defer f.fs.mu.Unlock()
	var n int
	for n < len(p) && off < f.ino.size {
		at := off % PageSize
		want := min(PageSize-at, int64(len(p)-n), f.ino.size-off)
		if pg := f.ino.cur[off/PageSize]; pg != nil {
			copy(p[n:n+int(want)], pg[at:])
		} else {
			clear(p[n : n+int(want)])
		}
		n += int(want)
		off += want
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, pathErr("write", f.name, syscall.EINVAL)
	}
	if err := f.enter(Call{Op: OpWrite, Off: off, Len: int64(len(p))}, true); err != nil {
		return 0, err
	}
	defer f.fs.mu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	end := off + int64(len(p))
	lo, hi := off/PageSize, (end+PageSize-1)/PageSize
	if err := f.fs.take(f.ino.missing(lo, hi)); err != nil {
		return 0, pathErr("write", f.name, err)
	}
	for i := lo; i < hi; i++ {
		f.ino.hold(i, true)
		start := max(off, i*PageSize)
		copy(f.ino.writable(i)[start-i*PageSize:], p[start-off:])
	}
	f.ino.setSize(max(f.ino.size, end))
	return len(p), nil
}

func (f *memFile) Close() error {
	if f.closed.Swap(true) {
		return pathErr("close", f.name, fs.ErrClosed)
	}
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if f.life == f.fs.mu.life {
		f.ino.opens--
		f.fs.reap(f.ino)
	}
	return nil
}

func (f *memFile) Allocate(off, n int64) error {
	if off < 0 || n <= 0 {
		return pathErr("allocate", f.name, syscall.EINVAL)
	}
	if err := f.enter(Call{Op: OpAllocate, Off: off, Len: n}, true); err != nil {
		return err
	}
	defer f.fs.mu.Unlock()
	lo, hi := off/PageSize, (off+n+PageSize-1)/PageSize
	if err := f.fs.take(f.ino.missing(lo, hi)); err != nil {
		return pathErr("allocate", f.name, err)
	}
	for i := lo; i < hi; i++ {
		f.ino.hold(i, true)
	}
	f.ino.setSize(max(f.ino.size, off+n))
	return nil
}

func (f *memFile) Punch(off, n int64) error {
	if off < 0 || n <= 0 {
		return pathErr("punch", f.name, syscall.EINVAL)
	}
	if err := f.enter(Call{Op: OpPunch, Off: off, Len: n}, true); err != nil {
		return err
	}
	defer f.fs.mu.Unlock()
	f.ino.zero(off, min(off+n, f.ino.size))
	for i := (off + PageSize - 1) / PageSize; i < (off+n)/PageSize; i++ {
		f.fs.drop(f.ino, i)
	}
	return nil
}

// zero clears [off, end) of the pages that hold something.
func (n *inode) zero(off, end int64) {
	for i := off / PageSize; off < end && i*PageSize < end; i++ {
		if n.cur[i] == nil {
			continue
		}
		lo, hi := max(off-i*PageSize, 0), min(end-i*PageSize, PageSize)
		clear(n.writable(i)[lo:hi])
	}
}

// drop takes the page out of the file and returns its space.
func (m *Mem) drop(n *inode, p int64) {
	if n.cur[p] != nil {
		delete(n.cur, p)
		n.dirty[p] = struct{}{}
	}
	if n.has(p) {
		n.hold(p, false)
		m.mu.used -= PageSize
	}
}

func (f *memFile) Truncate(size int64) error {
	if size < 0 {
		return pathErr("truncate", f.name, syscall.EINVAL)
	}
	if err := f.enter(Call{Op: OpTruncate, Off: size}, true); err != nil {
		return err
	}
	defer f.fs.mu.Unlock()
	f.ino.zero(size, f.ino.size)
	for i := (size + PageSize - 1) / PageSize; i < int64(len(f.ino.alloc))*64; i++ {
		f.fs.drop(f.ino, i)
	}
	f.ino.setSize(size)
	return nil
}

func (f *memFile) Sync() error {
	hookErr := f.enter(Call{Op: OpSync}, false)
	if hookErr != nil {
		f.fs.mu.Lock()
		defer f.fs.mu.Unlock()
		if f.life == f.fs.mu.life {
			// What could not be written counts as clean from now on.
			clear(f.ino.dirty)
			f.ino.sizeDirty = false
		}
		return hookErr
	}
	defer f.fs.mu.Unlock()
	for p := range f.ino.dirty {
		if cur := f.ino.cur[p]; cur != nil {
			f.ino.durable[p] = cur
		} else {
			delete(f.ino.durable, p)
		}
	}
	clear(f.ino.dirty)
	if f.ino.sizeDirty {
		f.ino.durableSize, f.ino.sizeDirty = f.ino.size, false
	}
	return nil
}

func (f *memFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return f.ino.size, nil
}
