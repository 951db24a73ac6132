package chunk

import (
	"context"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// SmallBlock is the length below which a block is written as copies-(M+1)
// instead of being coded, in bytes.
const SmallBlock = 128 << 10

// BlockSpec describes a block that is about to be written.
type BlockSpec struct {
	// NextID returns a fresh block id of the session. It is called once for the
	// block, and again whenever the block must be abandoned and written anew.
	NextID  func() ids.BlockID
	Layout  ids.Layout // the file's; the block may get a narrower one
	Ino     ids.Ino
	FileOff uint64 // where the block's first byte lies in the file: a hint
	// MaxLen bounds the block's length in bytes; 0 means Layout.MaxBlockData().
	// It decides how much space is reserved on the disks.
	MaxLen int
}

// BlockWriter writes one block, stripe by stripe. Append and Seal are called
// by one goroutine at a time; release callbacks come from others.
type BlockWriter interface {
	// Layout is the block's own: perhaps narrower than what was asked for.
	Layout() ids.Layout
	// Append hands over the next stripe: Layout().StripeData() bytes, fewer
	// only in the last one. data must not change until release is called,
	// which happens exactly once for each accepted or refused stripe:
	// release(true) when a quorum of servers holds it, release(false) when this
	// block will not contain it and the caller must write it elsewhere.
	// Append waits while too many stripes are under way. After an error the
	// caller goes on with Seal.
	Append(ctx context.Context, data []byte, release func(ok bool)) error
	// Seal ends the block. On nil, every byte released with true is durable in
	// a quorum of chunks, and the block's Length counts exactly those bytes; a
	// chunk that is late has disk zero. The block may have another id than
	// before, when it had to be rewritten. A block of length 0 needs no commit.
	// An error means that released bytes are lost: the flush fails.
	Seal(ctx context.Context) (ids.Block, error)
	// Committed tells that the block is part of a file now: a late chunk is
	// finished in the background and placed.
	Committed()
	// Abandon gives up a block that was not sealed, or not committed.
	Abandon()
}

// Spiller is what a BlockWriter may be besides. When Seal had to rewrite a block
// into a narrower layout, whose blocks hold less, the bytes may need several
// blocks: Seal returns the first, Spill the others, in order. Together they
// hold exactly the bytes that were released with true. Call it after Seal;
// usually it returns nil. Committed and Abandon count for all of them.
type Spiller interface {
	Spill() []ids.Block
}

// Blocks writes and reads whole blocks. Safe for concurrent use.
// Errors wrap an errkind: NoSpace (fewer than M+1 disks can be had),
// Unavailable, Timeout, Corrupt, NoChunk (fewer than K chunks are left).
type Blocks interface {
	// NewBlock waits for grants and returns a writer.
	NewBlock(ctx context.Context, spec BlockSpec) (BlockWriter, error)
	// WriteBlock writes a whole small block: data of at most SmallBlock bytes
	// goes out as copies in one message a server. The writer that it returns
	// is sealed; call Committed or Abandon on it.
	WriteBlock(ctx context.Context, spec BlockSpec, data []byte) (ids.Block, BlockWriter, error)
	// ReadBlock fills dst from offset off of the block, verified end to end,
	// reconstructing what is missing or damaged.
	ReadBlock(ctx context.Context, b *ids.Block, off int, dst []byte) error
}
