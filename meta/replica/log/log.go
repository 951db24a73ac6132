// Package log is the raft log: entries and raft's hard state of one or several
// groups, in segment files. What Append with sync returned for is there after
// any crash. A torn last write is cut off at the next Open; damage before it is
// refused. See docs/format/log.md.
//
// Open, Append, Compact and Close are called by one task at a time; Prepare and
// the Storage views may be used by others meanwhile. Lock order: prep before mu.
package log

import (
	"fmt"
	"path"
	"sort"
	"sync"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// Marker is a position up to which everything is in the store, and the voters there.
type Marker struct {
	Index, Term uint64
	Voters      []uint64
}

// Options of a log.
type Options struct {
	SegmentSize int64 // bytes; default 16 MiB
	CacheBytes  int   // entries kept in memory for each group; default 16 MiB
}

// maxFrame bounds a frame unless a single record is larger, in bytes.
const maxFrame = 4 << 20

// Log is an open log.
type Log struct {
	fs     vfs.FS
	dir    string
	opt    Options
	seq    uint64   // of the last frame
	synced uint64   // frames up to here are durable
	pend   []byte   // records that wait for the next synced frame
	failed error    // sticks
	prep   struct { // files for segments to come
		sync.Mutex
		spares []spare
		next   *segment
	}
	mu struct { // guards what Storage reads
		sync.Mutex
		segments []*segment // in order; the last takes the next frame
		groups   map[uint64]*group
	}
}

// group is what is known about one raft group.
type group struct {
	id     uint64
	hard   *pb.HardState
	marker Marker
	intent *Marker // a copy that was about to be installed
	snap   Marker  // what Storage.Snapshot offers
	first  uint64  // index of refs[0]
	refs   []ref
	// cache holds the last len(cache) entries of refs.
	cache      []*pb.Entry
	cacheBytes int
	// floating: entries began past marker+1 while replaying; a later marker
	// must explain it.
	floating bool
}

// ref says where an entry lies.
type ref struct {
	term uint64
	seg  *segment
	off  int64 // of its frame
}

func (g *group) last() uint64 { return g.first + uint64(len(g.refs)) - 1 }

func newGroup(id uint64) *group { return &group{id: id, hard: &pb.HardState{}, first: 1} }

// Write is a change of one group.
type Write struct {
	Group   uint64
	Reset   *Marker // the store was replaced: forget all entries. Comes first.
	Intent  *Marker // the store is about to be replaced
	Entries []*pb.Entry
	Hard    *pb.HardState // nil: unchanged
}

func (w *Write) records(fn func(record)) {
	if w.Reset != nil {
		fn(markerRecord(recordReset, w.Group, *w.Reset))
	}
	if w.Intent != nil {
		fn(markerRecord(recordIntent, w.Group, *w.Intent))
	}
	for _, e := range w.Entries {
		fn(entryRecord(w.Group, e))
	}
	if w.Hard != nil {
		fn(hardRecord(w.Group, w.Hard))
	}
}

// Append adds the writes, in order. With sync it returns when they, and all
// before them, are durable. Without it they may be lost in a crash, and are
// written together with the next synced ones. After an error the log takes
// nothing more: what is on the disk is unknown.
func (l *Log) Append(writes []Write, sync bool) error {
	if l.failed != nil {
		return l.failed
	}
	b := l.newBatch()
	for i := range writes {
		sync = sync || len(writes[i].Entries) > 0
		writes[i].records(func(r record) { b.add(&r) })
	}
	if !sync {
		b.apply(l, nil, 0)
		l.pend = b.payload
		return nil
	}
	if err := l.write(&b); err != nil {
		l.failed = errkind.Internal.Wrap("write the metadata log in %s: %v; what is on the disk is unknown: "+
			"this server must stop", l.dir, err)
		return l.failed
	}
	return nil
}

// batch collects records for one frame, or several when it is large.
type batch struct {
	payload []byte
	pending int      // length of what earlier calls left at the start of payload
	fresh   []record // those not yet applied to the groups
}

func (l *Log) newBatch() batch {
	b := batch{payload: l.pend, pending: len(l.pend)}
	l.pend = nil
	return b
}

func (b *batch) add(r *record) {
	b.payload = codec.Encode(b.payload, r)
	b.fresh = append(b.fresh, *r)
}

// apply makes the records visible to Storage.
func (b *batch) apply(l *Log, s *segment, off int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range b.fresh {
		// Entries come from raft, which never leaves a gap.
		if err := l.applyRecord(&b.fresh[i], s, off); err != nil {
			panic(err)
		}
	}
	b.fresh = nil
}

// write writes the batch as frames and syncs.
func (l *Log) write(b *batch) error {
	for _, part := range b.split() {
		if err := l.writeFrame(&part); err != nil {
			return err
		}
	}
	if err := l.active().file.Sync(); err != nil {
		return err
	}
	l.synced = l.seq
	return nil
}

// split divides a batch that is too large for one frame.
func (b *batch) split() []batch {
	if len(b.payload) <= maxFrame || len(b.fresh) < 2 {
		return []batch{*b}
	}
	parts := []batch{{payload: b.payload[:b.pending:b.pending]}}
	for i := range b.fresh {
		p := &parts[len(parts)-1]
		if len(p.payload) > 0 && len(p.payload)+len(b.fresh[i].data) > maxFrame {
			parts = append(parts, batch{})
			p = &parts[len(parts)-1]
		}
		p.add(&b.fresh[i])
	}
	return parts
}

func (l *Log) active() *segment { return l.mu.segments[len(l.mu.segments)-1] }

// writeFrame writes one frame to the active segment or, when that has no room,
// to a new one. The entries become visible at once: raft asks for them only
// after it was told that they are durable.
func (l *Log) writeFrame(b *batch) error {
	s := l.active()
	if s.end+int64(padded(frameHeader+len(b.payload))) > s.size {
		var err error
		if s, err = l.rotate(b); err != nil {
			return err
		}
	}
	buf := appendFrame(nil, frame{segment: s.seq, seq: l.seq + 1, synced: l.synced, payload: b.payload})
	if _, err := s.file.WriteAt(buf, s.end); err != nil {
		return err
	}
	l.seq++
	off := s.end
	s.end += int64(len(buf))
	b.apply(l, s, off)
	return nil
}

// rotate starts the next segment. It begins with the state of all groups, so
// that older segments can go.
func (l *Log) rotate(b *batch) (*segment, error) {
	if err := l.active().file.Sync(); err != nil {
		return nil, err
	}
	l.synced = l.seq
	state := l.state()
	b.payload = append(state, b.payload...)
	need := int64(padded(frameHeader + len(b.payload)))
	l.prep.Lock()
	defer l.prep.Unlock()
	s := l.prep.next
	l.prep.next = nil
	if s != nil && s.end+need > s.size {
		if err := l.retire(s); err != nil {
			return nil, err
		}
		s = nil
	}
	if s == nil {
		var err error
		if s, err = l.makeSegment(l.active().seq+1, need); err != nil {
			return nil, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.segments = append(l.mu.segments, s)
	return s, nil
}

// state encodes markers and hard states of all groups.
func (l *Log) state() (p []byte) {
	for _, g := range l.sorted() {
		for _, r := range []record{markerRecord(recordCompact, g.id, g.marker), hardRecord(g.id, g.hard)} {
			p = codec.Encode(p, &r)
		}
		if g.intent != nil {
			r := markerRecord(recordIntent, g.id, *g.intent)
			p = codec.Encode(p, &r)
		}
	}
	return p
}

func (l *Log) sorted() []*group {
	groups := make([]*group, 0, len(l.mu.groups))
	for _, g := range l.mu.groups {
		groups = append(groups, g)
	}
	sort.Slice(groups, func(i, j int) bool { return groups[i].id < groups[j].id })
	return groups
}

// Prepare makes the next segment ready, so that starting it costs no time. To
// be called now and then, by one task.
func (l *Log) Prepare() error {
	l.prep.Lock()
	defer l.prep.Unlock()
	l.mu.Lock()
	segs := l.mu.segments
	l.mu.Unlock()
	if l.prep.next != nil || len(segs) == 0 {
		return nil
	}
	s, err := l.makeSegment(segs[len(segs)-1].seq+1, 0)
	if err != nil {
		return err
	}
	l.prep.next = s
	return nil
}

// Compact drops the oldest segments while the log is larger than retain bytes,
// but only those whose entries of the group are all at or below upTo, which is
// durable in the store. Entries of other groups keep a segment too.
func (l *Log) Compact(id uint64, upTo uint64, retain int64) error {
	if l.failed != nil {
		return l.failed
	}
	g := l.mu.groups[id]
	if g == nil {
		return nil
	}
	drop, to := l.droppable(g, upTo, retain)
	if drop == 0 {
		return nil
	}
	if to > g.marker.Index {
		term, err := l.termLocked(g, to)
		if err != nil {
			return err
		}
		b := l.newBatch()
		r := markerRecord(recordCompact, id, Marker{Index: to, Term: term, Voters: g.marker.Voters})
		b.add(&r)
		if err := l.write(&b); err != nil {
			l.failed = fmt.Errorf("write a marker to the metadata log in %s: %w", l.dir, err)
			return l.failed
		}
	}
	return l.drop(drop)
}

func (l *Log) termLocked(g *group, index uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return g.term(index)
}

// droppable counts the oldest segments that may go, and the highest index in them.
func (l *Log) droppable(g *group, upTo uint64, retain int64) (n int, to uint64) {
	var total int64
	for _, s := range l.mu.segments {
		total += s.size
	}
	for _, s := range l.mu.segments[:len(l.mu.segments)-1] {
		if total <= retain {
			break
		}
		for id, last := range s.last {
			other := l.mu.groups[id]
			if (id == g.id && last > upTo) || (id != g.id && last > other.marker.Index) {
				return n, to
			}
		}
		to = max(to, s.last[g.id])
		total -= s.size
		n++
	}
	return n, to
}

func (l *Log) drop(n int) error {
	l.mu.Lock()
	old := l.mu.segments[:n]
	l.mu.segments = append([]*segment(nil), l.mu.segments[n:]...)
	l.mu.Unlock()
	l.prep.Lock()
	defer l.prep.Unlock()
	for _, s := range old {
		if err := l.retire(s); err != nil {
			return err
		}
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return fmt.Errorf("sync the log's directory %s: %w", l.dir, err)
	}
	return nil
}

// Close writes a last frame, which says that all before it was durable, so that
// later damage even to the end of the log is told from a torn write.
func (l *Log) Close() error {
	var err error
	if l.failed == nil && len(l.mu.segments) > 0 {
		b := l.newBatch()
		err = l.write(&b)
		l.failed = errkind.Unavailable.Wrap("the metadata log in %s is closed", path.Clean(l.dir))
	}
	return l.closeFiles(err)
}

// Abandon closes the files and writes nothing, as a crash would.
func (l *Log) Abandon() {
	l.failed = errkind.Unavailable.Wrap("the metadata log in %s is closed", path.Clean(l.dir))
	_ = l.closeFiles(nil) // nothing was written that closing could lose
}

func (l *Log) closeFiles(err error) error {
	l.prep.Lock()
	defer l.prep.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.mu.segments {
		if cerr := s.file.Close(); err == nil {
			err = cerr
		}
	}
	l.mu.segments = nil
	if l.prep.next != nil {
		if cerr := l.prep.next.file.Close(); err == nil {
			err = cerr
		}
		l.prep.next = nil
	}
	return err
}
