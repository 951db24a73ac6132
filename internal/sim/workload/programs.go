package workload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim/simcluster"
	"github.com/ckptfs/ckptfs/meta/api"
)

var ctx = context.Background()

// work does one thing after the other until the run ends.
func (r *run) work() {
	defer func() { r.workers-- }()
	rng := r.World.Rand()
	for !r.stop {
		r.World.Sleep(time.Duration(rng.IntN(40_000_000)))
		m := r.mounts[rng.IntN(len(r.mounts))]
		if m.Dead() {
			continue
		}
		if e := r.take(); e != nil {
			r.operate(m, e)
		}
	}
}

// operate does one thing with a file that the caller has taken.
func (r *run) operate(m *simcluster.Mount, e *entry) {
	what, op := r.choose(e)
	used := []*entry{e}
	if what == "rename" {
		to := r.take()
		if to == nil {
			e.busy = false
			return
		}
		used = append(used, to)
	}
	err := op(m, used)
	r.result.Ops++
	r.World.Trace("%s: %s %s: %v", m.Name, what, used, err)
	switch {
	case err != nil && m.Dead():
		r.result.Failed++
		r.resolve(used)
		return
	case err != nil && r.mayFail(what, err):
		r.result.Failed++
		e.unsure = e.unsure || what == "write"
	case err != nil:
		r.violate("%s: %s %s: %w", m.Name, what, used, err)
	}
	for _, x := range used {
		x.busy = false
	}
}

func (r *run) choose(e *entry) (string, func(*simcluster.Mount, []*entry) error) {
	p := r.World.Rand().IntN(100)
	switch {
	case p < 45 && !e.unsure:
		return "write", func(m *simcluster.Mount, on []*entry) error { return r.write(m, on[0]) }
	case p < 80:
		return "read", func(m *simcluster.Mount, on []*entry) error { return r.read(m, on[0]) }
	case p < 92:
		return "rename", func(m *simcluster.Mount, on []*entry) error { return r.rename(m, on[0], on[1]) }
	}
	return "unlink", func(m *simcluster.Mount, on []*entry) error { return r.unlink(m, on[0]) }
}

// mayFail reports whether the rules of the run let an operation fail so: only
// for want of servers.
func (r *run) mayFail(what string, err error) bool {
	switch errkind.Of(err) {
	case errkind.Unavailable, errkind.Timeout, errkind.NoSpace, errkind.Busy:
		return r.cfg.Wild
	case errkind.NoChunk: // the chunks of a block that was still open are gone
		return r.cfg.Wild && what != "read"
	}
	return false
}

// resolveAfter is when a request of a mount that died has had its effect, or
// will never have one.
const resolveAfter = 20 * time.Second

// resolve finds out, after a while, what became of files that a mount used when
// it died: each holds what one of them may have held.
func (r *run) resolve(used []*entry) {
	var images [][]byte
	for _, e := range used {
		images = append(images, e.images...)
	}
	r.workers++
	r.World.Go("resolve", func() {
		defer func() { r.workers-- }()
		r.World.Sleep(resolveAfter)
		for _, e := range used {
			m := r.alive()
			err := r.resolveOne(m, e, images)
			for err != nil && m.Dead() {
				m = r.alive()
				err = r.resolveOne(m, e, images)
			}
			if err != nil {
				r.violate("left by a mount that died: %w", err)
			}
			e.busy = false
		}
	})
}

func (r *run) resolveOne(m *simcluster.Mount, e *entry, images [][]byte) error {
	a, err := r.lookup(m, e)
	e.exists, e.images, e.unsure = err == nil, nil, false
	r.World.Trace("%s was left; it exists: %v", e, e.exists)
	if err != nil {
		if errors.Is(err, errkind.NotFound) {
			return nil
		}
		return err
	}
	h, err := m.Engine.Open(ctx, a.Ino, file.OpenFlags{})
	if err != nil {
		return err
	}
	defer h.Release()
	got, err := r.compare(e, h, images)
	e.images = [][]byte{got}
	return err
}

// alive returns a mount that is up, waiting for one.
func (r *run) alive() *simcluster.Mount {
	for {
		for _, m := range r.mounts {
			if !m.Dead() {
				return m
			}
		}
		r.World.Sleep(100 * time.Millisecond)
	}
}

// take chooses an entry that nobody uses.
func (r *run) take() *entry {
	e := r.entries[r.World.Rand().IntN(len(r.entries))]
	if e.busy {
		return nil
	}
	e.busy = true
	return e
}

func (r *run) lookup(m *simcluster.Mount, e *entry) (api.Attr, error) {
	var got api.Entry
	err := m.Meta.Do(ctx, &api.Lookup{Parent: e.dir, Name: []byte(e.name)}, &got)
	return got.Attr, err
}

// open opens the file as open(2) with O_CREAT does.
func (r *run) open(m *simcluster.Mount, e *entry) (*file.Handle, error) {
	var got api.Entry
	if !e.exists {
		e.images = [][]byte{{}}
	}
	err := m.Meta.Do(ctx, &api.Create{
		Parent: e.dir, Name: []byte(e.name), Mode: api.ModeRegular | 0o644, Open: true, Time: r.World.Wall().UnixNano(),
	}, &got)
	if err != nil {
		return nil, err
	}
	if got.Existed != e.exists {
		return nil, fmt.Errorf("create found the file: %v, it exists: %v", got.Existed, e.exists)
	}
	if got.Existed {
		return m.Engine.Open(ctx, got.Attr.Ino, file.OpenFlags{Write: true})
	}
	e.exists = true
	return m.Engine.OpenCreated(got.Attr, file.OpenFlags{Write: true}), nil
}

