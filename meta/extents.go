package meta

import (
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	// maxClips bounds the truncations of one file whose extents wait to be freed.
	maxClips = 8
	// cutAtOnce is how many extents a truncation removes itself; more are
	// hidden by a clip and freed in steps.
	cutAtOnce = 64
	// noEnd is behind every extent.
	noEnd = api.MaxFileSize
)

// extents reads records of one content generation that overlap [lo, hi), at
// most limit of them, hidden ones too.
func (v *view) extents(ino ids.Ino, gen, lo, hi uint64, limit int) []extent {
	var list []extent
	start := generationKey(ino, gen)
	if key, value := v.last(ordered(start, lo), start); key != nil {
		if e, ok := v.extent(key, value); ok && e.End() > lo {
			if e.Off < hi {
				list = append(list, e)
			}
			lo = e.End()
		}
	}
	if lo >= hi {
		return list
	}
	v.ascend(extentKey(ino, gen, lo), extentKey(ino, gen, hi), func(key, value []byte) bool {
		if len(list) >= limit {
			return false
		}
		e, ok := v.extent(key, value)
		list = append(list, e)
		return ok
	})
	return list
}

// extent decodes the record of an extent; the offset is in its key.
func (v *view) extent(key, value []byte) (extent, bool) {
	var e extent
	if !v.decode(key, value, &e) {
		return e, false
	}
	_, off, ok := splitExtentKey(key)
	if !ok || off+e.Len < off {
		v.fail(errkind.Corrupt.Wrap("extent record %x", key))
		return extent{}, false
	}
	e.Off = off
	return e, true
}

// splitExtentKey returns generation and offset of an extent's key.
func splitExtentKey(key []byte) (gen, off uint64, ok bool) {
	if len(key) < 9 {
		return 0, 0, false
	}
	gen, rest, ok := takeOrdered(key[9:])
	if !ok {
		return 0, 0, false
	}
	off, rest, ok = takeOrdered(rest)
	return gen, off, ok && len(rest) == 0
}

// hidden reports whether a pending clip hides the extent.
func (n *inode) hidden(e *extent) bool {
	for _, c := range n.Clips {
		if e.Off >= c.Off && e.Version < c.Version {
			return true
		}
	}
	return false
}

// filemap changes the extent map of one inode. The inode is changed, not
// saved; settle carries what the extents did to blocks over to their records.
// Either the content is inode.Inline or it is in records, never both.
type filemap struct {
	s *state
	n *inode
	// refs[id] is by how many bytes the file now refers more to the block;
	// order lists the blocks as they were first touched.
	refs  map[ids.BlockID]int64
	order []ids.BlockID
	fresh map[ids.BlockID]*ids.Block // new in this commit
}

func (s *state) filemap(n *inode) *filemap {
	return &filemap{s: s, n: n, refs: map[ids.BlockID]int64{}}
}

func (m *filemap) refer(e *extent, sign int64) {
	if e.Kind != ids.ExtentBlock {
		return
	}
	if _, ok := m.refs[e.Block]; !ok {
		m.order = append(m.order, e.Block)
	}
	m.refs[e.Block] += sign * int64(e.Len)
}

func (m *filemap) place(e extent) {
	e.Birth = m.s.id.Epoch
	m.s.put(extentKey(m.n.Ino, m.n.Generation, e.Off), &e)
	m.n.Stored += e.Len
	m.refer(&e, 1)
}

func (m *filemap) remove(gen uint64, e *extent) {
	m.s.delete(extentKey(m.n.Ino, gen, e.Off))
	m.refer(e, -1)
}

// cut makes [lo, hi) a hole.
func (m *filemap) cut(lo, hi uint64) {
	if lo >= hi {
		return
	}
	if len(m.n.Inline) > 0 {
		m.cutInline(lo, hi)
		return
	}
	for _, e := range m.s.extents(m.n.Ino, m.n.Generation, lo, hi, api.MaxRecords+1) {
		m.remove(m.n.Generation, &e)
		m.n.Stored -= e.Len
		if e.Off < lo {
			m.place(extent{Extent: e.Slice(e.Off, lo), Version: e.Version})
		}
		if e.End() > hi {
			m.place(extent{Extent: e.Slice(hi, e.End()), Version: e.Version})
		}
	}
}

