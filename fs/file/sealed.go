package file

import (
	"context"
	"slices"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// sealed is what a block writer has left: usually one block, several when a
// rewrite spilled. They hold the bytes that the writer kept, one after another,
// and are never changed.
type sealed []ids.Block

// sealedBy is a sealed writer's outcome; first is the block that Seal returned.
func sealedBy(w chunk.BlockWriter, first ids.Block) sealed {
	s := sealed{first}
	if sp, ok := w.(chunk.Spiller); ok {
		s = append(s, sp.Spill()...)
	}
	return s
}

func (s sealed) length() (n uint32) {
	for i := range s {
		n += s[i].Length
	}
	return n
}

// at returns the block that holds byte off, and where it begins. off must be
// less than the length.
func (s sealed) at(off uint32) (b *ids.Block, base uint32) {
	i := 0
	for off-base >= s[i].Length {
		base += s[i].Length
		i++
	}
	return &s[i], base
}

// pieces describes the bytes [lo, lo+length), which lie at off of the file, as
// extents: one for each block.
func (s sealed) pieces(off, length uint64, lo uint32) []ids.Extent {
	var out []ids.Extent
	for length > 0 {
		b, base := s.at(lo)
		c := min(length, uint64(base)+uint64(b.Length)-uint64(lo))
		out = append(out, ids.Extent{Off: off, Len: c, Kind: ids.ExtentBlock, Block: b.ID, BlockOff: lo - base})
		off, lo, length = off+c, lo+uint32(c), length-c
	}
	return out
}

// read fills dst from off on.
func (s sealed) read(ctx context.Context, from chunk.Blocks, off int, dst []byte) error {
	for len(dst) > 0 {
		b, base := s.at(uint32(off))
		c := min(len(dst), int(base+b.Length)-off)
		if err := from.ReadBlock(ctx, b, off-int(base), dst[:c]); err != nil {
			return err
		}
		off, dst = off+c, dst[c:]
	}
	return nil
}

// extents is what the entry of a sealed pack is in the file.
func (en entry) extents() []ids.Extent {
	if en.pk.inline {
		data := make([]byte, en.end-en.off)
		en.pk.copyOut(data, en.pkOff)
		return []ids.Extent{{Off: en.off, Len: en.end - en.off, Kind: ids.ExtentInline, Data: data}}
	}
	return en.pk.blocks.pieces(en.off, en.end-en.off, en.pkOff)
}

// ops are the operations that commit the entry of a sealed pack.
func (en entry) ops() []api.Op {
	var out []api.Op
	for _, x := range en.extents() {
		op := api.Op{Kind: api.OpWrite, Off: x.Off, Len: x.Len, Block: x.Block, BlockOff: x.BlockOff}
		if x.Kind == ids.ExtentInline {
			op = api.Op{Kind: api.OpInline, Off: x.Off, Len: x.Len, Data: x.Data}
		}
		out = append(out, op)
	}
	return out
}

// referred are the pack's blocks that the overlay refers to: a commit may name
// no others.
func (n *inode) referred(pk *pack) sealed {
	if pk.inline || pk.pieces == 0 {
		return nil
	}
	if len(pk.blocks) == 1 {
		return pk.blocks
	}
	used := map[ids.BlockID]bool{}
	for _, en := range n.mu.ov.list {
		if en.pk == pk {
			for _, x := range en.extents() {
				used[x.Block] = true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(pk.blocks), func(b ids.Block) bool { return !used[b.ID] })
}

// maxOpsOf is how many operations the pack may add to a commit.
func (pk *pack) maxOpsOf() int { return pk.pieces + max(1, len(pk.blocks)) - 1 }

// encoded estimates the bytes that the pack adds to a commit.
func (pk *pack) encoded() int {
	size := 64 * pk.maxOpsOf()
	for i := range pk.blocks {
		size += 64 + 16*len(pk.blocks[i].Disks) + 16*len(pk.blocks[i].Frames)
	}
	if pk.inline {
		// Its log may be long; what the file still refers to is not.
		size += min(int(pk.length), inlineLimit)
	}
	return size
}

// oversized is a sealed pack that spilled into so many blocks that no commit
// holds all of its ranges.
func (n *inode) oversized() *pack {
	for _, pk := range n.mu.packs {
		if pk.state == packSealed && !pk.app && pk.maxOpsOf() > maxOps {
			return pk
		}
	}
	return nil
}
