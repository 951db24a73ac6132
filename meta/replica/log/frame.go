package log

import (
	"encoding/binary"
	"hash/crc32"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/ckptfs/ckptfs/internal/codec"
)

// A frame is what one write adds: a header and records. Byte layout in docs/format/log.md.
const (
	frameMagic   = 0x464c4b43 // "CKLF"
	frameVersion = 1
	frameHeader  = 40
	frameAlign   = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// frameLength is the length of the frame whose header is p, padding excluded.
func frameLength(p []byte) int { return frameHeader + int(binary.LittleEndian.Uint32(p[8:])) }

// frame is a decoded header with its payload.
type frame struct {
	segment uint64 // number of the segment: a recycled one holds older frames too
	seq     uint64 // rises by one with every frame of the log
	synced  uint64 // the highest frame that was durable when this one was written
	payload []byte
	size    int // bytes in the file, padding included
}

func padded(n int) int { return (n + frameAlign - 1) &^ (frameAlign - 1) }

// appendFrame adds f's bytes to dst, padded with zeros.
func appendFrame(dst []byte, f frame) []byte {
	start := len(dst)
	dst = binary.LittleEndian.AppendUint32(dst, frameMagic)
	dst = binary.LittleEndian.AppendUint16(dst, frameVersion)
	dst = binary.LittleEndian.AppendUint16(dst, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(f.payload)))
	dst = binary.LittleEndian.AppendUint32(dst, 0)
	dst = binary.LittleEndian.AppendUint64(dst, f.segment)
	dst = binary.LittleEndian.AppendUint64(dst, f.seq)
	dst = binary.LittleEndian.AppendUint64(dst, f.synced)
	dst = append(dst, f.payload...)
	binary.LittleEndian.PutUint32(dst[start+12:], crc32.Checksum(dst[start:], castagnoli))
	for (len(dst)-start)%frameAlign != 0 {
		dst = append(dst, 0)
	}
	return dst
}

var zero4 [4]byte

// decodeFrame reads the frame at the start of p; false when there is no whole,
// undamaged frame of this version. The payload aliases p.
func decodeFrame(p []byte) (frame, bool) {
	if len(p) < frameHeader || binary.LittleEndian.Uint32(p) != frameMagic ||
		binary.LittleEndian.Uint16(p[4:]) != frameVersion || binary.LittleEndian.Uint16(p[6:]) != 0 {
		return frame{}, false
	}
	n := int(binary.LittleEndian.Uint32(p[8:]))
	if n > len(p)-frameHeader {
		return frame{}, false
	}
	end := frameHeader + n
	sum := crc32.Update(0, castagnoli, p[:12])
	sum = crc32.Update(sum, castagnoli, zero4[:])
	sum = crc32.Update(sum, castagnoli, p[16:end])
	if sum != binary.LittleEndian.Uint32(p[12:]) {
		return frame{}, false
	}
	return frame{
		segment: binary.LittleEndian.Uint64(p[16:]), seq: binary.LittleEndian.Uint64(p[24:]),
		synced: binary.LittleEndian.Uint64(p[32:]), payload: p[frameHeader:end:end], size: padded(end),
	}, true
}

type recordKind uint8

const (
	recordEntry   recordKind = iota + 1
	recordHard               // term, vote, commit
	recordCompact            // everything up to Index is in the store
	recordReset              // the store was replaced by a copy; no entry before this counts
	recordIntent             // a copy at Index is about to replace the store
	recordEnd
)

// record is one statement about one group.
type record struct {
	kind         recordKind
	group        uint64
	index, term  uint64
	etype        uint8     // recordEntry
	data         []byte    // recordEntry
	vote, commit uint64    // recordHard
	voters       []uint64  // markers
	source       *pb.Entry // the entry that data belongs to, when it is in memory already
}

// Code encodes or decodes the record.
func (r *record) Code(c *codec.Coder) {
	codec.U8As(c, &r.kind)
	codec.VarInt(c, &r.group)
	codec.VarInt(c, &r.term)
	switch r.kind {
	case recordEntry:
		codec.VarInt(c, &r.index)
		c.U8(&r.etype)
		c.Bytes(&r.data)
	case recordHard:
		codec.VarInt(c, &r.vote)
		codec.VarInt(c, &r.commit)
	case recordCompact, recordReset, recordIntent:
		codec.VarInt(c, &r.index)
		codec.Slice(c, &r.voters, func(c *codec.Coder, v *uint64) { codec.VarInt(c, v) })
	default:
		c.Fail("log record of kind %d", r.kind)
	}
}

// decodeRecords calls fn for every record of a payload.
func decodeRecords(p []byte, fn func(*record) error) error {
	for len(p) > 0 {
		var r record
		rest, err := codec.DecodePrefix(p, &r)
		if err != nil {
			return err
		}
		if err := fn(&r); err != nil {
			return err
		}
		p = rest
	}
	return nil
}

func entryRecord(group uint64, e *pb.Entry) record {
	return record{
		kind: recordEntry, group: group, index: e.GetIndex(), term: e.GetTerm(),
		etype: uint8(e.GetType()), data: e.GetData(), source: e,
	}
}

func (r *record) entry() *pb.Entry {
	if r.source != nil {
		return r.source
	}
	return &pb.Entry{
		Index: new(r.index), Term: new(r.term), Type: pb.EntryType(r.etype).Enum(),
		Data: append([]byte(nil), r.data...),
	}
}

func markerRecord(kind recordKind, group uint64, m Marker) record {
	return record{kind: kind, group: group, index: m.Index, term: m.Term, voters: m.Voters}
}

func (r *record) marker() Marker { return Marker{Index: r.index, Term: r.term, Voters: r.voters} }

func hardRecord(group uint64, h *pb.HardState) record {
	return record{kind: recordHard, group: group, term: h.GetTerm(), vote: h.GetVote(), commit: h.GetCommit()}
}

func (r *record) hard() *pb.HardState {
	return &pb.HardState{Term: new(r.term), Vote: new(r.vote), Commit: new(r.commit)}
}
