package fs

import (
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Cookies of a directory stream: 0 is the start, then the two names that every
// directory has; the rest are hashes of names.
const (
	cookieDot    = 1
	cookieDotDot = 2
)

const (
	// listPage is how many names one call fetches for a plain listing.
	listPage = 512
	// direntSize and entrySize are the protocol's sizes, in bytes, without and
	// with attributes; a name is padded to 8.
	direntSize = 24
	entrySize  = 128 + direntSize
	// guessName is a name's likely length, to fetch about what fits.
	guessName = 24
)

// openDir is one open directory.
type openDir struct {
	ino    ids.Ino
	parent ids.Ino
	touch  bool
	mu     struct {
		sync.Mutex
		behind uint64 // cookie that page follows
		page   []api.DirEntry
		eof    bool // nothing comes after page
	}
}

// OpenDir registers the directory as open, so that it can be read on after it
// was removed.
func (f *FS) OpenDir(cancel <-chan struct{}, in *fuseconn.OpenIn, out *fuseconn.OpenOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	ino := ids.Ino(in.NodeId)
	var r api.Opened
	f.dirOpens.open(ino)
	if err := f.cfg.Meta.Do(o, &api.Open{Ino: ino}, &r); err != nil {
		f.dirOpens.close(f, ino)
		return f.inodeStatus("opendir", in.NodeId, err)
	}
	f.nodes.see(&r.Attr, false)
	d := &openDir{ino: ino, parent: r.Attr.Parent}
	if d.parent == 0 {
		d.parent = ino
	}
	d.touch = !f.cfg.NoDirAtime && f.wantsAtime(&r.Attr)
	out.Fh = f.dirs.add(d)
	return fuseconn.OK
}

// ReleaseDir ends an open directory.
func (f *FS) ReleaseDir(in *fuseconn.ReleaseIn) {
	d, ok := f.dirs.take(in.Fh)
	if !ok {
		return
	}
	o := f.background()
	defer o.end()
	f.sendAtime(o, d.ino)
	f.dirOpens.close(f, d.ino)
}

// FsyncDir has nothing to do: a change of names is durable when it returns.
func (f *FS) FsyncDir(<-chan struct{}, *fuseconn.FsyncIn) fuseconn.Status { return fuseconn.OK }

// ReadDir lists names.
func (f *FS) ReadDir(cancel <-chan struct{}, in *fuseconn.ReadIn, out *fuseconn.DirEntryList) fuseconn.Status {
	return f.readDir(cancel, in, out, false)
}

// ReadDirPlus lists names with attributes.
func (f *FS) ReadDirPlus(cancel <-chan struct{}, in *fuseconn.ReadIn, out *fuseconn.DirEntryList) fuseconn.Status {
	return f.readDir(cancel, in, out, true)
}

func (f *FS) readDir(cancel <-chan struct{}, in *fuseconn.ReadIn, out *fuseconn.DirEntryList, plus bool) fuseconn.Status {
	d, ok := f.dirs.get(in.Fh)
	if !ok {
		return badHandle()
	}
	o := f.begin(cancel)
	defer o.end()
	d.mu.Lock()
	defer d.mu.Unlock()
	w := dirWriter{f: f, out: out, left: int(in.Size), plus: plus}
	if in.Offset < cookieDot && !w.dot(".", d.ino, cookieDot) {
		return fuseconn.OK
	}
	if in.Offset < cookieDotDot && !w.dot("..", d.parent, cookieDotDot) {
		return fuseconn.OK
	}
	at := in.Offset
	if at <= cookieDotDot {
		at = 0
	}
	// Attributes are always fetched anew: kept ones could put back what changed
	// here meanwhile.
	if at != d.mu.behind || at == 0 || plus {
		d.mu.behind, d.mu.page, d.mu.eof = at, nil, false
	}
	for {
		d.emit(&w)
		if len(d.mu.page) > 0 || d.mu.eof || w.left < w.size(guessName) {
			break
		}
		if err := f.fetch(o, d, &w); err != nil {
			if w.some {
				break // the next call meets it again
			}
			return f.inodeStatus("readdir", in.NodeId, err)
		}
	}
	if plus {
		d.mu.page, d.mu.eof = nil, d.mu.eof && len(d.mu.page) == 0
	}
	if d.touch {
		f.atimes.set(d.ino, f.now())
	}
	return fuseconn.OK
}

// fetch gets the next page.
func (f *FS) fetch(o *op, d *openDir, w *dirWriter) error {
	req := &api.ReadDir{Ino: d.ino, Cookie: d.mu.behind, Max: listPage, Plus: w.plus}
	if w.plus {
		req.Max = uint32(max(1, w.left/w.size(guessName)))
	}
	var l api.Listing
	if err := f.cfg.Meta.Do(o, req, &l); err != nil {
		return err
	}
	d.mu.page, d.mu.eof = l.Entries, l.EOF || len(l.Entries) == 0
	return nil
}

// emit writes entries of the page until the buffer is full. Entries of equal
// cookie go together: a reader that goes on behind that cookie gets none of them.
func (d *openDir) emit(w *dirWriter) {
	for len(d.mu.page) > 0 {
		cookie := d.mu.page[0].Cookie
		n, need := 0, 0
		for n < len(d.mu.page) && d.mu.page[n].Cookie == cookie {
			need += w.size(len(d.mu.page[n].Name))
			n++
		}
		if need > w.left {
			return
		}
		for i := range d.mu.page[:n] {
			w.add(&d.mu.page[i])
		}
		d.mu.page = d.mu.page[n:]
		d.mu.behind = cookie
	}
}

// dirWriter fills the reply to one listing request.
type dirWriter struct {
	f    *FS
	out  *fuseconn.DirEntryList
	left int
	plus bool
	some bool
}

func (w *dirWriter) size(name int) int {
	n := (name + 7) &^ 7
	if w.plus {
		return n + entrySize
	}
	return n + direntSize
}

// dot writes one of the two names that lead nowhere new; the kernel takes no
// reference for them.
func (w *dirWriter) dot(name string, ino ids.Ino, cookie uint64) bool {
	if w.size(len(name)) > w.left {
		return false
	}
	e := fuseconn.DirEntry{Name: name, Ino: uint64(ino), Mode: api.ModeDir, Off: cookie}
	if w.plus {
		w.out.AddDirLookupEntry(e)
	} else {
		w.out.AddDirEntry(e)
	}
	w.left -= w.size(len(name))
	w.some = true
	return true
}

// add writes an entry that is known to fit.
func (w *dirWriter) add(d *api.DirEntry) {
	e := fuseconn.DirEntry{Name: string(d.Name), Ino: uint64(d.Ino), Mode: d.Mode, Off: d.Cookie}
	w.left -= w.size(len(d.Name))
	w.some = true
	if !w.plus {
		w.out.AddDirEntry(e)
		return
	}
	if out := w.out.AddDirLookupEntry(e); out != nil && d.Attr != nil {
		w.f.entry(nil, out, d.Attr) // it may have been read some calls ago
	}
}

const (
	// dirReleaseDelay is how long the end of a directory's use waits for
	// others, so that they go in one call.
	dirReleaseDelay = time.Second
	dirReleaseBatch = 256
)

// dirOpens counts the handles of each open directory, and tells the metadata
// service, a little later, when the last is gone.
type dirOpens struct {
	mu struct {
		sync.Mutex
		count   shrinkMap[ids.Ino, int]
		gone    shrinkMap[ids.Ino, struct{}]
		pending bool // a release is on its way
		closed  bool
	}
}

func (d *dirOpens) open(ino ids.Ino) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.count.set(ino, d.mu.count.m[ino]+1)
	d.mu.gone.remove(ino)
}