// write opens a file, changes it in several steps, and closes it.
func (r *run) write(m *simcluster.Mount, e *entry) error {
	h, err := r.open(m, e)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer h.Release()
	rng := r.World.Rand()
	if rng.IntN(3) == 0 {
		if err := r.truncate(m, e, h.Ino(), 0); err != nil {
			return err
		}
	}
	for range 1 + rng.IntN(5) {
		var err error
		switch p := rng.IntN(10); {
		case p < 7:
			err = r.writeOnce(e, h)
		case p < 8:
			if err = h.Sync(ctx); err == nil {
				e.acknowledged()
			}
		case p < 9:
			err = r.truncate(m, e, h.Ino(), rng.IntN(len(e.newest())+1))
		default:
			_, err = r.compare(e, h, [][]byte{e.newest()})
		}
		if err != nil {
			return err
		}
		if rng.IntN(8) == 0 {
			r.World.Sleep(time.Duration(rng.IntN(3_000_000_000)))
		}
	}
	if err := h.Flush(ctx); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	e.acknowledged()
	return nil
}

// writeOnce writes some bytes somewhere, often at the end.
func (r *run) writeOnce(e *entry, h *file.Handle) error {
	rng := r.World.Rand()
	old := e.newest()
	n := 1 + rng.IntN([]int{100, 5000, 100_000, 400_000}[rng.IntN(4)])
	off := len(old)
	fl := file.WriteFlags{}
	switch rng.IntN(4) {
	case 0:
		off = rng.IntN(len(old) + 1)
	case 1:
		fl.Append = true
	}
	n = max(min(n, r.cfg.MaxFile-off), 0)
	data := random(rng.Uint64(), n)
	e.wrote(overwrite(old, data, off))
	if _, err := h.WriteAt(ctx, data, int64(off), fl); err != nil {
		return fmt.Errorf("write %d bytes at %d: %w", n, off, err)
	}
	return nil
}

func (r *run) truncate(m *simcluster.Mount, e *entry, ino ids.Ino, size int) error {
	e.wrote(resize(e.newest(), size))
	if _, err := m.Engine.Truncate(ctx, ino, int64(size)); err != nil {
		return fmt.Errorf("truncate to %d: %w", size, err)
	}
	return nil
}

// read opens a file and compares it with what it must hold.
func (r *run) read(m *simcluster.Mount, e *entry) error {
	a, err := r.lookup(m, e)
	if !e.exists && errors.Is(err, errkind.NotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lookup: %w", err)
	}
	if !e.exists {
		return errors.New("lookup: a removed file is there")
	}
	h, err := m.Engine.Open(ctx, a.Ino, file.OpenFlags{})
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer h.Release()
	_, err = r.compare(e, h, e.images)
	return err
}

// compare reads all of an open file and returns it.
func (r *run) compare(e *entry, h *file.Handle, images [][]byte) ([]byte, error) {
	size := int(h.Attr().Size)
	got := make([]byte, 0, size)
	buf := make([]byte, 1+r.World.Rand().IntN(300_000))
	for {
		n, err := h.ReadAt(ctx, buf, int64(len(got)))
		if err != nil {
			return got, fmt.Errorf("read at %d: %w", len(got), err)
		}
		if n == 0 {
			break
		}
		got = append(got, buf[:n]...)
	}
	if size != len(got) {
		return got, fmt.Errorf("size %d, but %d bytes could be read", size, len(got))
	}
	r.World.Trace("read %s: %d bytes %016x", e, len(got), xxh3.Hash(got))
	want := entry{dir: e.dir, name: e.name, images: images}
	return got, want.check(got)
}

// rename moves a file over another name, flushing it first as a mount does.
func (r *run) rename(m *simcluster.Mount, e, to *entry) error {
	a, err := r.lookup(m, e)
	if !e.exists && errors.Is(err, errkind.NotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lookup: %w", err)
	}
	if err := m.Engine.FlushIno(ctx, a.Ino); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	var done api.Renamed
	err = m.Meta.Do(ctx, &api.Rename{
		OldParent: e.dir, OldName: []byte(e.name), NewParent: to.dir, NewName: []byte(to.name), Time: r.World.Wall().UnixNano(),
	}, &done)
	if err != nil {
		return err
	}
	to.exists, to.images, to.unsure = true, e.images, e.unsure
	e.exists, e.images, e.unsure = false, nil, false
	return nil
}

func (r *run) unlink(m *simcluster.Mount, e *entry) error {
	var got api.Entry
	err := m.Meta.Do(ctx, &api.Unlink{Parent: e.dir, Name: []byte(e.name), Time: r.World.Wall().UnixNano()}, &got)
	if !e.exists && errors.Is(err, errkind.NotFound) {
		return nil
	}
	if err == nil {
		e.exists, e.images, e.unsure = false, nil, false
	}
	return err
}

// random makes n bytes that follow from seed; one in four is all of one value,
// as checkpoints have them.
func random(seed uint64, n int) []byte {
	if seed%4 == 0 {
		return bytes.Repeat([]byte{byte(seed >> 8)}, n)
	}
	p := make([]byte, n)
	for i := range p {
		seed = seed*6364136223846793005 + 1442695040888963407
		p[i] = byte(seed >> 56)
	}
	return p
}
