package meta

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// formatVersion is the first byte of every value.
const formatVersion = 1

// view reads typed records. Its error sticks: after the first failure every
// read finds nothing, so logic runs to its end on an empty view and whoever
// made the view looks at err before using what came out.
type view struct {
	base kv.Reader
	own  *writes // writes of the command that are not in base yet, or nil
	err  error
}

func (v *view) fail(err error) {
	if v.err == nil {
		v.err = err
	}
}

// failed reports whether reads find nothing any more.
func (v *view) failed() bool { return v.err != nil || v.own != nil && v.own.over }

// get returns the value of key, or nil.
func (v *view) get(key []byte) []byte {
	if v.failed() {
		return nil
	}
	if v.own != nil {
		if w := v.own.find(key); w != nil {
			return w.value
		}
	}
	p, err := v.base.Get(key)
	if err != nil {
		v.fail(fmt.Errorf("read record %x: %w", key, err))
		return nil
	}
	return p
}

// has reports whether the key exists.
func (v *view) has(key []byte) bool { return v.get(key) != nil }

// load decodes the record of key into rec; false when there is none.
func (v *view) load(key []byte, rec codec.Message) bool {
	p := v.get(key)
	return p != nil && v.decode(key, p, rec)
}

// decode reads a value that was found under key.
func (v *view) decode(key, value []byte, rec codec.Message) bool {
	if err := decodeRecord(value, rec); err != nil {
		v.fail(errkind.Corrupt.Wrap("record %x: %v", key, err))
		return false
	}
	return true
}

// ascend calls fn for lo ≤ key < hi in order until it returns false. fn must
// not write.
func (v *view) ascend(lo, hi []byte, fn func(key, value []byte) bool) {
	if v.failed() {
		return
	}
	var mine []*write
	if v.own != nil {
		mine = v.own.from(lo)
	}
	inside := func(w *write) bool { return hi == nil || bytes.Compare(w.key, hi) < 0 }
	stopped := false
	err := v.base.Ascend(lo, hi, func(key, value []byte) bool {
		for len(mine) > 0 && bytes.Compare(mine[0].key, key) < 0 {
			w := mine[0]
			mine = mine[1:]
			if w.value != nil && !fn(w.key, w.value) {
				stopped = true
				return false
			}
		}
		if len(mine) > 0 && bytes.Equal(mine[0].key, key) {
			value = mine[0].value
			mine = mine[1:]
			if value == nil {
				return true
			}
		}
		stopped = !fn(key, value)
		return !stopped
	})
	if err != nil {
		v.fail(fmt.Errorf("scan records from %x: %w", lo, err))
		return
	}
	for _, w := range mine {
		if stopped || !inside(w) {
			return
		}
		if w.value != nil {
			stopped = !fn(w.key, w.value)
		}
	}
}

// last returns the last record with lo ≤ key ≤ hi, or nil.
func (v *view) last(hi, lo []byte) (key, value []byte) {
	if v.failed() {
		return nil, nil
	}
	if v.own != nil {
		if w := v.own.last(hi, lo); w != nil {
			key, value = w.key, w.value
		}
	}
	err := v.base.Descend(hi, lo, func(k, val []byte) bool {
		if key != nil && bytes.Compare(k, key) <= 0 {
			return false
		}
		if v.own != nil {
			if w := v.own.find(k); w != nil {
				return true // deleted: a live one would be in key
			}
		}
		key, value = k, val
		return false
	})
	if err != nil {
		v.fail(fmt.Errorf("scan records down from %x: %w", hi, err))
		return nil, nil
	}
	return key, value
}

// write is one pending change; a nil value deletes.
type write struct{ key, value []byte }

// writes is the ordered write set of one command. It keeps changes apart from
// the transaction until the command has succeeded.
type writes struct {
	list  []*write
	limit int
	over  bool // the limit was passed: the command touches too many records
}

func (w *writes) search(key []byte) (int, bool) {
	return slices.BinarySearchFunc(w.list, key, func(e *write, k []byte) int { return bytes.Compare(e.key, k) })
}

func (w *writes) find(key []byte) *write {
	if i, ok := w.search(key); ok {
		return w.list[i]
	}
	return nil
}

func (w *writes) from(lo []byte) []*write {
	i, _ := w.search(lo)
	return w.list[i:]
}

func (w *writes) last(hi, lo []byte) *write {
	i, ok := w.search(hi)
	if ok {
		i++
	}
	for i--; i >= 0 && bytes.Compare(w.list[i].key, lo) >= 0; i-- {
		if w.list[i].value != nil {
			return w.list[i]
		}
	}
	return nil
}

func (w *writes) put(key, value []byte) {
	i, ok := w.search(key)
	if ok {
		w.list[i].value = value
		return
	}
	if len(w.list) >= w.limit {
		w.over = true
		return
	}
	w.list = slices.Insert(w.list, i, &write{key, value})
}

// flush hands the changes to the transaction, in order of the keys.
func (w *writes) flush(t kv.Txn) {
	for _, e := range w.list {
		if e.value == nil {
			t.Delete(e.key)
		} else {
			t.Set(e.key, e.value)
		}
	}
}

func encodeRecord(rec codec.Message) []byte { return codec.Encode([]byte{formatVersion}, rec) }

func decodeRecord(p []byte, rec codec.Message) error {
	if len(p) == 0 || p[0] != formatVersion {
		return fmt.Errorf("unknown record version: %w", codec.ErrCorrupt)
	}
	return codec.Decode(p[1:], rec)
}
