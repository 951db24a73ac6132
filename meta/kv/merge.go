package kv

import "bytes"

// firstKey is the lowest key of a state machine; below are the replica's own.
var firstKey = []byte{1}

func own(key []byte) bool { return len(key) == 0 || key[0] == 0 }

// merged reads layers of changes over a base; an earlier layer hides later ones.
type merged struct {
	layers []tree
	base   Reader
}

// Get returns the value of key, or nil.
func (m *merged) Get(key []byte) ([]byte, error) {
	if own(key) {
		return nil, nil
	}
	for _, t := range m.layers {
		if it, ok := t.Get(item{key: key}); ok {
			return it.get(), nil
		}
	}
	return m.base.Get(key)
}

// get never returns nil for a record that exists.
func (i item) get() []byte {
	switch {
	case i.gone:
		return nil
	case i.value == nil:
		return []byte{}
	}
	return i.value
}

// Ascend merges the layers and the base in ascending order.
func (m *merged) Ascend(lo, hi []byte, fn func(key, value []byte) bool) error {
	if bytes.Compare(lo, firstKey) < 0 {
		lo = firstKey
	}
	w := walk{
		fn: fn, more: true, less: func(a, b []byte) bool { return bytes.Compare(a, b) < 0 },
		step: (*cursor).next, in: func(k []byte) bool { return hi == nil || bytes.Compare(k, hi) < 0 },
	}
	for _, t := range m.layers {
		w.cursors = append(w.cursors, t.from(lo))
	}
	if err := m.base.Ascend(lo, hi, w.visit); err != nil {
		return err
	}
	w.drain(nil)
	return nil
}

// Descend merges the layers and the base in descending order.
func (m *merged) Descend(hi, lo []byte, fn func(key, value []byte) bool) error {
	if bytes.Compare(lo, firstKey) < 0 {
		lo = firstKey
	}
	w := walk{
		fn: fn, more: true, less: func(a, b []byte) bool { return bytes.Compare(a, b) > 0 },
		step: (*cursor).prev, in: func(k []byte) bool { return bytes.Compare(k, lo) >= 0 },
	}
	for _, t := range m.layers {
		w.cursors = append(w.cursors, t.downFrom(hi))
	}
	if err := m.base.Descend(hi, lo, w.visit); err != nil {
		return err
	}
	w.drain(nil)
	return nil
}

// walk interleaves the layers' cursors with the records that the base pushes.
type walk struct {
	cursors []*cursor
	fn      func(key, value []byte) bool
	less    func(a, b []byte) bool // a comes before b in the walk's direction
	step    func(*cursor)
	in      func(key []byte) bool // key is not past the end
	more    bool
}

// visit takes the base's next record.
func (w *walk) visit(key, value []byte) bool {
	if hidden := w.drain(key); w.more && !hidden {
		w.more = w.fn(key, value)
	}
	return w.more
}

// drain emits what the layers hold before key (everything, for nil) and at key
// itself; it reports whether a layer has a word on key.
func (w *walk) drain(key []byte) (hidden bool) {
	for w.more {
		it, ok := w.lowest()
		if !ok || (key != nil && w.less(key, it.key)) {
			return false
		}
		for _, c := range w.cursors {
			if c.valid && bytes.Equal(c.it.Item().key, it.key) {
				w.step(c)
			}
		}
		if !it.gone {
			w.more = w.fn(it.key, it.get())
		}
		if key != nil && bytes.Equal(key, it.key) {
			return true
		}
	}
	return true
}

// lowest returns the next item of all layers, from the uppermost that has it.
func (w *walk) lowest() (best item, ok bool) {
	for _, c := range w.cursors {
		if !c.valid {
			continue
		}
		it := c.it.Item()
		if !w.in(it.key) {
			c.valid = false
			continue
		}
		if !ok || w.less(it.key, best.key) {
			best, ok = it, true
		}
	}
	return best, ok
}
