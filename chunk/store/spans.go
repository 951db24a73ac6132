package store

import (
	"slices"
	"sort"
)

// span is a range of pages [lo, hi) in a segment.
type span struct{ lo, hi uint32 }

func (s span) pages() uint32 { return s.hi - s.lo }

// spans is a sorted list of ranges that neither touch nor overlap.
type spans []span

// add joins s, which must not overlap what is there.
func (l spans) add(s span) spans {
	if s.pages() == 0 {
		return l
	}
	i := sort.Search(len(l), func(i int) bool { return l[i].lo >= s.lo })
	left := i > 0 && l[i-1].hi == s.lo
	right := i < len(l) && l[i].lo == s.hi
	switch {
	case left && right:
		l[i-1].hi = l[i].hi
		return slices.Delete(l, i, i+1)
	case left:
		l[i-1].hi = s.hi
		return l
	case right:
		l[i].lo = s.lo
		return l
	}
	return slices.Insert(l, i, s)
}

// remove takes s out; parts of s that are not there are ignored.
func (l spans) remove(s span) spans {
	var out spans
	for _, x := range l {
		if x.hi <= s.lo || x.lo >= s.hi {
			out = append(out, x)
			continue
		}
		if x.lo < s.lo {
			out = append(out, span{x.lo, s.lo})
		}
		if x.hi > s.hi {
			out = append(out, span{s.hi, x.hi})
		}
	}
	return out
}

// pages sums up.
func (l spans) pages() uint32 {
	var n uint32
	for _, s := range l {
		n += s.pages()
	}
	return n
}

// fits reports whether one range has n pages.
func (l spans) fits(n uint32) bool {
	return slices.ContainsFunc(l, func(s span) bool { return s.pages() >= n })
}

// complement returns what of [lo, hi) is not in l.
func (l spans) complement(lo, hi uint32) spans {
	var out spans
	for _, s := range l {
		if s.lo > lo {
			out = append(out, span{lo, s.lo})
		}
		lo = max(lo, s.hi)
	}
	if lo < hi {
		out = append(out, span{lo, hi})
	}
	return out
}

// intersect returns what is in both lists.
func (l spans) intersect(o spans) spans {
	var out spans
	for i, j := 0, 0; i < len(l) && j < len(o); {
		if lo, hi := max(l[i].lo, o[j].lo), min(l[i].hi, o[j].hi); lo < hi {
			out = append(out, span{lo, hi})
		}
		if l[i].hi < o[j].hi {
			i++
		} else {
			j++
		}
	}
	return out
}

// without returns what is in l and not in o.
func (l spans) without(o spans) spans {
	if len(l) == 0 || len(o) == 0 {
		return l
	}
	return l.intersect(o.complement(0, l[len(l)-1].hi))
}

// union joins two lists that do not overlap.
func (l spans) union(o spans) spans {
	out := make(spans, 0, len(l)+len(o))
	for len(l) > 0 || len(o) > 0 {
		if len(l) == 0 || len(o) > 0 && o[0].lo < l[0].lo {
			l, o = o, l
		}
		if n := len(out); n > 0 && out[n-1].hi == l[0].lo {
			out[n-1].hi = l[0].hi
		} else {
			out = append(out, l[0])
		}
		l = l[1:]
	}
	return out
}
