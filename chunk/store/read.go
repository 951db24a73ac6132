package store

import (
	"errors"
	"io"
	"os"
	"sync"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// pin keeps the space of a chunk from being reused. Guarded by Store.mu.
type pin struct {
	seg   *segment
	count int
	freed []span // deleted meanwhile: free once count is zero
}

// frontsKept bounds the decoded front pages in memory: two generations of so
// many, at most some 2.5 KiB each.
const frontsKept = 512

// fronts caches decoded front pages of sealed chunks: when the young half is
// full, it becomes the old one. Guarded by Store.mu.
type fronts struct{ young, old map[spot]*front }

func (c *fronts) get(at spot) *front {
	if f := c.young[at]; f != nil {
		return f
	}
	f := c.old[at]
	if f != nil {
		c.put(at, f)
	}
	return f
}

func (c *fronts) put(at spot, f *front) {
	if c.young == nil || len(c.young) >= frontsKept {
		c.old, c.young = c.young, make(map[spot]*front, frontsKept)
	}
	c.young[at] = f
}

func (c *fronts) drop(at spot) {
	delete(c.young, at)
	delete(c.old, at)
}

// Pin opens a sealed chunk for reading.
func (s *Store) Pin(key ids.ChunkKey) (chunk.Reader, error) {
	s.mu.Lock()
	if err := s.mu.alive(); err != nil {
		s.mu.Unlock()
		return nil, err
	}
	e, ok := s.mu.idx.get(key)
	if !ok || e.state != chunk.StateSealed {
		s.mu.Unlock()
		return nil, errkind.NoChunk.Wrap("read chunk %s on disk %s", key, s.id.Disk)
	}
	seg := s.mu.segs[e.seg]
	s.mu.pin(seg, e.spot())
	f := s.mu.seen.get(e.spot())
	s.mu.Unlock()
	if f == nil {
		var err error
		if f, err = s.loadFront(seg, e); err != nil {
			s.unpin(e.spot())
			return nil, err
		}
	}
	return &reader{store: s, at: e.spot(), seg: seg, front: f, base: int64(e.page+1) * pageSize}, nil
}

func (st *state) pin(seg *segment, at spot) {
	p := st.pins[at]
	if p == nil {
		p = &pin{seg: seg}
		st.pins[at] = p
	}
	p.count++
	seg.pins++
}

func (s *Store) unpin(at spot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.mu.pins[at]
	p.count--
	p.seg.pins--
	if p.count > 0 {
		return
	}
	for _, x := range p.freed {
		p.seg.free = p.seg.free.add(x)
	}
	delete(s.mu.pins, at)
}

// loadFront reads the front page of a sealed chunk and compares it with the
// index. A chunk whose front page says that it was deleted leaves the index.
func (s *Store) loadFront(seg *segment, e entry) (*front, error) {
	buf, put := frontBuffer(0)
	defer put()
	key := e.key()
	if _, err := seg.file.ReadAt(buf, int64(e.page)*pageSize); err != nil {
		return nil, errkind.Corrupt.Wrap("read front page of chunk %s on disk %s: %v", key, s.id.Disk, err)
	}
	kind, f := decodeFront(buf, seg.place(e.page))
	if kind == frontZero {
		s.mu.Lock()
		defer s.mu.Unlock()
		if now, ok := s.mu.idx.get(key); ok && now == e {
			s.mu.free(seg, e)
		}
		return nil, errkind.NoChunk.Wrap("read chunk %s on disk %s", key, s.id.Disk)
	}
	if kind != frontSeal || f.header.Key != key || f.length != e.length || f.digest != e.digest || tableDigest(f.sums) != f.digest {
		return nil, errkind.Corrupt.Wrap("chunk %s on disk %s: the front page in %s at %d is damaged",
			key, s.id.Disk, segName(seg.num), int64(e.page)*pageSize)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now, ok := s.mu.idx.get(key); ok && now == e {
		s.mu.seen.put(e.spot(), &f)
	}
	return &f, nil
}

// reader is one pinned chunk.
type reader struct {
	store *Store
	at    spot
	seg   *segment
	front *front
	base  int64
	once  sync.Once
}

// ReadAt reads within the chunk.
func (r *reader) ReadAt(p []byte, off int64) (int, error) {
	left := int64(r.front.length) - off
	switch {
	case off < 0:
		return 0, errkind.Invalid.Wrap("read chunk %s at %d", r.front.header.Key, off)
	case left <= 0:
		return 0, io.EOF
	}
	want := min(int64(len(p)), left)
	n, err := r.seg.file.ReadAt(p[:want], r.base+off)
	if err != nil && (!errors.Is(err, io.EOF) || int64(n) < want) {
		return n, errkind.Corrupt.Wrap("read chunk %s on disk %s at %d: %v", r.front.header.Key, r.store.id.Disk, off, err)
	}
	if want < int64(len(p)) {
		return n, io.EOF
	}
	return n, nil
}

func (r *reader) Header() chunk.Header { return r.front.header }
func (r *reader) Length() uint32       { return r.front.length }
func (r *reader) Digest() uint64       { return r.front.digest }
func (r *reader) Sums() []uint64       { return r.front.sums }

// Section returns the segment file and the chunk's offset in it.
func (r *reader) Section() (*os.File, int64) {
	if f, ok := r.seg.file.(interface{ OSFile() *os.File }); ok {
		return f.OSFile(), r.base
	}
	return nil, 0
}

// Close ends the pin; a second call does nothing.
func (r *reader) Close() { r.once.Do(func() { r.store.unpin(r.at) }) }

// pinned loads what is known of a sealed chunk, or NoChunk.
func (s *Store) pinned(key ids.ChunkKey) (front, error) {
	r, err := s.Pin(key)
	if err != nil {
		return front{}, err
	}
	defer r.Close()
	return front{header: r.Header(), length: r.Length(), digest: r.Digest(), sums: r.Sums()}, nil
}

// openSealed answers Open of a chunk that is on the disk already.
func (s *Store) openSealed(h *chunk.Header) error {
	f, err := s.pinned(h.Key)
	if errors.Is(err, errkind.NoChunk) {
		return errkind.Conflict.Wrap("open chunk %s on disk %s: an earlier life of the server left it open", h.Key, s.id.Disk)
	}
	if err != nil {
		return err
	}
	if !sameHeader(&f.header, h) {
		return errkind.Conflict.Wrap("open chunk %s on disk %s: it is sealed with another header", h.Key, s.id.Disk)
	}
	return nil
}

// putSealed answers a Put that is not for an open chunk: the repetition of one
// that was stored before the seal is fine.
func (s *Store) putSealed(key ids.ChunkKey, off uint32, n int, sums []uint64) error {
	f, err := s.pinned(key)
	if err != nil {
		return err
	}
	oc := openChunk{header: f.header, sums: f.sums, lens: make([]uint32, granules(f.header.Reserve, f.header.Granule))}
	oc.sums = append(oc.sums[:len(oc.sums):len(oc.sums)], make([]uint64, len(oc.lens)-len(oc.sums))...)
	g := uint32(1) << f.header.Granule
	for i := range f.sums {
		oc.lens[i] = min(g, f.length-uint32(i)*g)
	}
	again, err := oc.check(off, n, sums)
	if err == nil && !again {
		err = errkind.Conflict.Wrap("it is sealed at %d bytes", f.length)
	}
	if err != nil {
		return errkind.Of(err).Wrap("put chunk %s on disk %s: %v", key, s.id.Disk, err)
	}
	return nil
}

// sealAgain answers a Seal of a chunk that is not open.
func (s *Store) sealAgain(key ids.ChunkKey, length uint32) (chunk.Sealed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mu.alive(); err != nil {
		return chunk.Sealed{}, err
	}
	e, ok := s.mu.idx.get(key)
	switch {
	case !ok || e.state != chunk.StateSealed:
		return chunk.Sealed{}, errkind.NoChunk.Wrap("seal chunk %s on disk %s", key, s.id.Disk)
	case e.length != length:
		return chunk.Sealed{}, errkind.Conflict.Wrap("seal chunk %s on disk %s at %d: it is sealed at %d", key, s.id.Disk, length, e.length)
	}
	return chunk.Sealed{Digest: e.digest, Ticket: s.mu.group.ticket}, nil
}

// writeAgain answers a Write of a chunk that is on the disk already.
func (s *Store) writeAgain(h *chunk.Header, sums []uint64) (chunk.Sealed, error) {
	f, err := s.pinned(h.Key)
	if err == nil && (!sameHeader(&f.header, h) || f.length != h.Reserve || f.digest != tableDigest(sums)) ||
		errors.Is(err, errkind.NoChunk) {
		return chunk.Sealed{}, errkind.Conflict.Wrap("write chunk %s on disk %s: other bytes are there", h.Key, s.id.Disk)
	}
	if err != nil {
		return chunk.Sealed{}, err
	}
	return s.sealAgain(h.Key, h.Reserve)
}
