package store

import (
	"slices"
	"sync"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

const (
	// directWrite is the length from which data goes past the page cache, in
	// bytes. Measured on ext4, 1 MiB writes of 12 MiB chunks: 0.08 CPU-s/GiB
	// and 1.5 ms for the fdatasync at a seal, against 0.33 and 16 ms through
	// the page cache, 0.35 and 12 ms with early writeback (docs/format/segment.md).
	directWrite = 64 << 10
	// maxWrite is the longest chunk that Write takes, in bytes.
	maxWrite = 1 << 20
	// maxTries bounds how often a chunk looks for room that others took.
	maxTries = 64
)

// openChunk is a chunk that is being written. Its fields are guarded by gate.
type openChunk struct {
	gate   *gate
	header chunk.Header
	seg    *segment
	page   uint32
	sums   []uint64
	lens   []uint32 // bytes put in each granule; 0 for none
	dead   bool     // deleted, or never came to be
	sealed bool
	result chunk.Sealed // of Write
}

// pages hands out front page buffers.
var pages = sync.Pool{New: func() any { return new([pageSize]byte) }}

// Open reserves space and writes the header.
func (s *Store) Open(h chunk.Header) error {
	if err := validHeader(&h); err != nil {
		return err
	}
	for {
		oc, fresh, err := s.claim(&h)
		if err != nil {
			return err
		}
		if fresh {
			return s.begin(oc)
		}
		if oc == nil {
			return s.openSealed(&h)
		}
		oc.gate.lock()
		dead, same := oc.dead, sameHeader(&oc.header, &h)
		oc.gate.unlock()
		switch {
		case dead:
			continue
		case !same:
			return errkind.Conflict.Wrap("open chunk %s on disk %s: it is open with another header", h.Key, s.id.Disk)
		}
		return nil
	}
}

// claim enters the chunk into the table of open ones, its gate held; or
// returns the one that is there; or nil when the chunk is on the disk already.
func (s *Store) claim(h *chunk.Header) (oc *openChunk, fresh bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if oc := s.mu.open[h.Key]; oc != nil {
		return oc, false, s.mu.alive()
	}
	if _, ok := s.mu.idx.get(h.Key); ok {
		return nil, false, s.mu.alive()
	}
	if err := s.mu.writable(); err != nil {
		return nil, false, err
	}
	if len(s.mu.open) >= s.cfg.MaxOpen {
		return nil, false, errkind.Busy.Wrap("open chunk %s on disk %s: %d chunks are open", h.Key, s.id.Disk, len(s.mu.open))
	}
	oc = &openChunk{gate: newGate(s.cfg.Sched), header: *h}
	oc.header.Siblings = slices.Clone(h.Siblings)
	oc.gate.lock() // nobody else knows it yet
	s.mu.open[h.Key] = oc
	return oc, true, nil
}

// begin gives a claimed chunk its place, and releases its gate.
func (s *Store) begin(oc *openChunk) error {
	defer oc.gate.unlock()
	n := granules(oc.header.Reserve, oc.header.Granule)
	oc.sums, oc.lens = make([]uint64, n), make([]uint32, n)
	err := s.placeChunk(oc, nil, nil)
	if err != nil {
		s.forget(oc)
	}
	return err
}

// forget takes a chunk out of the table of open ones. Called under its gate.
func (s *Store) forget(oc *openChunk) {
	oc.dead = true
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.open[oc.header.Key] == oc {
		delete(s.mu.open, oc.header.Key)
	}
}

// placeChunk finds room and writes the front page there; with sums the chunk
// is whole, sealed, and written with its data as one record. Called under the
// chunk's gate.
func (s *Store) placeChunk(oc *openChunk, data []byte, sums []uint64) error {
	n := reservedPages(oc.header.Reserve)
	cl := classOf(n)
	for range maxTries {
		done, err := s.tryPlace(oc, data, sums, func() (*segment, uint32, bool) { return s.allocate(cl, n) })
		if done {
			return err
		}
		if err := s.makeRoom(n); err != nil {
			if isFull(err) {
				done, perr := s.tryPlace(oc, data, sums, func() (*segment, uint32, bool) { return s.takeAnywhere(n) })
				if done {
					return perr
				}
			}
			return err
		}
	}
	return errkind.Busy.Wrap("open chunk %s on disk %s: others took all room", oc.header.Key, s.id.Disk)
}

// tryPlace allocates, writes and enters the chunk into the index, all under
// the alloc gate: so a checkpoint finds it either in the index or in the part
// of the run that a restart reads.
func (s *Store) tryPlace(oc *openChunk, data []byte, sums []uint64, alloc func() (*segment, uint32, bool)) (done bool, err error) {
	s.alloc.lock()
	defer s.alloc.unlock()
	seg, page, ok := alloc()
	if !ok {
		return false, nil
	}
	oc.seg, oc.page = seg, page
	h := &oc.header
	e := keyEntry(h.Key)
	e.seg, e.page, e.pages, e.state = seg.num, page, uint16(reservedPages(h.Reserve)), chunk.StateOpen
	buf, put := frontBuffer(len(data))
	defer put()
	encodeFront(buf, seg.place(page), h)
	if sums != nil {
		e.state, e.length, e.digest = chunk.StateSealed, uint32(len(data)), tableDigest(sums)
		encodeSeal(buf, e.length, e.digest, sums)
		clear(buf[pageSize+copy(buf[pageSize:], data):])
	}
	_, err = seg.file.WriteAt(buf, int64(page)*pageSize)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.wrote(seg)
	if err != nil {
		seg.free = seg.free.add(e.span())
		s.mu.Unlock()
		err = s.failed("write front page of chunk "+h.Key.String(), err)
		s.mu.Lock()
		return true, err
	}
	s.mu.idx.put(e)
	s.mu.written += int64(e.pages) * pageSize
	if len(s.mu.young) < youngMost {
		s.mu.young = append(s.mu.young, h.Key)
	}
	if sums != nil {
		oc.result = s.sealedNow(e, seg)
	} else {
		s.mu.changed = append(s.mu.changed, h.Key)
	}
	return true, nil
}

// frontBuffer returns a zeroed or stale buffer for a front page and n bytes.
func frontBuffer(n int) (buf []byte, put func()) {
	if n > 0 {
		return make([]byte, pageSize*reservedPages(uint32(n))), func() {}
	}
	p, _ := pages.Get().(*[pageSize]byte)
	return p[:], func() { pages.Put(p) }
}

// lookup returns the open chunk with its gate held, or nil.
func (s *Store) lookup(key ids.ChunkKey) *openChunk {
	s.mu.Lock()
	oc := s.mu.open[key]
	s.mu.Unlock()
	if oc == nil {
		return nil
	}
	oc.gate.lock()
	if oc.dead || oc.sealed {
		oc.gate.unlock()
		return nil
	}
	return oc
}

// Put writes granule-aligned bytes of an open chunk.
func (s *Store) Put(key ids.ChunkKey, off uint32, data []byte, sums []uint64) error {
	oc := s.lookup(key)
	if oc == nil {
		return s.putSealed(key, off, len(data), sums)
	}
	defer oc.gate.unlock()
	again, err := oc.check(off, len(data), sums)
	if err != nil {
		return errkind.Of(err).Wrap("put chunk %s on disk %s: %v", key, s.id.Disk, err)
	}
	if again {
		return nil
	}
	if err := s.writable(); err != nil {
		return err
	}
	if err := writeData(oc.seg.file, data, int64(oc.page+1)*pageSize+int64(off)); err != nil {
		return s.failed("put chunk "+key.String(), err)
	}
	g := uint32(1) << oc.header.Granule
	for i := range sums {
		at := off>>oc.header.Granule + uint32(i)
		oc.sums[at] = sums[i]
		oc.lens[at] = min(g, uint32(len(data))-uint32(i)*g)
	}
	s.mu.Lock()
	s.mu.wrote(oc.seg)
	s.mu.Unlock()
	return nil
}

// check compares a Put with what is there; again means that all of it is.
func (oc *openChunk) check(off uint32, n int, sums []uint64) (again bool, err error) {
	g := uint32(1) << oc.header.Granule
	switch {
	case off%g != 0:
		return false, errkind.Invalid.Wrap("offset %d is not a multiple of %d", off, g)
	case n <= 0 || uint64(off)+uint64(n) > uint64(oc.header.Reserve):
		return false, errkind.Invalid.Wrap("%d bytes at %d exceed the reserve of %d", n, off, oc.header.Reserve)
	case len(sums) != int(granules(uint32(n), oc.header.Granule)):
		return false, errkind.Invalid.Wrap("%d checksums for %d bytes", len(sums), n)
	}
	again = true
	for i := range sums {
		at := off>>oc.header.Granule + uint32(i)
		length := min(g, uint32(n)-uint32(i)*g)
		switch {
		case oc.lens[at] == 0:
			again = false
		case oc.lens[at] != length || oc.sums[at] != sums[i]:
			return false, errkind.Conflict.Wrap("granule %d was put before with other bytes", at)
		}
	}
	return again, nil
}

// directWriter is a file that can write past the page cache.
type directWriter interface {
	WriteDirect(p []byte, off int64) (int, error)
}

// writeData writes the whole pages of p past the page cache when they are
// many, and the rest through it.
func writeData(f vfs.File, p []byte, off int64) error {
	if d, ok := f.(directWriter); ok && len(p) >= directWrite {
		n := len(p) &^ (pageSize - 1)
		if _, err := d.WriteDirect(p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	if len(p) == 0 {
		return nil
	}
	_, err := f.WriteAt(p, off)
	return err
}

// Seal ends the chunk at length.
func (s *Store) Seal(key ids.ChunkKey, length uint32) (chunk.Sealed, error) {
	oc := s.lookup(key)
	if oc == nil {
		return s.sealAgain(key, length)
	}
	defer oc.gate.unlock()
	sums, err := oc.table(length)
	if err != nil {
		return chunk.Sealed{}, errkind.Of(err).Wrap("seal chunk %s on disk %s: %v", key, s.id.Disk, err)
	}
	if err := s.writable(); err != nil {
		return chunk.Sealed{}, err
	}
	digest := tableDigest(sums)
	buf, put := frontBuffer(0)
	defer put()
	encodeFront(buf, oc.seg.place(oc.page), &oc.header)
	encodeSeal(buf, length, digest, sums)
	if _, err := oc.seg.file.WriteAt(buf, int64(oc.page)*pageSize); err != nil {
		return chunk.Sealed{}, s.failed("seal chunk "+key.String(), err)
	}
	oc.sealed = true
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.mu.idx.get(key)
	if !ok {
		return chunk.Sealed{}, errkind.NoChunk.Wrap("seal chunk %s on disk %s", key, s.id.Disk)
	}
	all := e.span()
	e.state, e.length, e.digest, e.pages = chunk.StateSealed, length, digest, uint16(reservedPages(length))
	if tail := (span{e.span().hi, all.hi}); tail.pages() > 0 {
		oc.seg.free = oc.seg.free.add(tail)
	}
	s.mu.idx.put(e)
	delete(s.mu.open, key)
	return s.sealedNow(e, oc.seg), nil
}

// sealedNow gives a chunk whose seal has been written its ticket. Called with mu held.
func (s *Store) sealedNow(e entry, seg *segment) chunk.Sealed {
	key := e.key()
	s.mu.wrote(seg)
	t := s.mu.newTicket()
	s.mu.changed = append(s.mu.changed, key)
	s.mu.group.waiting = append(s.mu.group.waiting, waitingSeal{t, key})
	return chunk.Sealed{Digest: e.digest, Ticket: t}
}

// table returns the checksums of the chunk's first length bytes, which must
// end where a granule that was put ends.
func (oc *openChunk) table(length uint32) ([]uint64, error) {
	if length > oc.header.Reserve {
		return nil, errkind.Invalid.Wrap("length %d exceeds the reserve of %d", length, oc.header.Reserve)
	}
	g := uint32(1) << oc.header.Granule
	n := granules(length, oc.header.Granule)
	for i := range n {
		switch want := min(g, length-i*g); {
		case oc.lens[i] == 0:
			return nil, errkind.Invalid.Wrap("granule %d of %d was never put", i, n)
		case oc.lens[i] != want:
			return nil, errkind.Invalid.Wrap("granule %d was put with %d bytes, and length %d leaves %d of them", i, oc.lens[i], length, want)
		}
	}
	return oc.sums[:n], nil
}

// Write stores a whole chunk of at most 1 MiB. Its reserve is its length.
func (s *Store) Write(h chunk.Header, data []byte, sums []uint64) (chunk.Sealed, error) {
	if len(data) > maxWrite || len(data) > int(h.Reserve) {
		return chunk.Sealed{}, errkind.Invalid.Wrap("write chunk %s: %d bytes with a reserve of %d; at most %d",
			h.Key, len(data), h.Reserve, maxWrite)
	}
	h.Reserve = uint32(len(data))
	if err := validHeader(&h); err != nil {
		return chunk.Sealed{}, err
	}
	if len(sums) != int(granules(h.Reserve, h.Granule)) {
		return chunk.Sealed{}, errkind.Invalid.Wrap("write chunk %s: %d checksums for %d bytes", h.Key, len(sums), len(data))
	}
	if pageSize+len(data) > smallRecord {
		return s.writeLarge(h, data, sums)
	}
	oc, fresh, err := s.claim(&h)
	if err != nil {
		return chunk.Sealed{}, err
	}
	if !fresh {
		return s.writeAgain(&h, sums)
	}
	defer oc.gate.unlock()
	if sums == nil {
		sums = []uint64{}
	}
	err = s.placeChunk(oc, data, sums)
	s.forget(oc)
	return oc.result, err
}

func (s *Store) writeLarge(h chunk.Header, data []byte, sums []uint64) (chunk.Sealed, error) {
	if err := s.Open(h); err != nil {
		return chunk.Sealed{}, err
	}
	err := s.Put(h.Key, 0, data, sums)
	if err == nil {
		var done chunk.Sealed
		if done, err = s.Seal(h.Key, h.Reserve); err == nil {
			return done, nil
		}
	}
	if oc := s.lookup(h.Key); oc != nil {
		oc.gate.unlock()
		if derr := s.Delete([]ids.ChunkKey{h.Key}); derr != nil {
			s.log.Warn("cannot drop a chunk that could not be written", "chunk", h.Key.String(), "err", derr)
		}
	}
	return chunk.Sealed{}, err
}