func (m *filemap) cutInline(lo, hi uint64) {
	data := m.n.Inline
	size := uint64(len(data))
	if lo >= size {
		return
	}
	m.n.Inline = nil
	m.n.Stored = 0
	if hi >= size {
		m.n.Inline, m.n.Stored = data[:lo], lo
		return
	}
	if lo > 0 {
		m.place(inlineExtent(0, data[:lo], m.n.MapVersion))
	}
	m.place(inlineExtent(hi, data[hi:], m.n.MapVersion))
}

func inlineExtent(off uint64, data []byte, version uint64) extent {
	return extent{Extent: ids.Extent{Off: off, Len: uint64(len(data)), Kind: ids.ExtentInline, Data: data}, Version: version}
}

// put maps a range anew. The caller has raised the map version.
func (m *filemap) put(e ids.Extent) {
	if m.putInline(&e) {
		return
	}
	m.cut(e.Off, e.End())
	if m.putInline(&e) {
		return
	}
	if data := m.n.Inline; len(data) > 0 {
		m.n.Inline = nil
		m.n.Stored = 0
		m.place(inlineExtent(0, data, m.n.MapVersion))
	}
	m.place(extent{Extent: e, Version: m.n.MapVersion})
}

// putInline keeps the bytes in the inode, if they and what is there already
// are the whole content.
func (m *filemap) putInline(e *ids.Extent) bool {
	n := m.n
	size := uint64(len(n.Inline))
	if e.Kind != ids.ExtentInline || n.Stored != size || e.Off > size || e.End() > api.MaxInline {
		return false
	}
	data := make([]byte, max(size, e.End()))
	copy(data, n.Inline)
	copy(data[e.Off:], e.Data)
	n.Inline, n.Stored = data, uint64(len(data))
	return true
}

// truncate sets the size; what lies behind it is gone.
func (m *filemap) truncate(size uint64) error {
	n := m.n
	if size < n.Size {
		n.MapVersion++
		if size == 0 {
			m.reset()
		} else if err := m.shorten(size); err != nil {
			return err
		}
	}
	n.Size = size
	return nil
}

// reset starts a new content generation; the old one is freed in steps.
func (m *filemap) reset() {
	n := m.n
	if n.Stored > uint64(len(n.Inline)) {
		m.s.enqueue(freeKey(freeGeneration, uint64(n.Ino), n.Generation), &mark{}, &m.s.counts.Freeing)
	}
	m.dropClips(0)
	n.Inline, n.Stored = nil, 0
	n.Generation++
}

// shorten removes what lies at or behind size, at once or by a clip.
func (m *filemap) shorten(size uint64) error {
	n := m.n
	var list []extent
	if len(n.Inline) == 0 {
		list = m.s.extents(n.Ino, n.Generation, size, noEnd, cutAtOnce+1)
	}
	if len(list) <= cutAtOnce {
		m.cut(size, noEnd)
		m.dropClips(size)
		return nil
	}
	if e := list[0]; e.Off < size {
		m.cut(size, e.End())
	}
	m.keepClips(size)
	if len(n.Clips) >= maxClips {
		return errkind.Busy.Wrap("inode %d: %d truncations wait for their extents to be freed", n.Ino, maxClips)
	}
	n.Clips = append(n.Clips, clip{Off: size, Version: n.MapVersion})
	key, from := freeKey(freeClip, uint64(n.Ino), 0), number(size)
	var cursor number
	if m.s.load(key, &cursor) {
		from = min(from, cursor)
	} else {
		m.s.counts.Freeing++
	}
	m.s.put(key, &from)
	return nil
}

// keepClips drops the clips at or behind off: a newer one covers them.
func (m *filemap) keepClips(off uint64) {
	var left []clip
	for _, c := range m.n.Clips {
		if c.Off < off {
			left = append(left, c)
		}
	}
	m.n.Clips = left
}

// dropClips drops the clips at or behind off, behind which nothing is left.
func (m *filemap) dropClips(off uint64) {
	had := len(m.n.Clips) > 0
	m.keepClips(off)
	if had && len(m.n.Clips) == 0 {
		m.s.dequeue(freeKey(freeClip, uint64(m.n.Ino), 0), &m.s.counts.Freeing)
	}
}
