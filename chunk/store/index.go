package store

import (
	"github.com/tidwall/btree"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// entry is what the index knows of a chunk: 40 bytes without pointers, so
// that ten million of them cost some 700 MB and no work for the collector.
type entry struct {
	hi, lo uint64 // block id
	digest uint64 // when sealed
	seg    uint32 // segment number
	page   uint32 // of the front page
	length uint32 // bytes, when sealed
	pages  uint16 // taken, front page included
	index  uint8
	state  chunk.State
}

func (e *entry) key() ids.ChunkKey {
	return ids.ChunkKey{Block: ids.BlockID{Hi: e.hi, Lo: e.lo}, Index: e.index}
}

func (e *entry) span() span { return span{e.page, e.page + uint32(e.pages)} }

func (e *entry) spot() spot { return spot{e.seg, e.page} }

// spot is the position of a front page on the disk.
type spot struct{ seg, page uint32 }

func keyEntry(k ids.ChunkKey) entry {
	return entry{hi: k.Block.Hi, lo: k.Block.Lo, index: k.Index}
}

func lessEntry(a, b entry) bool {
	if a.hi != b.hi {
		return a.hi < b.hi
	}
	if a.lo != b.lo {
		return a.lo < b.lo
	}
	return a.index < b.index
}

// index is the ordered map of all chunks of the disk. Not safe for concurrent
// use; snapshot is.
type index struct{ tree *btree.BTreeG[entry] }

func newIndex() index {
	return index{btree.NewBTreeGOptions(lessEntry, btree.Options{NoLocks: true, Degree: 64})}
}

func (x index) get(k ids.ChunkKey) (entry, bool) { return x.tree.Get(keyEntry(k)) }

func (x index) put(e entry) { x.tree.Set(e) }

func (x index) drop(k ids.ChunkKey) { x.tree.Delete(keyEntry(k)) }

func (x index) len() int { return x.tree.Len() }

// snapshot is a copy in constant time that nobody changes.
func (x index) snapshot() index { return index{x.tree.Copy()} }

// after calls fn for the chunks with keys greater than k until it returns false.
func (x index) after(k ids.ChunkKey, fn func(e entry) bool) {
	x.tree.Ascend(keyEntry(k), func(e entry) bool {
		if e.key() == k {
			return true
		}
		return fn(e)
	})
}

// all calls fn for every chunk in order until it returns false.
func (x index) all(fn func(e entry) bool) { x.tree.Scan(fn) }

// Code encodes or decodes an entry of a checkpoint.
func (e *entry) Code(c *codec.Coder) {
	b := ids.BlockID{Hi: e.hi, Lo: e.lo}
	c.BlockID(&b)
	idx, state := e.index, uint8(e.state)
	c.U8(&idx)
	c.U8(&state)
	page, pages, seg, length, digest := e.page, e.pages, e.seg, e.length, e.digest
	c.U16(&pages)
	c.U32(&seg)
	c.U32(&page)
	c.U32(&length)
	c.U64(&digest)
	if !c.Reading() {
		return
	}
	*e = entry{
		hi: b.Hi, lo: b.Lo, index: idx, state: chunk.State(state),
		pages: pages, seg: seg, page: page, length: length, digest: digest,
	}
	switch {
	case b.IsZero() || idx >= ids.MaxK+ids.MaxM:
		c.Fail("chunk %s", e.key())
	case e.state != chunk.StateOpen && e.state != chunk.StateSealed:
		c.Fail("chunk state %d", state)
	case page == 0 || pages == 0 || uint32(pages) > reservedPages(ids.MaxChunk) || page+uint32(pages) < page:
		c.Fail("chunk at page %d of %d pages", page, pages)
	case e.state == chunk.StateSealed && reservedPages(length) != uint32(pages):
		c.Fail("chunk of %d bytes in %d pages", length, pages)
	}
}
