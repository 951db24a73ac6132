// Package chunk is the contract of a chunk store: one disk's set of chunks.
// chunk/store is the flash engine that implements it, chunk/server serves it
// over the data protocol (chunk/wire), chunk/client writes and reads whole
// blocks over many of them. The rules are numbered in docs/design/data-path.md.
package chunk

import (
	"io"
	"os"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// Header says what a chunk is. It is written when the chunk is opened.
type Header struct {
	Key     ids.ChunkKey
	Layout  ids.Layout
	Ino     ids.Ino
	FileOff uint64 // offset of the block in its file, a hint for rebuilding
	// Session is who writes the chunk, when it is not the block's own session:
	// a repair or move job's (data-path rule 17). Zero is the block's own.
	Session ids.Session
	Reserve uint32 // bytes, the largest length the chunk may reach; ≤ ids.MaxChunk
	Granule uint8  // log2 of the checksum granule, 12 to 20
	// Siblings are the disks of all chunks of the block as of writing: a hint,
	// used only to rebuild metadata.
	Siblings []ids.DiskID
}

// Sealed is the outcome of a seal. It is durable once Sync(Ticket) returned nil.
type Sealed struct {
	Digest uint64 // XXH3-64 over the little-endian checksum table
	Ticket uint64 // pass to Sync
}

// Store is one disk. All methods are safe for concurrent use and wait only for
// the disk. Errors wrap an errkind: NoSpace (full), ReadOnly (failing or
// read-only), NoChunk, Conflict, Invalid, Corrupt, Internal.
type Store interface {
	// Open reserves space and writes the header. Opening again with an equal
	// header is a no-op; with a different one Conflict.
	Open(h Header) error
	// Put writes granule-aligned bytes at off of an open chunk. sums holds the
	// XXH3-64 of each granule, already verified by the caller. Writing the
	// same range again with the same sums is a no-op, with others Conflict.
	Put(key ids.ChunkKey, off uint32, data []byte, sums []uint64) error
	// Seal ends the chunk at length. All granules below length must have been
	// put. Sealing again at the same length returns the same digest.
	Seal(key ids.ChunkKey, length uint32) (Sealed, error)
	// Write opens, puts and seals a whole chunk of at most 1 MiB.
	Write(h Header, data []byte, sums []uint64) (Sealed, error)
	// Sync returns when everything up to ticket is durable. Callers share one
	// fdatasync, which starts after their writes ended. A failed one fails its
	// whole group, makes the disk refuse new chunks, and is not retried.
	Sync(ticket uint64) error
	// Pin opens a sealed chunk for reading. The chunk's space is not reused
	// before the Reader is closed.
	Pin(key ids.ChunkKey) (Reader, error)
	// Delete durably removes chunks, open or sealed. Unknown keys are ignored.
	Delete(keys []ids.ChunkKey) error
	// Inventory gives the store's whole-disk view.
	Inventory() Inventory
}

// Reader reads one sealed chunk. It does not verify: the bytes travel with
// their sums, and the reading client verifies.
type Reader interface {
	io.ReaderAt // offsets within the chunk
	Header() Header
	Length() uint32
	Digest() uint64
	Sums() []uint64 // one per granule; do not change
	// Section returns the file and offset for sendfile; nil where there is none.
	Section() (f *os.File, off int64)
	Close()
}

// State of a chunk in an inventory.
type State uint8

// The states of a chunk.
const (
	StateOpen State = iota + 1
	StateSealed
)

// Info is one entry of an inventory.
type Info struct {
	Key    ids.ChunkKey
	State  State
	Length uint32
	Digest uint64
}

// Usage is a disk's space, in bytes.
type Usage struct {
	Capacity uint64
	Free     uint64 // what new chunks may take, the reuse pool included
	Chunks   uint64
	ReadOnly bool   // refuses new chunks, serves reads
	Reason   string // why, when ReadOnly
}

// Inventory is the whole-disk side of a store.
type Inventory interface {
	UUID() ids.UUID
	Usage() Usage
	// List returns up to max chunks with keys greater than after, in order.
	List(after ids.ChunkKey, max int) ([]Info, error)
	// AbandonOpen deletes every chunk left open by an earlier life of the process.
	AbandonOpen() (int, error)
	// Maintain does periodic work: index checkpoint, punching. Call it about
	// every second.
	Maintain() error
	// Close checkpoints the index and closes the files.
	Close() error
}
