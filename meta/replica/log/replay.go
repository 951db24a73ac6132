package log

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"strings"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// Open reads the log in dir, creating an empty one when there is none.
func Open(fsys vfs.FS, dir string, opt Options) (*Log, error) {
	if opt.SegmentSize == 0 {
		opt.SegmentSize = 16 << 20
	}
	if opt.CacheBytes == 0 {
		opt.CacheBytes = 16 << 20
	}
	l := &Log{fs: fsys, dir: dir, opt: opt}
	l.mu.groups = map[uint64]*group{}
	if err := fsys.MkdirAll(dir); err != nil {
		return nil, fmt.Errorf("create the log's directory %s: %w", dir, err)
	}
	if err := fsys.SyncDir(path.Dir(dir)); err != nil {
		return nil, fmt.Errorf("sync the parent of the log's directory %s: %w", dir, err)
	}
	if err := l.openFiles(); err != nil {
		return nil, errors.Join(err, l.closeFiles(nil))
	}
	if err := l.replay(); err != nil {
		return nil, errors.Join(err, l.closeFiles(nil))
	}
	if len(l.mu.segments) == 0 {
		s, err := l.makeSegment(1, 0)
		if err != nil {
			return nil, err
		}
		l.mu.segments = []*segment{s}
	}
	return l, nil
}

// Empty reports that the log has never held anything.
func (l *Log) Empty() bool { return l.seq == 0 }

func (l *Log) openFiles() error {
	names, err := l.fs.List(l.dir)
	if err != nil {
		return fmt.Errorf("list the log in %s: %w", l.dir, err)
	}
	for _, n := range names {
		full := path.Join(l.dir, n)
		seq, ok := parseSegment(n)
		if !ok && !strings.HasPrefix(n, "spare-") {
			continue
		}
		f, err := l.fs.Open(full)
		if err != nil {
			return fmt.Errorf("open log segment %s: %w", full, err)
		}
		size, err := f.Size()
		if err != nil {
			return errors.Join(fmt.Errorf("open log segment %s: %w", full, err), f.Close())
		}
		if !ok {
			l.prep.spares = append(l.prep.spares, spare{full, size})
			if err := f.Close(); err != nil {
				return fmt.Errorf("close log segment %s: %w", full, err)
			}
			continue
		}
		l.mu.segments = append(l.mu.segments,
			&segment{seq: seq, name: full, file: f, size: size, end: headerPage, last: map[uint64]uint64{}})
	}
	return nil
}

// replay reads all frames in order, cuts a torn end and refuses other damage.
func (l *Log) replay() error {
	broken := false
	for i, s := range l.mu.segments {
		if i > 0 && s.seq != l.mu.segments[i-1].seq+1 {
			return l.corrupt("segment %d follows segment %d: files are missing", s.seq, l.mu.segments[i-1].seq)
		}
		buf := make([]byte, s.size)
		if _, err := s.file.ReadAt(buf, 0); err != nil {
			return fmt.Errorf("read log segment %s: %w", s.name, err)
		}
		seq, header := decodeSegmentHeader(buf)
		header = header && seq == s.seq
		if !broken && header {
			if err := l.replaySegment(s, buf); err != nil {
				return err
			}
		}
		// What is behind the last good frame may only be an unfinished write.
		stale, err := l.leftovers(s, buf, header)
		if err != nil {
			return err
		}
		if stale {
			broken = true
			if err := wipe(s); err != nil {
				return err
			}
		}
	}
	l.synced = l.seq
	if err := l.dropEmpty(); err != nil {
		return err
	}
	return l.checkGroups()
}

// replaySegment applies the frames of s as far as they follow each other.
func (l *Log) replaySegment(s *segment, buf []byte) error {
	for int(s.end) < len(buf) {
		f, ok := decodeFrame(buf[s.end:])
		if !ok || f.segment != s.seq || (l.seq != 0 && f.seq != l.seq+1) {
			return nil
		}
		off := s.end
		err := decodeRecords(f.payload, func(r *record) error { return l.applyRecord(r, s, off) })
		if err != nil {
			return l.corrupt("frame %d in %s: %v", f.seq, s.name, err)
		}
		l.seq = f.seq
		s.end += int64(f.size)
	}
	return nil
}

// leftovers looks behind the last good frame for frames of this segment. One
// that was written when the missing frame was already durable proves damage.
func (l *Log) leftovers(s *segment, buf []byte, header bool) (stale bool, err error) {
	for off := int(s.end); off+frameHeader <= len(buf); off += frameAlign {
		if binary.LittleEndian.Uint32(buf[off:]) != frameMagic {
			continue
		}
		f, ok := decodeFrame(buf[off:])
		if !ok || f.segment != s.seq {
			continue
		}
		switch {
		case !header:
			return false, l.corrupt("the header of %s is damaged, but it holds frame %d", s.name, f.seq)
		case f.synced > l.seq:
			return false, l.corrupt("frame %d, which had been written durably, is missing or damaged: "+
				"frame %d at offset %d of %s came after it", l.seq+1, f.seq, off, s.name)
		}
		stale = true
	}
	return stale, nil
}

