package kv

import (
	"bytes"

	"github.com/tidwall/btree"
)

// item is a record in memory; gone marks a deletion that hides what lies below.
type item struct {
	key, value []byte
	gone       bool
}

// size is about what an item costs in memory, in bytes.
func (i item) size() int { return len(i.key) + len(i.value) + 64 }

// tree is an ordered copy-on-write set of items. Copies are O(1). A tree may be
// read from several goroutines; writes and copies need a lock of their own.
type tree struct{ *btree.BTreeG[item] }

func newTree() tree {
	return tree{btree.NewBTreeGOptions(func(a, b item) bool { return bytes.Compare(a.key, b.key) < 0 },
		btree.Options{NoLocks: true})}
}

func (t tree) copy() tree { return tree{t.Copy()} }

// cursor walks one tree in one direction.
type cursor struct {
	it    btree.IterG[item]
	valid bool
}

func (c *cursor) next() { c.valid = c.it.Next() }
func (c *cursor) prev() { c.valid = c.it.Prev() }

// from places the cursor at the first item with key ≥ lo.
func (t tree) from(lo []byte) *cursor {
	c := &cursor{}
	c.it.Init(t.BTreeG, false)
	c.valid = c.it.Seek(item{key: lo})
	return c
}

// downFrom places the cursor at the last item with key ≤ hi; nil means the last.
func (t tree) downFrom(hi []byte) *cursor {
	c := &cursor{}
	c.it.Init(t.BTreeG, false)
	switch {
	case hi == nil || !c.it.Seek(item{key: hi}):
		c.it.Init(t.BTreeG, false)
		c.valid = c.it.Last()
	case bytes.Equal(c.it.Item().key, hi):
		c.valid = true
	default:
		c.valid = c.it.Prev()
	}
	return c
}
