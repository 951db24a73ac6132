package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// The checkpoint log keeps the index: batches of changes, appended at each
// checkpoint and synced once; docs/format/segment.md. It replaces an ordered
// database, because the index in memory is all that is ever searched: what is
// needed on disk is only a way to get it back, and a log costs one sequential
// write of 48 bytes a chunk instead of rewritten pages, and works the same in
// the simulation.

const (
	logDir      = "index"
	logSuffix   = ".log"
	logTemp     = "new"
	batchHeader = 32      // bytes in front of a batch's payload
	batchTarget = 2 << 20 // payload bytes at which a checkpoint starts another batch
	maxBatch    = 4 << 20 // payload bytes that a reader accepts
	logAhead    = 4 << 20 // bytes allocated at a time
	windowSize  = 1 << 20 // bytes read at a time
	logSpare    = 1 << 20 // bytes kept allocated behind the end, for a full disk
)

var (
	magicLog   = [8]byte{'c', 'k', 'p', 't', 'i', 'n', 'd', 'x'}
	magicBatch = uint32(0x74616269) // "ibat"
)

// errLogDamaged says that the log has an unreadable batch before readable ones.
var errLogDamaged = errors.New("checkpoint log is damaged")

// segRecord is a segment as of a checkpoint.
type segRecord struct {
	num     uint32
	uuid    ids.UUID
	pages   uint32
	removed bool
	punched spans
}

// activeRun is a range in which chunks may have been made since the checkpoint.
type activeRun struct {
	seg uint32
	span
}

// batch is the unit of the log. A checkpoint is a row of batches of which only
// the last has more unset; it counts only when that one is there. Each is
// synced before the next is written, so that an unreadable batch in front of a
// readable one can only be damage.
type batch struct {
	more      bool
	puts      []entry
	drops     []ids.ChunkKey
	segs      []segRecord
	setActive bool // active replaces the list before it
	active    []activeRun
}

func codeSpan(c *codec.Coder, s *span) {
	c.U32(&s.lo)
	c.U32(&s.hi)
	if s.lo >= s.hi {
		c.Fail("range of pages %d to %d", s.lo, s.hi)
	}
}

// Code encodes or decodes the batch.
func (b *batch) Code(c *codec.Coder) {
	c.Bool(&b.more)
	codec.Slice(c, &b.puts, func(c *codec.Coder, e *entry) { e.Code(c) })
	codec.Slice(c, &b.drops, func(c *codec.Coder, k *ids.ChunkKey) {
		c.BlockID(&k.Block)
		c.U8(&k.Index)
	})
	codec.Slice(c, &b.segs, func(c *codec.Coder, s *segRecord) {
		c.U32(&s.num)
		c.UUID(&s.uuid)
		c.U32(&s.pages)
		c.Bool(&s.removed)
		codec.Slice(c, (*[]span)(&s.punched), codeSpan)
	})
	c.Bool(&b.setActive)
	codec.Slice(c, &b.active, func(c *codec.Coder, r *activeRun) {
		c.U32(&r.seg)
		codeSpan(c, &r.span)
	})
}

// encodeBatch appends the batch, filled up to whole pages.
func encodeBatch(dst []byte, seq, prev uint64, b *batch) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, batchHeader)...)
	dst = codec.Encode(dst, b)
	p := dst[start:]
	binary.LittleEndian.PutUint32(p[0:], magicBatch)
	binary.LittleEndian.PutUint32(p[4:], uint32(len(p)-batchHeader))
	binary.LittleEndian.PutUint64(p[8:], seq)
	binary.LittleEndian.PutUint64(p[16:], prev)
	binary.LittleEndian.PutUint64(p[24:], batchSum(p))
	return append(dst, make([]byte, -len(p)&(pageSize-1))...)
}

func batchSum(p []byte) uint64 {
	h := xxh3.New()
	_, _ = h.Write(p[:24])
	_, _ = h.Write(p[batchHeader:])
	return h.Sum64()
}

// batchHead is what stands in front of a batch's payload. prev is the sum of
// the batch before it, so that what is left of an abandoned attempt never
// continues a later one.
type batchHead struct {
	seq, prev, sum uint64
	size           int // bytes that the batch takes, whole pages
}