// wipe overwrites frames of a write that was never finished: they must not
// look like the continuation of what is written in their place.
func wipe(s *segment) error {
	err := writeZeros(s.file, s.end, s.size)
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("cut the torn end of log segment %s: %w", s.name, err)
	}
	return nil
}

// dropEmpty makes the last segment that holds frames the active one. An empty
// one behind it was prepared, or belonged to a torn write.
func (l *Log) dropEmpty() error {
	segs := l.mu.segments
	for len(segs) > 1 && segs[len(segs)-1].end == headerPage {
		if err := l.retire(segs[len(segs)-1]); err != nil {
			return err
		}
		segs = segs[:len(segs)-1]
	}
	if len(segs) == 1 && segs[0].end == headerPage {
		// Never used, and perhaps never finished.
		if err := l.retire(segs[0]); err != nil {
			return err
		}
		segs = nil
	}
	l.mu.segments = segs
	return nil
}

func (l *Log) checkGroups() error {
	for _, g := range l.sorted() {
		if g.floating {
			return l.corrupt("group %d: entries begin at %d, but the marker says %d", g.id, g.first, g.marker.Index)
		}
		if c := g.hard.GetCommit(); c > g.last() {
			return l.corrupt("group %d: entries end at %d, but %d was committed", g.id, g.last(), c)
		}
	}
	return nil
}

func (l *Log) corrupt(format string, args ...any) error {
	return errkind.Corrupt.Wrap("metadata log in %s: %s; do not delete anything: restore this server from another "+
		"metadata server (move its directory aside and start it empty), or from a backup", l.dir, fmt.Sprintf(format, args...))
}

// applyRecord changes the groups by one record, which lies in the frame at off of s.
func (l *Log) applyRecord(r *record, s *segment, off int64) error {
	g := l.mu.groups[r.group]
	if g == nil {
		g = newGroup(r.group)
		l.mu.groups[r.group] = g
	}
	switch r.kind {
	case recordHard:
		g.hard = r.hard()
	case recordIntent:
		m := r.marker()
		g.intent = &m
	case recordReset:
		g.reset(r.marker())
	case recordCompact:
		g.compact(r.marker())
	case recordEntry:
		return l.applyEntry(g, r, s, off)
	}
	return nil
}

func (l *Log) applyEntry(g *group, r *record, s *segment, off int64) error {
	switch {
	case r.index < g.first && g.floating:
		// It replaces entries of which the first lay in a segment that is gone.
		g.first, g.refs, g.cache, g.cacheBytes = r.index, nil, nil, 0
	case r.index < g.first:
		return fmt.Errorf("entry %d lies before the first, %d", r.index, g.first)
	case r.index > g.last()+1 && (len(g.refs) > 0 || g.floating):
		return fmt.Errorf("entry %d follows entry %d", r.index, g.last())
	case r.index > g.last()+1:
		g.first, g.floating = r.index, true
	}
	g.truncate(r.index)
	g.refs = append(g.refs, ref{term: r.term, seg: s, off: off})
	g.remember(r.entry(), l.opt.CacheBytes)
	s.last[g.id] = max(s.last[g.id], r.index)
	return nil
}

// truncate drops the entries from index on.
func (g *group) truncate(index uint64) {
	for g.last() >= index && len(g.refs) > 0 {
		g.refs = g.refs[:len(g.refs)-1]
		if n := len(g.cache); n > 0 {
			g.cacheBytes -= len(g.cache[n-1].GetData()) + entryOverhead
			g.cache = g.cache[:n-1]
		}
	}
}

func (g *group) remember(e *pb.Entry, limit int) {
	g.cache = append(g.cache, e)
	g.cacheBytes += len(e.GetData()) + entryOverhead
	for g.cacheBytes > limit && len(g.cache) > 1 {
		g.forgetFirst()
	}
}

func (g *group) forgetFirst() {
	g.cacheBytes -= len(g.cache[0].GetData()) + entryOverhead
	g.cache[0] = nil
	g.cache = g.cache[1:]
}

// compact forgets entries up to the marker.
func (g *group) compact(m Marker) {
	if m.Index < g.marker.Index {
		return
	}
	g.marker = m
	if m.Index+1 >= g.first {
		g.floating = false
	}
	if m.Index < g.first {
		return
	}
	n := min(m.Index+1-g.first, uint64(len(g.refs)))
	g.refs = append([]ref(nil), g.refs[n:]...)
	g.first = m.Index + 1
	for len(g.cache) > len(g.refs) {
		g.forgetFirst()
	}
}

// reset forgets all entries.
func (g *group) reset(m Marker) {
	g.marker, g.intent, g.floating = m, nil, false
	g.first, g.refs = m.Index+1, nil
	g.cache, g.cacheBytes = nil, 0
	if g.hard.GetCommit() < m.Index {
		g.hard.Commit = new(m.Index)
	}
}
