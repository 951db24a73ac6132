package file

import (
	"math"
	"slices"
)

// infinity is the end of a hole that a truncation leaves.
const infinity = uint64(math.MaxUint64)

// entry is one uncommitted range of a file: bytes of a pack, or a hole.
type entry struct {
	off, end uint64
	pk       *pack // nil: a hole
	pkOff    uint32
	app      bool // appended: its place is final only when committed
	flight   bool // a hole that is part of the commit under way
}

// slice returns the part of en inside [lo, hi).
func (en entry) slice(lo, hi uint64) entry {
	if en.pk != nil {
		en.pkOff += uint32(lo - en.off)
	}
	en.off, en.end = lo, hi
	return en
}

// overlay is what has changed since the last commit, as ordered, disjoint
// ranges. The inode's lock guards it. It keeps each pack's count of entries.
type overlay struct{ list []entry }

// search returns the index of the first entry that ends behind off.
func (o *overlay) search(off uint64) int {
	i, _ := slices.BinarySearchFunc(o.list, off, func(en entry, off uint64) int {
		if en.end <= off {
			return -1
		}
		return 1
	})
	return i
}

// at returns the entry that covers off, or where the next one starts.
func (o *overlay) at(off uint64) (en entry, ok bool, next uint64) {
	i := o.search(off)
	if i == len(o.list) {
		return entry{}, false, infinity
	}
	if o.list[i].off <= off {
		return o.list[i], true, 0
	}
	return entry{}, false, o.list[i].off
}

func count(en entry, d int) {
	if en.pk != nil {
		en.pk.pieces += d
	}
}

// cut uncovers [lo, hi).
func (o *overlay) cut(lo, hi uint64) {
	if lo >= hi {
		return
	}
	i := o.search(lo)
	j := i
	var keep [2]entry
	n := 0
	for ; j < len(o.list) && o.list[j].off < hi; j++ {
		en := o.list[j]
		count(en, -1)
		if en.off < lo {
			keep[n] = en.slice(en.off, lo)
			count(en, 1)
			n++
		}
		if en.end > hi {
			keep[n] = en.slice(hi, en.end)
			count(en, 1)
			n++
		}
	}
	if i != j || n > 0 {
		o.list = slices.Replace(o.list, i, j, keep[:n]...)
	}
}

// insert covers en's range with en, growing the entry before it when the two
// are one run of the same pack.
func (o *overlay) insert(en entry) {
	o.cut(en.off, en.end)
	i := o.search(en.off)
	if i > 0 {
		p := &o.list[i-1]
		if p.pk != nil && p.pk == en.pk && p.end == en.off && p.app == en.app &&
			uint64(p.pkOff)+(p.end-p.off) == uint64(en.pkOff) {
			p.end = en.end
			return
		}
	}
	count(en, 1)
	o.list = slices.Insert(o.list, i, en)
}

// remove drops the entries for which fn is true.
func (o *overlay) remove(fn func(entry) bool) {
	o.list = slices.DeleteFunc(o.list, func(en entry) bool {
		if !fn(en) {
			return false
		}
		count(en, -1)
		return true
	})
}

// dataEnd is where the last uncommitted byte ends; zero when there is none.
func (o *overlay) dataEnd() uint64 {
	for i := len(o.list) - 1; i >= 0; i-- {
		if o.list[i].pk != nil {
			return o.list[i].end
		}
	}
	return 0
}

// dataBytes is how many bytes are uncommitted.
func (o *overlay) dataBytes() uint64 {
	var n uint64
	for _, en := range o.list {
		if en.pk != nil {
			n += en.end - en.off
		}
	}
	return n
}

// splits returns the pack of which [lo, hi) would cut an entry in two.
func (o *overlay) splits(lo, hi uint64) *pack {
	if en, ok, _ := o.at(lo); ok && en.pk != nil && en.off < lo && hi < en.end {
		return en.pk
	}
	return nil
}

// repoint moves what refers to from's bytes at or behind base to to, whose log
// starts there.
func (o *overlay) repoint(from, to *pack, base uint32) {
	for i := 0; i < len(o.list); i++ {
		en := o.list[i]
		if en.pk != from {
			continue
		}
		last := uint64(en.pkOff) + (en.end - en.off)
		switch {
		case last <= uint64(base):
		case en.pkOff >= base:
			count(en, -1)
			en.pk, en.pkOff = to, en.pkOff-base
			count(en, 1)
			o.list[i] = en
		default:
			mid := en.off + uint64(base-en.pkOff)
			o.list[i] = en.slice(en.off, mid)
			tail := en.slice(mid, en.end)
			tail.pk, tail.pkOff = to, 0
			count(tail, 1)
			o.list = slices.Insert(o.list, i+1, tail)
			i++
		}
	}
}
