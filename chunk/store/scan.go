package store

import (
	"errors"
	"io"

	"github.com/zeebo/xxh3"
)

const readAhead = 256 // pages that are read at once when one follows another

// pageReader reads pages of a segment: alone when they lie apart, many at once
// when they follow each other.
type pageReader struct {
	seg *segment
	buf []byte
	lo  uint32 // page at the start of buf
	hi  uint32
}

// read returns a page below hi; it is valid until the next call.
func (r *pageReader) read(page, hi uint32) ([]byte, error) {
	if page < r.lo || page >= r.hi {
		n := uint32(1)
		if page == r.hi && r.hi > 0 {
			n = min(readAhead, hi-page)
		}
		if r.buf == nil {
			r.buf = make([]byte, readAhead*pageSize)
		}
		buf := r.buf[:n*pageSize]
		k, err := r.seg.file.ReadAt(buf, int64(page)*pageSize)
		if err != nil && !errors.Is(err, io.EOF) {
			r.lo, r.hi = 0, 0
			return nil, err
		}
		clear(buf[k:])
		r.lo, r.hi = page, page+n
	}
	at := (page - r.lo) * pageSize
	return r.buf[at : at+pageSize], nil
}

// intact compares a sealed chunk's data with its checksums.
func intact(seg *segment, page uint32, f *front) bool {
	if tableDigest(f.sums) != f.digest {
		return false
	}
	g := uint32(1) << f.header.Granule
	buf := make([]byte, g)
	base := int64(page+1) * pageSize
	for i, want := range f.sums {
		p := buf[:min(g, f.length-uint32(i)*g)]
		n, err := seg.file.ReadAt(p, base+int64(i)*int64(g))
		if n < len(p) && err != nil || xxh3.Hash(p) != want {
			return false
		}
	}
	return true
}
