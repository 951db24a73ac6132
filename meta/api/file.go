package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// OpKind is one kind of operation of a commit.
type OpKind uint8

// The operations. Ranges are exact to the byte.
const (
	// OpWrite maps [Off, Off+Len) to a block at BlockOff and raises the size
	// to at least Off+Len. It never lowers it.
	OpWrite OpKind = iota + 1
	// OpInline is OpWrite with the bytes in Data.
	OpInline
	// OpPunch makes [Off, Off+Len) a hole and leaves the size.
	OpPunch
	// OpTruncate sets the size to Off: the only operation that lowers it.
	OpTruncate
	// OpAppend places Extents, whose offsets count from zero, as one run at
	// Off, the end that the client expects; if the size differs, at the real end.
	OpAppend
	// OpReplace swaps the extents in [Off, Off+Len) for Extents, if the map
	// version is still Expect; else the commit fails with Changed. Compaction:
	// invisible in times and size.
	OpReplace
	// OpKillPriv clears the set-id bits and security.capability.
	OpKillPriv
	// OpExtend raises the size to at least Off and never lowers it: what lies
	// between is a hole.
	OpExtend
)

// Op is one operation of a commit.
type Op struct {
	Kind     OpKind
	Off, Len uint64
	Block    ids.BlockID  // OpWrite
	BlockOff uint32       // OpWrite
	Data     []byte       // OpInline
	Extents  []ids.Extent // OpAppend, OpReplace
	Expect   uint64       // OpReplace: the map version
}

// Code encodes or decodes the operation.
func (o *Op) Code(c *codec.Coder) {
	codec.U8As(c, &o.Kind)
	codec.VarInt(c, &o.Off)
	codec.VarInt(c, &o.Len)
	switch o.Kind {
	case OpWrite:
		c.BlockID(&o.Block)
		codec.VarInt(c, &o.BlockOff)
	case OpInline:
		c.Bytes(&o.Data)
	case OpAppend, OpReplace:
		codec.Slice(c, &o.Extents, func(c *codec.Coder, e *ids.Extent) { c.Extent(e) })
		codec.VarInt(c, &o.Expect)
	case OpPunch, OpTruncate, OpKillPriv, OpExtend:
	default:
		c.Fail("operation kind %d", o.Kind)
	}
	if o.Off+o.Len < o.Off {
		c.Fail("operation %d+%d overflows", o.Off, o.Len)
	}
}

// Commit makes sealed, durable blocks part of a file: an ordered list of
// operations on one inode (data-path rule 13). Every block in Blocks is new
// and referred to by Ops, and is in no other commit; its id is made of the
// inode's slot, the cluster's incarnation, the session, and a counter not below
// the session's floor. Ops may also refer to blocks that are already part of
// some file (a copy by reference): Changed when such a block is gone meanwhile.
type Commit struct {
	Ino    ids.Ino
	Ops    []Op
	Blocks []ids.Block
	Mtime  int64  // client's wall clock; zero leaves mtime alone
	Floor  uint64 // lowest block counter the session may commit after this
}

// Kind returns KindCommit.
func (*Commit) Kind() Kind { return KindCommit }

// Code encodes or decodes the message.
func (m *Commit) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	codec.Slice(c, &m.Ops, func(c *codec.Coder, o *Op) { o.Code(c) })
	codec.Slice(c, &m.Blocks, func(c *codec.Coder, b *ids.Block) { c.Block(b) })
	c.I64(&m.Mtime)
	codec.VarInt(c, &m.Floor)
}

// Committed answers Commit.
type Committed struct {
	Attr Attr
	// Bases holds, for each OpAppend in order, the offset where its run lies.
	Bases []uint64
}

// Code encodes or decodes the message.
func (m *Committed) Code(c *codec.Coder) {
	m.Attr.Code(c)
	codec.Slice(c, &m.Bases, func(c *codec.Coder, b *uint64) { codec.VarInt(c, b) })
}

// Open registers (session, inode) in the leader's memory and then reads the
// state; Opened answers. The leader keeps a set, the client counts its handles
// and sends Release when the last one of an inode is gone.
type Open struct {
	Ino   ids.Ino
	Write bool
}

// Kind returns KindOpen.
func (*Open) Kind() Kind { return KindOpen }

// Code encodes or decodes the message.
func (m *Open) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.Bool(&m.Write)
}

// Opened answers Open with the start of the extent map.
type Opened struct {
	Attr Attr
	Map  Map
}

// Code encodes or decodes the message.
func (m *Opened) Code(c *codec.Coder) {
	m.Attr.Code(c)
	m.Map.Code(c)
}

// Release takes inodes out of the session's open set. Empty answers.
type Release struct{ Inos []ids.Ino }

// Kind returns KindRelease.
func (*Release) Kind() Kind { return KindRelease }

// Code encodes or decodes the message.
func (m *Release) Code(c *codec.Coder) { inos(c, &m.Inos) }

// GetMap asks for the extents that overlap [Off, End); Mapped answers.
type GetMap struct {
	Ino      ids.Ino
	Off, End uint64
	Max      uint32 // extents, at least 1
}

// Kind returns KindGetMap.
func (*GetMap) Kind() Kind { return KindGetMap }

// Code encodes or decodes the message.
func (m *GetMap) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	codec.VarInt(c, &m.Off)
	codec.VarInt(c, &m.End)
	codec.VarInt(c, &m.Max)
}

// Map is a part of a file's extent map, complete over [Off, End): what no
// extent covers there is a hole. Pending clips are already applied.
type Map struct {
	Off, End uint64
	Version  uint64
	Extents  []ids.Extent // ordered, disjoint
	Blocks   []ids.Block  // every block that Extents name, once
}

// Code encodes or decodes the message.
func (m *Map) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Off)
	codec.VarInt(c, &m.End)
	codec.VarInt(c, &m.Version)
	codec.Slice(c, &m.Extents, func(c *codec.Coder, e *ids.Extent) { c.Extent(e) })
	codec.Slice(c, &m.Blocks, func(c *codec.Coder, b *ids.Block) { c.Block(b) })
}

// Mapped answers GetMap.
type Mapped struct {
	Attr Attr
	Map  Map
}

// Code encodes or decodes the message.
func (m *Mapped) Code(c *codec.Coder) {
	m.Attr.Code(c)
	m.Map.Code(c)
}

// GetBlocks asks for block records; Blocks answers, without those that are gone.
type GetBlocks struct{ IDs []ids.BlockID }

// Kind returns KindGetBlocks.
func (*GetBlocks) Kind() Kind { return KindGetBlocks }

// Code encodes or decodes the message.
func (m *GetBlocks) Code(c *codec.Coder) {
	codec.Slice(c, &m.IDs, func(c *codec.Coder, b *ids.BlockID) { c.BlockID(b) })
}

// Blocks answers GetBlocks.
type Blocks struct{ Blocks []ids.Block }

// Code encodes or decodes the message.
func (m *Blocks) Code(c *codec.Coder) {
	codec.Slice(c, &m.Blocks, func(c *codec.Coder, b *ids.Block) { c.Block(b) })
}