func (d *dirOpens) close(f *FS, ino ids.Ino) {
	d.mu.Lock()
	n := d.mu.count.m[ino] - 1
	if n > 0 {
		d.mu.count.set(ino, n)
		d.mu.Unlock()
		return
	}
	d.mu.count.remove(ino)
	d.mu.Unlock()
	d.release(f, ino)
}

// release ends a registration for which no handle is counted.
func (d *dirOpens) release(f *FS, ino ids.Ino) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed || d.mu.count.m[ino] > 0 {
		return
	}
	d.mu.gone.set(ino, struct{}{})
	if !d.mu.pending {
		d.mu.pending = true
		f.cfg.Sched.AfterFunc(dirReleaseDelay, func() { d.send(f) })
	}
}

// send releases what is gone. A directory that is opened again while its
// release travels is registered anew afterwards.
func (d *dirOpens) send(f *FS) {
	for {
		d.mu.Lock()
		batch := make([]ids.Ino, 0, min(dirReleaseBatch, len(d.mu.gone.m)))
		for ino := range d.mu.gone.m {
			if len(batch) < dirReleaseBatch {
				batch = append(batch, ino)
			}
		}
		for _, ino := range batch {
			d.mu.gone.remove(ino)
		}
		if len(batch) == 0 || d.mu.closed {
			d.mu.pending = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		o := f.background()
		if err := f.cfg.Meta.Do(o, &api.Release{Inos: batch}, &api.Empty{}); err != nil {
			f.status("release", 0, err)
		}
		for _, ino := range batch {
			if d.isOpen(ino) {
				if err := f.cfg.Meta.Do(o, &api.Open{Ino: ino}, &api.Opened{}); err != nil {
					f.inodeStatus("opendir", uint64(ino), err)
				}
			}
		}
		o.end()
	}
}

func (d *dirOpens) isOpen(ino ids.Ino) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.count.m[ino] > 0
}

func (d *dirOpens) list() []ids.Ino {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]ids.Ino, 0, len(d.mu.count.m))
	for ino := range d.mu.count.m {
		all = append(all, ino)
	}
	return all
}

func (d *dirOpens) shut() {
	d.mu.Lock()
	d.mu.closed = true
	d.mu.Unlock()
}
