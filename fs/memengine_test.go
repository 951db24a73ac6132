package fs

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const memPage = 4096

// memStore holds the bytes of all files, for several engines, by pages.
type memStore struct {
	mu    sync.Mutex
	files map[ids.Ino]map[int64][]byte
}

func newMemStore() *memStore { return &memStore{files: make(map[ids.Ino]map[int64][]byte)} }

// each calls fn for the part of each page in [off, off+n).
func (s *memStore) each(ino ids.Ino, off, n int64, create bool, fn func(page []byte, at int64)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[ino]
	if f == nil {
		f = make(map[int64][]byte)
		s.files[ino] = f
	}
	for at := int64(0); at < n; {
		k, in := (off+at)/memPage, (off+at)%memPage
		step := min(memPage-in, n-at)
		p := f[k]
		if p == nil && create {
			p = make([]byte, memPage)
			f[k] = p
		}
		if p != nil {
			fn(p[in:in+step], at)
		}
		at += step
	}
}

// cut drops what lies in [off, end), whole pages and the rest as zeros.
func (s *memStore) cut(ino ids.Ino, off, end int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, p := range s.files[ino] {
		lo, hi := max(off, k*memPage), min(end, (k+1)*memPage)
		switch {
		case lo >= hi:
		case hi-lo == memPage:
			delete(s.files[ino], k)
		default:
			clear(p[lo-k*memPage : hi-k*memPage])
		}
	}
}

// change is what an inode has that is not committed.
type change struct {
	size  int64
	mtime int64
	kill  bool
}

// memEngine is an engine that stores bytes at once and commits sizes and times
// when it is told to, so that the overlay matters.
type memEngine struct {
	store *memStore
	meta  Meta
	mu    sync.Mutex
	dirty map[ids.Ino]*change
	opens map[ids.Ino]int
	// version is the content version that the kernel's pages belong to.
	version map[ids.Ino]uint64
	// write, when set, decides on each write first.
	write atomic.Pointer[func() error]
}

func newMemEngine(store *memStore, m Meta) *memEngine {
	return &memEngine{store: store, meta: m, dirty: make(map[ids.Ino]*change), opens: make(map[ids.Ino]int), version: make(map[ids.Ino]uint64)}
}

func (e *memEngine) Open(ctx context.Context, ino ids.Ino, _ file.OpenFlags) (File, Opened, error) {
	var r api.Opened
	if err := e.meta.Do(ctx, &api.Open{Ino: ino}, &r); err != nil {
		return nil, Opened{}, err
	}
	e.Overlay(&r.Attr)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opens[ino]++
	keep := e.version[ino] == r.Attr.Change
	e.version[ino] = r.Attr.Change
	return &memFile{e, ino}, Opened{Attr: r.Attr, KeepCache: keep}, nil
}

func (e *memEngine) OpenCreated(attr api.Attr, _ file.OpenFlags) File {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opens[attr.Ino]++
	return &memFile{e, attr.Ino}
}

func (e *memEngine) attr(ctx context.Context, ino ids.Ino) (api.Attr, error) {
	var r api.Entry
	err := e.meta.Do(ctx, &api.GetAttr{Ino: ino}, &r)
	e.Overlay(&r.Attr)
	return r.Attr, err
}

func (e *memEngine) Truncate(ctx context.Context, ino ids.Ino, size int64) (api.Attr, error) {
	if err := e.FlushIno(ctx, ino); err != nil {
		return api.Attr{}, err
	}
	e.store.cut(ino, size, api.MaxFileSize)
	var r api.Committed
	err := e.meta.Do(ctx, &api.Commit{Ino: ino, Ops: []api.Op{{Kind: api.OpTruncate, Off: uint64(size)}}, Mtime: time.Now().UnixNano()}, &r)
	return r.Attr, err
}

func (e *memEngine) CopyRange(ctx context.Context, dst File, dstOff int64, src File, srcOff, n int64) (int64, error) {
	p := make([]byte, min(n, 1<<20))
	got, err := src.ReadView(ctx, p, srcOff, &file.View{})
	if err != nil || got == 0 {
		return 0, err
	}
	put, err := dst.WriteAt(ctx, p[:got], dstOff, file.WriteFlags{})
	return int64(put), err
}

func (e *memEngine) FlushIno(ctx context.Context, ino ids.Ino) error {
	e.mu.Lock()
	c := e.dirty[ino]
	delete(e.dirty, ino)
	e.mu.Unlock()
	if c == nil {
		return nil
	}
	var r api.Entry
	if err := e.meta.Do(ctx, &api.GetAttr{Ino: ino}, &r); err != nil {
		return err
	}
	req := &api.Commit{Ino: ino, Mtime: c.mtime}
	req.Ops = append(req.Ops, api.Op{Kind: api.OpTruncate, Off: uint64(max(c.size, int64(r.Attr.Size)))})
	if c.kill {
		req.Ops = append(req.Ops, api.Op{Kind: api.OpKillPriv})
	}
	return e.meta.Do(ctx, req, &api.Committed{})
}

