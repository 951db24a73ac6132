package store

import (
	"bytes"
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// The sizes of the segment format, docs/format/segment.md. All in bytes.
const (
	pageSize    = 4096
	headerSize  = 512 // a sector: written as a whole even when the power fails
	sealAt      = 512 // where the seal record starts in a front page
	sealFixed   = 32  // the seal record without its table
	maxGranules = 256 // entries of a checksum table
	smallRecord = 64 << 10
	formatVer   = 1
)

var (
	magicChunk   = [8]byte{'c', 'k', 'p', 't', 'c', 'h', 'n', 'k'}
	magicSegment = [8]byte{'c', 'k', 'p', 't', 's', 'e', 'g', 'm'}
	magicSeal    = uint32(0x6c616573) // "seal"
)

// place says where a front page believes to be. It counts only there: a
// segment file that was saved inside ckptfs does not look like chunks.
type place struct {
	seg ids.UUID
	off uint64 // of the front page in its segment file, bytes
}

// frontKind is what a front page holds.
type frontKind uint8

const (
	frontNone frontKind = iota // nothing that belongs here
	frontOpen                  // a chunk without a valid seal record
	frontSeal                  // a sealed chunk
	frontZero                  // a deleted chunk, or nothing yet
)

// front is a decoded front page.
type front struct {
	header chunk.Header
	length uint32
	digest uint64
	sums   []uint64
}

// headerRecord is what the header sector holds between its magic and its checksum.
type headerRecord struct {
	place
	h *chunk.Header
}

// Code encodes or decodes the record.
func (r *headerRecord) Code(c *codec.Coder) {
	ver := uint8(formatVer)
	c.U8(&ver)
	if ver != formatVer {
		c.Fail("front page version %d", ver)
		return
	}
	c.UUID(&r.seg)
	c.U64(&r.off)
	c.BlockID(&r.h.Key.Block)
	c.U8(&r.h.Key.Index)
	c.Layout(&r.h.Layout)
	u := uint64(r.h.Ino)
	c.U64(&u)
	r.h.Ino = setIf(c, r.h.Ino, ids.Ino(u))
	c.U64(&r.h.FileOff)
	w := uint64(r.h.Session)
	c.U64(&w)
	r.h.Session = setIf(c, r.h.Session, ids.Session(w))
	c.U32(&r.h.Reserve)
	c.U8(&r.h.Granule)
	n := uint8(len(r.h.Siblings))
	c.U8(&n)
	if c.Reading() {
		if n > ids.MaxK+ids.MaxM {
			c.Fail("%d siblings", n)
			return
		}
		r.h.Siblings = nil
		if n > 0 {
			r.h.Siblings = make([]ids.DiskID, n)
		}
	}
	for i := range r.h.Siblings {
		d := uint32(r.h.Siblings[i])
		c.U32(&d)
		r.h.Siblings[i] = setIf(c, r.h.Siblings[i], ids.DiskID(d))
	}
}

// setIf returns decoded when decoding and old otherwise, so that encoding
// never writes to a value that others may be reading.
func setIf[T any](c *codec.Coder, old, decoded T) T {
	if c.Reading() {
		return decoded
	}
	return old
}

// encodeFront writes the header sector of a chunk into page and clears the rest.
func encodeFront(page []byte, at place, h *chunk.Header) {
	clear(page[:pageSize])
	rec := append(page[:0:headerSize], magicChunk[:]...)
	codec.Encode(rec, &headerRecord{place: at, h: copyHeader(h)})
	putSum(page[:headerSize])
}

func copyHeader(h *chunk.Header) *chunk.Header {
	c := *h
	return &c
}

// encodeSeal writes the seal record behind the header sector in page.
func encodeSeal(page []byte, length uint32, digest uint64, sums []uint64) {
	p := page[sealAt:pageSize]
	clear(p)
	binary.LittleEndian.PutUint32(p[0:], magicSeal)
	binary.LittleEndian.PutUint32(p[4:], length)
	binary.LittleEndian.PutUint32(p[8:], uint32(len(sums)))
	binary.LittleEndian.PutUint64(p[16:], digest)
	putTable(p[sealFixed:], sums)
	binary.LittleEndian.PutUint64(p[24:], sealSum(page, len(sums)))
}

// sealSum binds the seal record to the header in front of it, so that a torn
// page never joins a new header to an older seal.
func sealSum(page []byte, n int) uint64 {
	h := xxh3.New()
	_, _ = h.Write(page[headerSize-8 : headerSize])
	_, _ = h.Write(page[sealAt : sealAt+24])
	_, _ = h.Write(page[sealAt+sealFixed : sealAt+sealFixed+8*n])
	return h.Sum64()
}

func putTable(p []byte, sums []uint64) {
	for i, s := range sums {
		binary.LittleEndian.PutUint64(p[8*i:], s)
	}
}

// tableDigest is the digest of a chunk: XXH3-64 of its little-endian table.
func tableDigest(sums []uint64) uint64 {
	p := make([]byte, 8*len(sums))
	putTable(p, sums)
	return xxh3.Hash(p)
}

// putSum fills the last eight bytes of p with the checksum of those before.
func putSum(p []byte) {
	n := len(p) - 8
	binary.LittleEndian.PutUint64(p[n:], xxh3.Hash(p[:n]))
}

func sumOK(p []byte) bool {
	n := len(p) - 8
	return binary.LittleEndian.Uint64(p[n:]) == xxh3.Hash(p[:n])
}

// decodeFront says what a page is at the place where it was read.
func decodeFront(page []byte, at place) (frontKind, front) {
	var f front
	if len(page) < pageSize || !bytes.Equal(page[:8], magicChunk[:]) || !sumOK(page[:headerSize]) {
		if len(page) >= headerSize && allZero(page[:headerSize]) {
			return frontZero, f
		}
		return frontNone, f
	}
	rec := headerRecord{h: &f.header}
	if !decodeSector(page, &rec) || rec.place != at || validHeader(&f.header) != nil {
		return frontNone, front{}
	}
	if decodeSeal(page, &f) {
		return frontSeal, f
	}
	return frontOpen, f
}

// decodeSector reads what a header sector holds behind its magic; the rest of it is zero.
func decodeSector(page []byte, m codec.Message) bool {
	rest, err := codec.DecodePrefix(page[8:headerSize-8], m)
	return err == nil && allZero(rest)
}

func allZero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

func decodeSeal(page []byte, f *front) bool {
	p := page[sealAt:pageSize]
	n := binary.LittleEndian.Uint32(p[8:])
	if binary.LittleEndian.Uint32(p) != magicSeal || n > maxGranules ||
		binary.LittleEndian.Uint64(p[24:]) != sealSum(page, int(n)) {
		return false
	}
	f.length = binary.LittleEndian.Uint32(p[4:])
	f.digest = binary.LittleEndian.Uint64(p[16:])
	if f.length > f.header.Reserve || n != granules(f.length, f.header.Granule) {
		return false
	}
	f.sums = make([]uint64, n)
	for i := range f.sums {
		f.sums[i] = binary.LittleEndian.Uint64(p[sealFixed+8*i:])
	}
	return true
}

// granules is the number of checksum granules in length bytes.
func granules(length uint32, granule uint8) uint32 {
	return uint32((uint64(length) + 1<<granule - 1) >> granule)
}

// dataPages is the number of pages that length bytes take.
func dataPages(length uint32) uint32 { return (length + pageSize - 1) / pageSize }

// reservedPages is what a chunk of at most reserve bytes takes, front page included.
func reservedPages(reserve uint32) uint32 { return 1 + dataPages(reserve) }

// validHeader reports what is wrong with a header, or nil.
func validHeader(h *chunk.Header) error {
	bad := func(format string, args ...any) error {
		return errkind.Invalid.Wrap("chunk "+h.Key.String()+": "+format, args...)
	}
	switch {
	case h.Key.Block.IsZero():
		return bad("no block id")
	case h.Granule < 12 || h.Granule > 20:
		return bad("checksum granule 2^%d; want 2^12 to 2^20", h.Granule)
	case h.Reserve > ids.MaxChunk:
		return bad("reserve of %d bytes; at most %d", h.Reserve, ids.MaxChunk)
	case granules(h.Reserve, h.Granule) > maxGranules:
		return bad("reserve of %d bytes has more than %d granules of %d", h.Reserve, maxGranules, 1<<h.Granule)
	case len(h.Siblings) > ids.MaxK+ids.MaxM:
		return bad("%d siblings", len(h.Siblings))
	}
	if h.Layout.IsZero() {
		return bad("no layout")
	}
	if err := h.Layout.Validate(); err != nil {
		return bad("%v", err)
	}
	if int(h.Key.Index) >= h.Layout.Width() {
		return bad("index beyond %s", h.Layout)
	}
	return nil
}

// sameHeader compares all fields.
func sameHeader(a, b *chunk.Header) bool {
	if len(a.Siblings) != len(b.Siblings) {
		return false
	}
	for i := range a.Siblings {
		if a.Siblings[i] != b.Siblings[i] {
			return false
		}
	}
	return a.Key == b.Key && a.Layout == b.Layout && a.Ino == b.Ino && a.FileOff == b.FileOff && a.Session == b.Session &&
		a.Reserve == b.Reserve && a.Granule == b.Granule
}

// segHeader is the first page of a segment file.
type segHeader struct {
	disk, uuid ids.UUID
	num        uint32
	pages      uint32 // of the whole file, this one included
}

// Code encodes or decodes the header.
func (h *segHeader) Code(c *codec.Coder) {
	ver := uint8(formatVer)
	c.U8(&ver)
	if ver != formatVer {
		c.Fail("segment version %d", ver)
		return
	}
	c.UUID(&h.disk)
	c.UUID(&h.uuid)
	c.U32(&h.num)
	c.U32(&h.pages)
}

func encodeSegHeader(h segHeader) []byte {
	page := make([]byte, pageSize)
	codec.Encode(append(page[:0:headerSize], magicSegment[:]...), &h)
	putSum(page[:headerSize])
	return page
}

func decodeSegHeader(page []byte) (h segHeader, ok bool) {
	if len(page) < headerSize || !sumOK(page[:headerSize]) || !bytes.Equal(page[:8], magicSegment[:]) {
		return h, false
	}
	return h, decodeSector(page, &h) && h.pages > 1
}