// decodeBatch reads the batch at the start of p.
func decodeBatch(p []byte, b *batch) (h batchHead, ok bool) {
	if len(p) < batchHeader || binary.LittleEndian.Uint32(p) != magicBatch {
		return h, false
	}
	n := int(binary.LittleEndian.Uint32(p[4:]))
	if n > maxBatch || n > len(p)-batchHeader {
		return h, false
	}
	p = p[:batchHeader+n]
	h = batchHead{
		seq:  binary.LittleEndian.Uint64(p[8:]),
		prev: binary.LittleEndian.Uint64(p[16:]),
		sum:  binary.LittleEndian.Uint64(p[24:]),
		size: (len(p) + pageSize - 1) &^ (pageSize - 1),
	}
	if h.seq == 0 || h.sum != batchSum(p) || codec.Decode(bytes.Clone(p[batchHeader:]), b) != nil {
		return h, false
	}
	return h, true
}

// ckptLog is the open log. Used by one task at a time.
type ckptLog struct {
	fs        vfs.FS
	file      vfs.File
	gen       uint64 // of the file, in its name
	seq       uint64 // of the last batch
	prev      uint64 // its sum
	end       int64  // where the next batch goes
	allocated int64
	cut       bool // the file ends with an unfinished checkpoint
}

func logName(gen uint64) string { return fmt.Sprintf("%s/%016d%s", logDir, gen, logSuffix) }

type logHeader struct {
	disk ids.UUID
	gen  uint64
}

// Code encodes or decodes the header.
func (h *logHeader) Code(c *codec.Coder) {
	ver := uint8(formatVer)
	c.U8(&ver)
	if ver != formatVer {
		c.Fail("checkpoint log version %d", ver)
		return
	}
	c.UUID(&h.disk)
	c.U64(&h.gen)
}

func encodeLogHeader(h logHeader) []byte {
	page := make([]byte, pageSize)
	codec.Encode(append(page[:0:headerSize], magicLog[:]...), &h)
	putSum(page[:headerSize])
	return page
}

func decodeLogHeader(page []byte) (h logHeader, ok bool) {
	if len(page) < headerSize || !sumOK(page[:headerSize]) || !bytes.Equal(page[:8], magicLog[:]) {
		return h, false
	}
	return h, decodeSector(page, &h)
}

// createLog writes a new generation from the batches that next yields until
// it returns nil, and makes it the current one, atomically.
func createLog(f vfs.FS, disk ids.UUID, gen, seq uint64, next func() *batch) (*ckptLog, error) {
	temp := logDir + "/" + logTemp
	if err := f.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	file, err := f.Create(temp)
	if err != nil {
		return nil, err
	}
	l := &ckptLog{fs: f, file: file, gen: gen, seq: seq, end: pageSize}
	_, err = file.WriteAt(encodeLogHeader(logHeader{disk, gen}), 0)
	for err == nil {
		b := next()
		if b == nil {
			break
		}
		err = l.write(b)
	}
	if err == nil {
		err = l.reserve(0)
	}
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = f.Rename(temp, logName(gen))
	}
	if err == nil {
		err = f.SyncDir(logDir)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return l, nil
}

// reserve makes sure that n bytes and the spare are allocated behind the end.
// A full disk is an error only when n itself does not fit.
func (l *ckptLog) reserve(n int64) error {
	if l.allocated >= l.end+n+logSpare {
		return nil
	}
	size := n + logSpare + logAhead
	if err := l.file.Allocate(l.end, size); err != nil {
		if l.allocated >= l.end+n {
			return nil
		}
		return err
	}
	l.allocated = l.end + size
	return nil
}

func (l *ckptLog) write(b *batch) error {
	p := encodeBatch(nil, l.seq+1, l.prev, b)
	if err := l.reserve(int64(len(p))); err != nil {
		return err
	}
	if _, err := l.file.WriteAt(p, l.end); err != nil {
		return err
	}
	l.seq++
	l.prev = binary.LittleEndian.Uint64(p[24:])
	l.end += int64(len(p))
	return nil
}

// append writes batches and syncs each. After an error the log is as before,
// unless the sync itself failed: then the caller must stop writing.
func (l *ckptLog) append(bs []batch) error {
	seq, prev, end := l.seq, l.prev, l.end
	for i := range bs {
		err := l.write(&bs[i])
		if err == nil {
			err = l.file.Sync()
		}
		if err != nil {
			l.seq, l.prev, l.end = seq, prev, end
			return err
		}
	}
	return nil
}

