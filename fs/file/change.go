package file

import (
	"context"
	"fmt"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Truncate sets the size and commits that before it returns; no handle is
// needed. The attributes afterwards are returned, overlaid.
func (e *Engine) Truncate(ctx context.Context, ino ids.Ino, size int64) (api.Attr, error) {
	if size < 0 {
		return api.Attr{}, errkind.Invalid.Wrap("truncate inode %s to %d", ino, size)
	}
	n := e.get(ino)
	defer e.unhold(n)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.know(ctx); err != nil {
		return api.Attr{}, err
	}
	s := uint64(size)
	if err := n.settleBefore(ctx, 0, infinity); err != nil {
		return api.Attr{}, err
	}
	n.mu.ov.insert(entry{off: s, end: infinity})
	n.mu.extend = 0
	switch {
	case n.mu.trunc == nil:
		n.mu.trunc = &s
	case s < *n.mu.trunc:
		n.mu.trunc = &s
	default:
		n.mu.extend = s
	}
	n.changed()
	if err := n.commitChange(ctx); err != nil {
		return api.Attr{}, err
	}
	a := n.mu.attr
	n.overlayAttr(&a)
	return a, nil
}

// know fetches the attributes of an inode that is not open.
func (n *inode) know(ctx context.Context) error {
	if n.mu.attr.Ino != 0 {
		return nil
	}
	n.mu.Unlock()
	var reply api.Entry
	opctx, stop := n.e.opContext(ctx)
	err := n.e.cfg.Meta.Do(opctx, &api.GetAttr{Ino: n.ino}, &reply)
	stop()
	n.mu.Lock()
	if err != nil {
		return fmt.Errorf("attributes of inode %s: %w", n.ino, err)
	}
	n.install(&reply.Attr, false, 0)
	return nil
}

// settleBefore waits until a change of [lo, hi) other than a write may be made.
func (n *inode) settleBefore(ctx context.Context, lo, hi uint64) error {
	deadline := n.e.deadline()
	for {
		if n.mu.app.active {
			if _, err := n.flushLocked(ctx); err != nil {
				return err
			}
			continue
		}
		waited, err := n.admit(ctx, deadline, lo, hi, false)
		if err != nil || !waited {
			return err
		}
	}
}

// commitChange commits the change just made and what was asked for before.
func (n *inode) commitChange(ctx context.Context) error {
	seen, change := n.mu.errSeq, n.mu.change
	last, deadline := n.mu.progress, n.e.deadline()
	n.want(0, change)
	for n.mu.errSeq == seen && n.mu.done < change {
		if n.mu.progress != last {
			last, deadline = n.mu.progress, n.e.deadline()
		}
		if err := n.wait(ctx, deadline); err != nil {
			return err
		}
	}
	if n.mu.errSeq != seen {
		return n.mu.err
	}
	return nil
}

// Allocate changes the range [off, off+n); it is committed with the next flush.
func (h *Handle) Allocate(ctx context.Context, mode AllocMode, off, length int64) error {
	n := h.n
	if off < 0 || length <= 0 || mode > AllocZeroKeep {
		return errkind.Invalid.Wrap("allocate %d bytes at %d of inode %s", length, off, n.ino)
	}
	if off > api.MaxFileSize-length {
		return errkind.TooBig.Wrap("allocate %d bytes at %d of inode %s", length, off, n.ino)
	}
	if mode == AllocKeep {
		return nil
	}
	lo, hi := uint64(off), uint64(off)+uint64(length)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := h.kept(); err != nil {
		return err
	}
	if err := n.settleBefore(ctx, lo, hi); err != nil {
		return err
	}
	size := n.size()
	if mode != AllocExtend && lo < size {
		n.mu.ov.insert(entry{off: lo, end: min(hi, size)})
		n.changed()
	}
	if (mode == AllocExtend || mode == AllocZero) && hi > size {
		n.mu.extend = max(n.mu.extend, hi)
		n.changed()
	}
	// A hole may have taken the last bytes of the file, but not its size.
	if size > n.size() {
		n.mu.extend = size
	}
	return nil
}

// Seek finds the first data or hole at or after off. NoData when there is none.
func (h *Handle) Seek(ctx context.Context, off int64, w Whence) (int64, error) {
	n := h.n
	n.mu.Lock()
	defer n.mu.Unlock()
	at, tries := uint64(off), 0
	for off >= 0 && at < n.size() {
		data, end, known := n.shapeAt(at)
		switch {
		case !known:
			if tries++; tries > 1<<16 {
				return 0, errkind.Changed.Wrap("map of inode %s changes faster than it can be read", n.ino)
			}
			if err := n.fetchMap(ctx, at); err != nil {
				return 0, err
			}
		case data == (w == SeekData):
			return int64(at), nil
		default:
			at = end
		}
	}
	if off >= 0 && w == SeekHole && uint64(off) < n.size() {
		return int64(n.size()), nil // the hole behind the end
	}
	return 0, errkind.NoData.Wrap("seek in inode %s from %d", n.ino, off)
}

// shapeAt says whether there is data at off, and up to where that holds.
func (n *inode) shapeAt(off uint64) (data bool, end uint64, known bool) {
	en, ok, next := n.mu.ov.at(off)
	if ok {
		return en.pk != nil, en.end, true
	}
	if off >= n.mu.attr.Size {
		return false, next, true
	}
	x, end, known := n.mu.emap.at(off)
	return x != nil, min(end, next), known
}

// CopyRange copies n bytes, fewer at the end of src, and returns how many.
// Ranges of one file that overlap are Invalid.
func (e *Engine) CopyRange(ctx context.Context, dst *Handle, dstOff int64, src *Handle, srcOff, n int64) (int64, error) {
	if dstOff < 0 || srcOff < 0 || n < 0 {
		return 0, errkind.Invalid.Wrap("copy %d bytes from %d of inode %s to %d of inode %s", n, srcOff, src.n.ino, dstOff, dst.n.ino)
	}
	if dst.n == src.n && srcOff < dstOff+n && dstOff < srcOff+n {
		return 0, errkind.Invalid.Wrap("copy %d bytes within inode %s: the ranges overlap", n, src.n.ino)
	}
	buf, err := e.copyPool.get(ctx, e.deadline(), e.maxPiece)
	if err != nil {
		return 0, errkind.Of(err).Wrap("wait for a buffer to copy inode %s", src.n.ino)
	}
	defer e.copyPool.put(buf)
	// A copy within one file must not go on into what it has just written.
	src.n.mu.Lock()
	n = min(n, max(0, int64(min(src.n.size(), api.MaxFileSize))-srcOff))
	src.n.mu.Unlock()
	var done int64
	for done < n {
		c, err := src.ReadAt(ctx, buf[:min(int64(e.maxPiece), n-done)], srcOff+done)
		if err == nil && c > 0 {
			c, err = dst.WriteAt(ctx, buf[:c], dstOff+done, WriteFlags{})
		}
		done += int64(c)
		if err != nil && done == 0 {
			return 0, err
		}
		if err != nil || c == 0 {
			return done, nil
		}
	}
	return done, nil
}
