package ids

// Codec names the transformation of a block's bytes before they are coded.
type Codec uint8

// The codecs. Only CodecNone is written by this version; the field and the
// frame table are in every format so that a later one needs no new format.
const CodecNone Codec = 0

// Frame is one entry of a transformed block's frame table.
type Frame struct {
	Logical, Stored uint32 // lengths in bytes
	Sum             uint64 // XXH3-64 of the logical bytes
}

// Block describes a sealed block: everything that is needed to read, check and
// rebuild it. It is immutable but for Disks and Version, which repair changes.
type Block struct {
	ID      BlockID
	Layout  Layout
	Length  uint32 // stored bytes, before redundancy: what is striped over the chunks
	Logical uint32 // bytes before the codec; equal to Length for CodecNone
	Codec   Codec
	Frames  []Frame // empty for CodecNone
	Granule uint8   // log2 of the checksum granule in every chunk, 12 to 20
	// Disks[i] holds chunk i; zero means that chunk i is missing.
	Disks []DiskID
	// Digests[i] is the XXH3-64 of chunk i's checksum table. The record is the
	// authority: a chunk with another digest is damaged.
	Digests []uint64
	Version uint64 // raised by each AddChunk, MoveChunk
}

// ExtentKind says what an extent's bytes are.
type ExtentKind uint8

// The kinds of extent. What no extent covers is a hole and reads as zeros.
const (
	ExtentBlock  ExtentKind = 1 // a range of a block
	ExtentInline ExtentKind = 2 // bytes held in the metadata
)

// Extent maps the file range [Off, Off+Len) to its bytes.
type Extent struct {
	Off, Len uint64
	Kind     ExtentKind
	Block    BlockID // ExtentBlock
	BlockOff uint32  // ExtentBlock: where the range starts in the block
	Data     []byte  // ExtentInline: exactly Len bytes
}

// End is the first offset behind the extent.
func (e Extent) End() uint64 { return e.Off + e.Len }

// Slice returns the part of e inside [lo, hi), which must overlap e.
func (e Extent) Slice(lo, hi uint64) Extent {
	lo, hi = max(lo, e.Off), min(hi, e.End())
	d := lo - e.Off
	e.Off, e.Len = lo, hi-lo
	switch e.Kind {
	case ExtentBlock:
		e.BlockOff += uint32(d)
	case ExtentInline:
		e.Data = e.Data[d : d+e.Len]
	}
	return e
}
