// Package wire is the data protocol between clients and chunk servers: framed,
// over TCP, documented byte by byte in docs/protocol.md. This file holds the
// messages; frame.go their framing, handshake.go the start of a connection.
package wire

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// MaxPayload is the largest payload of one frame, in bytes.
const MaxPayload = 1 << 20

// MaxBody is the largest encoded message body of one frame, in bytes.
const MaxBody = 64 << 10

// Op names a request; a reply carries the op of its request. Part of the
// protocol: only ever append.
type Op uint8

// The operations.
const (
	OpPing   Op = iota + 1
	OpOpen      // ask for a grant; small
	OpPut       // payload: granules of an open chunk
	OpSeal      // make the chunk final and durable
	OpStore     // payload: a whole small chunk, durable on reply
	OpAbort     // drop an open chunk
	OpRead      // reply payload: granules of a sealed chunk
	OpStat      // what is known of a chunk
	OpCancel    // give up on a request; no reply of its own
)

// Class of a request: what the server serves first, and what may be shed.
type Class uint8

// The classes, most urgent first.
const (
	ClassForeground Class = iota
	ClassBackground       // late chunks, prefetch
	ClassRepair
)

// Open asks for a chunk. The server answers with a Grant, or errkind.Busy.
type Open struct {
	Disk     ids.DiskID
	Key      ids.ChunkKey
	Layout   ids.Layout
	Ino      ids.Ino
	FileOff  uint64
	Reserve  uint32
	Granule  uint8
	Siblings []ids.DiskID
}

// Code encodes or decodes the message.
func (m *Open) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	chunkKey(c, &m.Key)
	c.Layout(&m.Layout)
	codec.VarInt(c, &m.Ino)
	codec.VarInt(c, &m.FileOff)
	codec.VarInt(c, &m.Reserve)
	c.U8(&m.Granule)
	codec.Slice(c, &m.Siblings, func(c *codec.Coder, d *ids.DiskID) { codec.VarInt(c, d) })
}

// Grant answers Open and Put: how many payload bytes the client may have sent
// for this chunk in all, counted from its start, before it hears of more. A Put
// must end at or below Credit; one that ends above it closes the connection.
type Grant struct {
	Credit uint32
	// RetryAfter is set with errkind.Busy: milliseconds.
	RetryAfter uint32
}

// Code encodes or decodes the message.
func (m *Grant) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Credit)
	codec.VarInt(c, &m.RetryAfter)
}

// Put carries granules for an open chunk. Off and the payload's length are
// multiples of the granule, except that the last granule of a chunk may be
// short (a multiple of 4 KiB). Sums has one XXH3-64 a granule, verified by the
// server before it acknowledges.
type Put struct {
	Disk ids.DiskID
	Key  ids.ChunkKey
	Off  uint32
	Sums []uint64
}

// Code encodes or decodes the message.
func (m *Put) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	chunkKey(c, &m.Key)
	codec.VarInt(c, &m.Off)
	codec.Slice(c, &m.Sums, func(c *codec.Coder, s *uint64) { c.U64(s) })
}

// Seal ends a chunk at Length. Digest is the client's own; the server answers
// errkind.Conflict when its table has another. The reply (Sealed) comes when
// the chunk is durable.
type Seal struct {
	Disk   ids.DiskID
	Key    ids.ChunkKey
	Length uint32
	Digest uint64
}

// Code encodes or decodes the message.
func (m *Seal) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	chunkKey(c, &m.Key)
	codec.VarInt(c, &m.Length)
	c.U64(&m.Digest)
}

// Sealed answers Seal and Store.
type Sealed struct{ Digest uint64 }

// Code encodes or decodes the message.
func (m *Sealed) Code(c *codec.Coder) { c.U64(&m.Digest) }

// Store writes a whole chunk in one message: its payload is the chunk, at most
// MaxPayload. The sender stays within the store credit of the handshake.
type Store struct {
	Open
	Sums []uint64
}

// Code encodes or decodes the message.
func (m *Store) Code(c *codec.Coder) {
	m.Open.Code(c)
	codec.Slice(c, &m.Sums, func(c *codec.Coder, s *uint64) { c.U64(s) })
}

// ChunkRef names a chunk on a disk: the body of Abort and Stat.
type ChunkRef struct {
	Disk ids.DiskID
	Key  ids.ChunkKey
}

// Code encodes or decodes the message.
func (m *ChunkRef) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	chunkKey(c, &m.Key)
}

// Read asks for [Off, Off+Len) of a sealed chunk; both granule-aligned, but
// the range may end at the chunk's end. Len ≤ MaxPayload.
type Read struct {
	Disk ids.DiskID
	Key  ids.ChunkKey
	Off  uint32
	Len  uint32
}

// Code encodes or decodes the message.
func (m *Read) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	chunkKey(c, &m.Key)
	codec.VarInt(c, &m.Off)
	codec.VarInt(c, &m.Len)
}

// Data answers Read: the granules are the payload, which the reader verifies
// against Sums. Digest is the chunk's, to compare with the block record.
type Data struct {
	Length  uint32 // of the whole chunk
	Granule uint8
	Digest  uint64
	Sums    []uint64
}

// Code encodes or decodes the message.
func (m *Data) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Length)
	c.U8(&m.Granule)
	c.U64(&m.Digest)
	codec.Slice(c, &m.Sums, func(c *codec.Coder, s *uint64) { c.U64(s) })
}

// Stat answers OpStat.
type Stat struct {
	State   uint8 // chunk.State
	Length  uint32
	Digest  uint64
	Granule uint8
	Sums    []uint64
}

// Code encodes or decodes the message.
func (m *Stat) Code(c *codec.Coder) {
	c.U8(&m.State)
	codec.VarInt(c, &m.Length)
	c.U64(&m.Digest)
	c.U8(&m.Granule)
	codec.Slice(c, &m.Sums, func(c *codec.Coder, s *uint64) { c.U64(s) })
}

// Cancel gives up on the request with the id, on the same connection.
type Cancel struct{ Request uint64 }

// Code encodes or decodes the message.
func (m *Cancel) Code(c *codec.Coder) { c.U64(&m.Request) }

func chunkKey(c *codec.Coder, k *ids.ChunkKey) {
	c.BlockID(&k.Block)
	c.U8(&k.Index)
	if int(k.Index) >= ids.MaxK+ids.MaxM {
		c.Fail("chunk index %d", k.Index)
	}
}