func (e *memEngine) Overlay(a *api.Attr) {
	e.mu.Lock()
	if c := e.dirty[a.Ino]; c != nil {
		a.Size = max(a.Size, uint64(c.size))
		a.Mtime = c.mtime
	}
	e.mu.Unlock()
	if a.IsRegular() {
		e.store.mu.Lock()
		a.Stored = uint64(len(e.store.files[a.Ino])) * memPage
		e.store.mu.Unlock()
	}
}

func (e *memEngine) DirtyInos() []ids.Ino {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []ids.Ino
	for ino := range e.dirty {
		all = append(all, ino)
	}
	slices.Sort(all)
	return all
}

func (e *memEngine) Close(ctx context.Context) error {
	for _, ino := range e.DirtyInos() {
		if err := e.FlushIno(ctx, ino); err != nil {
			return err
		}
	}
	return nil
}

// onWrite lets fn decide on every write.
func (e *memEngine) onWrite(fn func() error) { e.write.Store(&fn) }

// openCount is how many files are open.
func (e *memEngine) openCount() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, c := range e.opens {
		n += c
	}
	return n
}

type memFile struct {
	e   *memEngine
	ino ids.Ino
}

func (f *memFile) ReadView(ctx context.Context, p []byte, off int64, _ *file.View) (int, error) {
	a, err := f.e.attr(ctx, f.ino)
	if err != nil || off >= int64(a.Size) {
		return 0, err
	}
	n := min(int64(len(p)), int64(a.Size)-off)
	clear(p[:n])
	f.e.store.each(f.ino, off, n, false, func(page []byte, at int64) { copy(p[at:n], page) })
	return int(n), nil
}

func (f *memFile) WriteAt(ctx context.Context, p []byte, off int64, fl file.WriteFlags) (int, error) {
	if fn := f.e.write.Load(); fn != nil {
		if err := (*fn)(); err != nil {
			return 0, err
		}
	}
	a, err := f.e.attr(ctx, f.ino)
	if err != nil {
		return 0, err
	}
	if fl.Append {
		off = int64(a.Size)
	}
	f.e.store.each(f.ino, off, int64(len(p)), true, func(page []byte, at int64) { copy(page, p[at:]) })
	f.change(max(int64(a.Size), off+int64(len(p))), fl.KillPriv)
	return len(p), nil
}

func (f *memFile) change(size int64, kill bool) {
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	c := f.e.dirty[f.ino]
	if c == nil {
		c = &change{}
		f.e.dirty[f.ino] = c
	}
	c.size = max(c.size, size)
	c.mtime = time.Now().UnixNano()
	c.kill = c.kill || kill
}

func (f *memFile) Flush(ctx context.Context) error { return f.e.FlushIno(ctx, f.ino) }
func (f *memFile) Sync(ctx context.Context) error  { return f.e.FlushIno(ctx, f.ino) }

func (f *memFile) Release() {
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	if f.e.opens[f.ino]--; f.e.opens[f.ino] == 0 {
		delete(f.e.opens, f.ino)
	}
}

func (f *memFile) Seek(ctx context.Context, off int64, w file.Whence) (int64, error) {
	a, err := f.e.attr(ctx, f.ino)
	if err != nil {
		return 0, err
	}
	size := int64(a.Size)
	if off >= size {
		return 0, errkind.NoData.Wrap("seek at or behind the end")
	}
	f.e.store.mu.Lock()
	defer f.e.store.mu.Unlock()
	pages := slices.Sorted(maps.Keys(f.e.store.files[f.ino]))
	for _, k := range pages {
		if (k+1)*memPage <= off {
			continue
		}
		hole := off < k*memPage
		if w == file.SeekHole && hole {
			return off, nil
		}
		off = max(off, k*memPage)
		if w == file.SeekData {
			return off, nil
		}
		off = (k + 1) * memPage
	}
	if w == file.SeekHole {
		return min(off, size), nil
	}
	return 0, errkind.NoData.Wrap("seek behind the end")
}

func (f *memFile) Allocate(ctx context.Context, mode file.AllocMode, off, n int64) error {
	a, err := f.e.attr(ctx, f.ino)
	if err != nil {
		return err
	}
	switch mode {
	case file.AllocPunch, file.AllocZeroKeep, file.AllocZero:
		f.e.store.cut(f.ino, off, off+n)
	case file.AllocExtend, file.AllocKeep:
	}
	if mode == file.AllocExtend || mode == file.AllocZero {
		f.change(max(int64(a.Size), off+n), false)
	}
	return nil
}
