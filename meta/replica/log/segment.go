package log

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptfs/ckptfs/internal/vfs"
)

// A segment file: a header page, then frames.
const (
	segmentMagic   = "CKPTLOG\x00"
	segmentVersion = 1
	headerPage     = 4096
	headerSize     = 32
	zeroPiece      = 1 << 20
)

// segment is an open file of the log.
type segment struct {
	seq  uint64
	name string
	file vfs.File
	size int64 // of the file
	end  int64 // where the next frame goes
	// last is, for each group, the highest index that an entry in it has.
	last map[uint64]uint64
}

func segmentName(seq uint64) string { return fmt.Sprintf("seg-%016x", seq) }

func parseSegment(name string) (uint64, bool) {
	hex, ok := strings.CutPrefix(name, "seg-")
	if !ok || len(hex) != 16 {
		return 0, false
	}
	seq, err := strconv.ParseUint(hex, 16, 64)
	return seq, err == nil
}

func encodeSegmentHeader(seq uint64) []byte {
	p := make([]byte, 0, headerPage)
	p = append(p, segmentMagic...)
	p = binary.LittleEndian.AppendUint16(p, segmentVersion)
	p = append(p, make([]byte, 6)...)
	p = binary.LittleEndian.AppendUint64(p, seq)
	p = binary.LittleEndian.AppendUint32(p, 0)
	p = binary.LittleEndian.AppendUint32(p, crc32.Checksum(p, castagnoli))
	return p[:headerPage]
}

// decodeSegmentHeader returns the segment's number, false when there is no
// undamaged header.
func decodeSegmentHeader(p []byte) (uint64, bool) {
	if len(p) < headerSize || string(p[:8]) != segmentMagic ||
		binary.LittleEndian.Uint32(p[28:]) != crc32.Checksum(p[:28], castagnoli) {
		return 0, false
	}
	return binary.LittleEndian.Uint64(p[16:]), binary.LittleEndian.Uint16(p[8:]) == segmentVersion
}

// The functions below are called with prep held.

// makeSegment creates segment seq with room for need bytes of frames, out of a
// spare file when one is large enough, and makes it durable. Space that was
// written before syncs several times faster than fresh space, so a fresh file
// is filled with zeros once.
func (l *Log) makeSegment(seq uint64, need int64) (*segment, error) {
	s := &segment{seq: seq, name: path.Join(l.dir, segmentName(seq)), end: headerPage, last: map[uint64]uint64{}}
	want := max(l.opt.SegmentSize, need+headerPage)
	var err error
	if s.file, s.size, err = l.takeSpare(s.name, want); err != nil {
		return nil, err
	}
	if s.file == nil {
		if s.file, err = freshFile(l.fs, s.name, want); err != nil {
			return nil, fmt.Errorf("create log segment %s: %w", s.name, err)
		}
		s.size = want
	}
	if _, err = s.file.WriteAt(encodeSegmentHeader(seq), 0); err == nil {
		err = s.file.Sync()
	}
	if err == nil {
		err = l.fs.SyncDir(l.dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start log segment %s: %w", s.name, err), s.file.Close())
	}
	return s, nil
}

func freshFile(fsys vfs.FS, name string, size int64) (vfs.File, error) {
	f, err := fsys.Create(name)
	if errors.Is(err, fs.ErrExist) {
		// Left by a preparation that failed half-way.
		if err = fsys.Remove(name); err == nil {
			f, err = fsys.Create(name)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := f.Allocate(0, size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := writeZeros(f, 0, size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func writeZeros(f vfs.File, from, to int64) error {
	zeros := make([]byte, min(zeroPiece, to-from))
	for off := from; off < to; off += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), to-off)], off); err != nil {
			return err
		}
	}
	return nil
}

// takeSpare renames a spare file of at least want bytes to name; nil when there
// is none.
func (l *Log) takeSpare(name string, want int64) (vfs.File, int64, error) {
	for i, sp := range l.prep.spares {
		if sp.size < want {
			continue
		}
		if err := l.fs.Rename(sp.name, name); err != nil {
			return nil, 0, fmt.Errorf("reuse log segment %s: %w", sp.name, err)
		}
		l.prep.spares = append(l.prep.spares[:i:i], l.prep.spares[i+1:]...)
		f, err := l.fs.Open(name)
		if err != nil {
			return nil, 0, fmt.Errorf("reuse log segment %s: %w", name, err)
		}
		return f, sp.size, nil
	}
	return nil, 0, nil
}

// maxSpares bounds the files kept for reuse.
const maxSpares = 2

type spare struct {
	name string
	size int64
}

// spareName returns a name that no spare has. Not the segment's number: an
// empty segment that is prepared again after each start would have it twice.
func (l *Log) spareName() string {
	for i := 0; ; i++ {
		name := path.Join(l.dir, fmt.Sprintf("spare-%d", i))
		if !slices.ContainsFunc(l.prep.spares, func(s spare) bool { return s.name == name }) {
			return name
		}
	}
}

// retire turns a segment into a spare, or removes it.
func (l *Log) retire(s *segment) error {
	if err := s.file.Close(); err != nil {
		return fmt.Errorf("close log segment %s: %w", s.name, err)
	}
	if len(l.prep.spares) >= maxSpares {
		if err := l.fs.Remove(s.name); err != nil {
			return fmt.Errorf("remove log segment %s: %w", s.name, err)
		}
		return nil
	}
	name := l.spareName()
	if err := l.fs.Rename(s.name, name); err != nil {
		return fmt.Errorf("retire log segment %s: %w", s.name, err)
	}
	l.prep.spares = append(l.prep.spares, spare{name, s.size})
	return nil
}