// generations lists the log files, oldest first.
func generations(f vfs.FS) ([]uint64, error) {
	names, err := f.List(logDir)
	if err != nil {
		return nil, err
	}
	var out []uint64
	for _, name := range names {
		var gen uint64
		if !strings.HasSuffix(name, logSuffix) {
			continue
		}
		if _, err := fmt.Sscanf(name, "%d", &gen); err == nil && logName(gen) == logDir+"/"+name {
			out = append(out, gen)
		}
	}
	return out, nil
}

// readLog opens a generation and gives each complete checkpoint's batches to
// apply. errLogDamaged when a batch in the middle cannot be read.
func readLog(f vfs.FS, disk ids.UUID, gen uint64, apply func(*batch)) (*ckptLog, error) {
	file, err := f.Open(logName(gen))
	if err != nil {
		return nil, err
	}
	l := &ckptLog{fs: f, file: file, gen: gen}
	if err := l.replay(disk, apply); err != nil {
		file.Close()
		return nil, err
	}
	return l, nil
}

func (l *ckptLog) replay(disk ids.UUID, apply func(*batch)) error {
	size, err := l.file.Size()
	if err != nil {
		return err
	}
	w := window{r: l.file, size: size}
	head, err := w.at(0, pageSize)
	if err != nil {
		return err
	}
	if h, ok := decodeLogHeader(head); !ok || h.disk != disk || h.gen != l.gen {
		return fmt.Errorf("header: %w", errLogDamaged)
	}
	l.end, l.allocated = pageSize, size
	var waiting []*batch // of a checkpoint whose last batch has not been read
	last := batchHead{}
	for off := l.end; off < size; {
		p, err := w.batch(off)
		if err != nil {
			return err
		}
		b := new(batch)
		h, ok := decodeBatch(p, b)
		if !ok || last.seq != 0 && h.seq != last.seq+1 || h.prev != last.sum {
			l.cut = len(waiting) > 0
			return l.checkEnd(&w, off, last.seq+1)
		}
		off += int64(h.size)
		last = h
		waiting = append(waiting, b)
		if b.more {
			continue
		}
		for _, b := range waiting {
			apply(b)
		}
		waiting = nil
		l.seq, l.prev, l.end = h.seq, h.sum, off
	}
	l.cut = len(waiting) > 0
	return nil
}

// checkEnd looks for a newer batch behind what should be the end.
func (l *ckptLog) checkEnd(w *window, off int64, seq uint64) error {
	for off += pageSize; off < w.size; off += pageSize {
		p, err := w.at(off, batchHeader)
		if err != nil {
			return err
		}
		if len(p) < batchHeader || binary.LittleEndian.Uint32(p) != magicBatch {
			continue
		}
		if p, err = w.batch(off); err != nil {
			return err
		}
		if h, ok := decodeBatch(p, new(batch)); ok && h.seq > seq {
			return fmt.Errorf("batch %d follows an unreadable one: %w", h.seq, errLogDamaged)
		}
	}
	return nil
}

// window reads a file in large pieces.
type window struct {
	r    io.ReaderAt
	size int64
	buf  []byte
	off  int64
}

// batch returns the bytes at off that a batch there would take.
func (w *window) batch(off int64) ([]byte, error) {
	p, err := w.at(off, batchHeader)
	if err != nil || len(p) < batchHeader {
		return p, err
	}
	return w.at(off, batchHeader+int(min(binary.LittleEndian.Uint32(p[4:]), maxBatch)))
}

// at returns up to n bytes at off, fewer only at the end of the file. They are
// valid until the next call.
func (w *window) at(off int64, n int) ([]byte, error) {
	n = int(min(int64(n), w.size-off))
	if off < w.off || off+int64(n) > w.off+int64(len(w.buf)) {
		want := min(w.size-off, max(int64(n), windowSize))
		if int64(cap(w.buf)) < want {
			w.buf = make([]byte, want)
		}
		w.buf, w.off = w.buf[:want], off
		if k, err := w.r.ReadAt(w.buf, off); err != nil && (!errors.Is(err, io.EOF) || k != int(want)) {
			w.buf = nil
			return nil, err
		}
	}
	return w.buf[off-w.off:][:n], nil
}
