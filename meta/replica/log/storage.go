package log

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// entryOverhead is about what an entry costs in memory beside its data, in bytes.
const entryOverhead = 128

// Storage is raft's view of one group. Its methods may be called while another
// task appends.
type Storage struct {
	log   *Log
	group uint64
}

// Storage returns the view of a group.
func (l *Log) Storage(group uint64) *Storage {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.groups[group] == nil {
		l.mu.groups[group] = newGroup(group)
	}
	return &Storage{log: l, group: group}
}

func (s *Storage) with(fn func(g *group)) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	fn(s.log.mu.groups[s.group])
}

// Marker returns the position up to which entries may be missing.
func (s *Storage) Marker() (m Marker) {
	s.with(func(g *group) { m = g.marker })
	return m
}

// Intent returns the copy that was about to be installed when the log was last
// written, or nil.
func (s *Storage) Intent() (m *Marker) {
	s.with(func(g *group) { m = g.intent })
	return m
}

// SetSnapshot tells what a copy of the store would hold now.
func (s *Storage) SetSnapshot(m Marker) { s.with(func(g *group) { g.snap = m }) }

// InitialState returns the hard state and the voters.
func (s *Storage) InitialState() (hs *pb.HardState, cs *pb.ConfState, err error) {
	s.with(func(g *group) {
		hs = proto.Clone(g.hard).(*pb.HardState)
		cs = &pb.ConfState{Voters: append([]uint64(nil), g.marker.Voters...)}
	})
	return hs, cs, nil
}

// FirstIndex is that of the first entry that can be read.
func (s *Storage) FirstIndex() (i uint64, err error) {
	s.with(func(g *group) { i = g.first })
	return i, nil
}

// LastIndex is that of the last entry.
func (s *Storage) LastIndex() (i uint64, err error) {
	s.with(func(g *group) { i = g.last() })
	return i, nil
}

// Term returns the term of an entry or of the marker.
func (s *Storage) Term(i uint64) (t uint64, err error) {
	s.with(func(g *group) { t, err = g.term(i) })
	return t, err
}

func (g *group) term(i uint64) (uint64, error) {
	switch {
	case i == g.marker.Index && i+1 == g.first:
		return g.marker.Term, nil
	case i < g.first:
		return 0, raft.ErrCompacted
	case i > g.last():
		return 0, raft.ErrUnavailable
	}
	return g.refs[i-g.first].term, nil
}

// Snapshot returns the marker set last, without data: the store itself is
// streamed.
func (s *Storage) Snapshot() (snap *pb.Snapshot, err error) {
	s.with(func(g *group) {
		m := g.snap
		if m.Index == 0 || m.Index+1 < g.first {
			err = raft.ErrSnapshotTemporarilyUnavailable
			return
		}
		snap = &pb.Snapshot{Metadata: &pb.SnapshotMetadata{
			Index: new(m.Index), Term: new(m.Term), ConfState: &pb.ConfState{Voters: append([]uint64(nil), m.Voters...)},
		}}
	})
	return snap, err
}

// Entries returns the entries lo ≤ index < hi, at least one, at most about
// maxSize bytes. Old ones are read from the disk and verified.
func (s *Storage) Entries(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	var out []*pb.Entry
	for size := uint64(0); lo < hi; {
		got, err := s.run(lo, hi)
		if err != nil {
			return nil, err
		}
		for _, e := range got {
			size += uint64(proto.Size(e))
			if len(out) > 0 && size > maxSize {
				return out, nil
			}
			out = append(out, e)
		}
		lo += uint64(len(got))
	}
	return out, nil
}

// run returns some entries from lo on, at least one: from memory, or all that
// lie in lo's frame.
func (s *Storage) run(lo, hi uint64) ([]*pb.Entry, error) {
	var cached []*pb.Entry
	var at ref
	var count int
	var err error
	s.with(func(g *group) {
		if _, err = g.term(lo); err != nil || lo < g.first || hi > g.last()+1 {
			if err == nil && lo < g.first {
				err = raft.ErrCompacted
			} else if err == nil {
				err = raft.ErrUnavailable
			}
			return
		}
		if from := g.last() + 1 - uint64(len(g.cache)); lo >= from {
			cached = g.cache[lo-from : hi-from : hi-from]
			return
		}
		at = g.refs[lo-g.first]
		for _, r := range g.refs[lo-g.first : hi-g.first] {
			if r.seg != at.seg || r.off != at.off {
				break
			}
			count++
		}
	})
	if err != nil || cached != nil {
		return cached, err
	}
	return s.fromDisk(at, lo, count)
}

// fromDisk reads count entries from lo on out of their frame. A compaction may take the segment away
// meanwhile: then the frame does not verify, and the entry is compacted.
func (s *Storage) fromDisk(at ref, lo uint64, count int) ([]*pb.Entry, error) {
	buf := make([]byte, frameHeader)
	var f frame
	var ok bool
	_, err := at.seg.file.ReadAt(buf, at.off)
	if err == nil {
		n := int64(frameLength(buf))
		if n <= at.seg.size-at.off {
			buf = make([]byte, n)
			if _, err = at.seg.file.ReadAt(buf, at.off); err == nil {
				f, ok = decodeFrame(buf)
			}
		}
	}
	if _, terr := s.Term(lo); errors.Is(terr, raft.ErrCompacted) {
		return nil, terr
	}
	if err != nil {
		return nil, fmt.Errorf("read entry %d from %s: %w", lo, at.seg.name, err)
	}
	if !ok || f.segment != at.seg.seq {
		return nil, s.log.corrupt("entry %d in %s at offset %d fails its checksum", lo, at.seg.name, at.off)
	}
	var out []*pb.Entry
	err = decodeRecords(f.payload, func(r *record) error {
		// A frame may hold an entry and, behind it, the one that replaced it.
		if at := r.index - lo; r.kind == recordEntry && r.group == s.group && r.index >= lo && at <= uint64(len(out)) {
			out = append(out[:at], r.entry())
		}
		return nil
	})
	out = out[:min(len(out), count)]
	if err == nil && len(out) == 0 {
		err = s.log.corrupt("entry %d is not where it should be, in %s at offset %d", lo, at.seg.name, at.off)
	}
	return out, err
}
