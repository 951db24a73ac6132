// Package ec holds the arithmetic of a block: how its bytes are striped over
// chunks, how long chunks are, their checksums, and the erasure code. It is
// pure: no I/O, no clock. docs/format/block.md describes the same in words.
package ec

import (
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Page is the unit of lengths on a disk, in bytes: every chunk length is a
// multiple of it.
const Page = 4 << 10

// The two checksum granules, as log2 of bytes.
const (
	SmallGranule = 12
	LargeGranule = 16
)

// SmallReserve is the largest reservation, in bytes, whose chunk gets the
// small granule.
const SmallReserve = 256 << 10

// ChunkLen returns the length in bytes of every chunk of a block of blockLen
// bytes: a cell for each full stripe, and for the last, partial stripe a cell
// of tail/K bytes rounded up to whole pages. blockLen must not be negative.
func ChunkLen(l ids.Layout, blockLen int) int {
	full, tail := blockLen/l.StripeData(), blockLen%l.StripeData()
	return full<<l.CellLog + tailCell(l, tail)
}

// tailCell is the cell length of a last stripe that holds tail data bytes.
func tailCell(l ids.Layout, tail int) int {
	k := int(l.K)
	return ((tail+k-1)/k + Page - 1) &^ (Page - 1)
}

// CellLen returns the length in bytes of the cells of one stripe: a whole
// cell, or less in the last stripe; 0 for a stripe behind the block's end.
func CellLen(l ids.Layout, blockLen, stripe int) int {
	switch full := blockLen / l.StripeData(); {
	case stripe < full:
		return l.CellSize()
	case stripe == full:
		return tailCell(l, blockLen%l.StripeData())
	}
	return 0
}

// MaxLen returns the block length that a writer may reach: what it asked for,
// within what the layout can hold. asked = 0 means the layout's own maximum.
func MaxLen(l ids.Layout, asked int) int {
	if asked <= 0 {
		return l.MaxBlockData()
	}
	return min(asked, l.MaxBlockData())
}

// Reserve returns the bytes to reserve for each chunk of a block that will
// have at most maxLen bytes (0: the layout's maximum). No block of at most
// that many bytes has longer chunks.
func Reserve(l ids.Layout, maxLen int) int {
	return ChunkLen(l, MaxLen(l, maxLen))
}

// Granule returns the log2 of the checksum granule for chunks that reserve
// that many bytes: 4 KiB up to SmallReserve, so that a small read of a small
// block costs one page; 64 KiB beyond, so that the table of a 16 MiB chunk has
// no more than 256 entries. It divides every cell.
func Granule(_ ids.Layout, reserve int) uint8 {
	if reserve <= SmallReserve {
		return SmallGranule
	}
	return LargeGranule
}

// Granules returns how many checksums a chunk of that length has.
func Granules(chunkLen int, granuleLog uint8) int {
	return (chunkLen + 1<<granuleLog - 1) >> granuleLog
}

// Piece is a run of data bytes that is contiguous both in the block and in one
// data chunk. It never crosses a cell border.
type Piece struct {
	Chunk    int // data chunk, 0 ≤ Chunk < K
	Off      int // in the chunk
	Len      int
	BlockOff int
}

// Pieces appends the pieces that cover [off, off+n) of a block, in block
// order. The range must lie within the block.
func Pieces(dst []Piece, l ids.Layout, blockLen, off, n int) []Piece {
	for end := off + n; off < end; {
		stripe, r := off/l.StripeData(), off%l.StripeData()
		cell := CellLen(l, blockLen, stripe)
		chunk, in := r/cell, r%cell
		run := min(cell-in, end-off)
		dst = append(dst, Piece{Chunk: chunk, Off: stripe<<l.CellLog + in, Len: run, BlockOff: off})
		off += run
	}
	return dst
}

// DataPieces is the inverse of Pieces: it appends the block ranges that lie in
// [off, off+n) of a data chunk, in order, leaving out padding behind the
// block's end. A parity chunk has none.
func DataPieces(dst []Piece, l ids.Layout, blockLen, chunk, off, n int) []Piece {
	if chunk >= int(l.K) {
		return dst
	}
	for end := min(off+n, ChunkLen(l, blockLen)); off < end; {
		stripe, in := off>>l.CellLog, off&(l.CellSize()-1)
		cell := CellLen(l, blockLen, stripe)
		run := min(cell-in, end-off)
		at := stripe*l.StripeData() + chunk*cell + in
		if at < blockLen {
			dst = append(dst, Piece{Chunk: chunk, Off: off, Len: min(run, blockLen-at), BlockOff: at})
		}
		off += run
	}
	return dst
}
