package kv

import (
	"errors"
	"fmt"
	"sync"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Overlay holds in memory what was applied since the last flush, over a Store.
// View may be called from any goroutine; Apply, Freeze, BeginReplace and
// EndReplace from one only (the applier's); Frozen.Write from any one at a time.
type Overlay struct {
	store Store
	mu    struct {
		sync.Mutex
		active    tree
		snap      *tree // copy of active for views; nil after a change
		frozen    *tree // being flushed
		freezes   uint64
		bytes     int // of active
		flushing  int // bytes of frozen
		replacing bool
		hash      uint64
	}
}

// NewOverlay returns an empty overlay; hash is that of the store's records.
func NewOverlay(store Store, hash uint64) *Overlay {
	o := &Overlay{store: store}
	o.mu.active = newTree()
	o.mu.hash = hash
	return o
}

var errMoved = errors.New("kv: a flush began while the view was opened")

// viewTries bounds how often View starts again. A retry needs a flush to begin
// within the few microseconds of opening, so two in a row are already rare.
const viewTries = 100

// View calls fn with a consistent view of everything applied. It never blocks Apply.
func (o *Overlay) View(fn func(Reader) error) error {
	for range viewTries {
		layers, freezes, err := o.layers()
		if err != nil {
			return err
		}
		err = o.store.View(func(base Reader) error {
			// The store's view must not be newer than the layers: then it
			// would show some changes of a command and not others.
			if !o.still(freezes) {
				return errMoved
			}
			return fn(&merged{layers: layers, base: base})
		})
		if !errors.Is(err, errMoved) {
			return err
		}
	}
	return errkind.Busy.Wrap("open a view of the metadata: flushes follow each other too fast")
}

func (o *Overlay) layers() ([]tree, uint64, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.replacing {
		return nil, 0, errkind.Unavailable.Wrap("read the metadata: a copy of the state is being installed")
	}
	if o.mu.snap == nil {
		c := o.mu.active.copy()
		o.mu.snap = &c
	}
	layers := []tree{*o.mu.snap}
	if o.mu.frozen != nil {
		layers = append(layers, *o.mu.frozen)
	}
	return layers, o.mu.freezes, nil
}

func (o *Overlay) still(freezes uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.freezes == freezes
}

// Hash is the hash over all records.
func (o *Overlay) Hash() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.hash
}

// Bytes is about what the overlay holds, in bytes, a flush under way included.
func (o *Overlay) Bytes() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.bytes + o.mu.flushing
}

// Apply opens one read transaction of the store for several commands.
func (o *Overlay) Apply(fn func(b *Batch) error) error {
	return o.store.View(func(base Reader) error {
		o.mu.Lock()
		layers := []tree{{}, o.mu.active}
		if o.mu.frozen != nil {
			layers = append(layers, *o.mu.frozen)
		}
		o.mu.Unlock()
		return fn(&Batch{over: o, layers: layers, base: base, set: newTree()})
	})
}

// Batch applies commands one after the other.
type Batch struct {
	over   *Overlay
	layers []tree
	base   Reader
	set    tree // the write set, emptied for each command
}

// Do runs one command. Its writes are merged only if fn returns nil; on an
// error or a panic they are dropped.
func (b *Batch) Do(fn func(Txn) error) error {
	b.set.Clear()
	t := &writeSet{set: b.set, merged: merged{layers: b.layers, base: b.base}}
	t.layers[0] = b.set
	if err := fn(t); err != nil {
		return err
	}
	return b.merge()
}

// merge moves the write set into the overlay. All old values are read first,
// so that an unreadable one leaves nothing half done.
func (b *Batch) merge() error {
	if b.set.Len() == 0 {
		return nil
	}
	below := merged{layers: b.layers[1:], base: b.base}
	var delta uint64
	var failed error
	b.set.Scan(func(it item) bool {
		old, err := below.Get(it.key)
		if err != nil {
			failed = err
			return false
		}
		if old != nil {
			delta -= RecordHash(it.key, old)
		}
		if !it.gone {
			delta += RecordHash(it.key, it.value)
		}
		return true
	})
	if failed != nil {
		return fmt.Errorf("read the records that a command replaces: %w", failed)
	}
	o := b.over
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.hash += delta
	o.mu.snap = nil
	b.set.Scan(func(it item) bool {
		it = it.clone()
		prev, _ := o.mu.active.Set(it)
		o.mu.bytes += it.size()
		if prev.key != nil {
			o.mu.bytes -= prev.size()
		}
		return true
	})
	return nil
}

// clone copies the bytes: a command may well write a slice that a view of the
// store gave it.
func (i item) clone() item {
	buf := make([]byte, len(i.key)+len(i.value))
	n := copy(buf, i.key)
	copy(buf[n:], i.value)
	i.key, i.value = buf[:n:n], buf[n:]
	return i
}

// writeSet is the Txn of one command.
type writeSet struct {
	merged
	set tree
}

func (w *writeSet) Set(key, value []byte) { w.put(item{key: key, value: value}) }
func (w *writeSet) Delete(key []byte)     { w.put(item{key: key, gone: true}) }

func (w *writeSet) put(it item) {
	if own(it.key) {
		panic(fmt.Sprintf("kv: write to %x: keys that are empty or start with a zero byte belong to the replica", it.key))
	}
	w.set.Set(it)
}

// scan is a view for a walk during which the command goes on writing.
func (w *writeSet) scan() *merged {
	m := &merged{layers: append([]tree(nil), w.layers...), base: w.base}
	m.layers[0] = w.set.copy()
	return m
}

func (w *writeSet) Ascend(lo, hi []byte, fn func(key, value []byte) bool) error {
	return w.scan().Ascend(lo, hi, fn)
}

func (w *writeSet) Descend(hi, lo []byte, fn func(key, value []byte) bool) error {
	return w.scan().Descend(hi, lo, fn)
}

// Frozen is a set of changes on its way to the store.
type Frozen struct {
	over  *Overlay
	items tree
}

// Freeze starts a flush of everything applied so far, or returns nil while
// another is under way.
func (o *Overlay) Freeze() *Frozen {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.frozen != nil {
		return nil
	}
	f := o.mu.active
	o.mu.frozen, o.mu.flushing = &f, o.mu.bytes
	o.mu.active, o.mu.snap, o.mu.bytes = newTree(), nil, 0
	o.mu.freezes++
	return &Frozen{over: o, items: f}
}

// Write stores the changes in ascending order, and the replica's own record
// key, in one transaction. On an error nothing is stored and the overlay stays
// as it is; it cannot be flushed again.
func (f *Frozen) Write(key, value []byte) error {
	err := f.over.store.Update(func(t Txn) error {
		t.Set(key, value)
		f.items.Scan(func(it item) bool {
			if it.gone {
				t.Delete(it.key)
			} else {
				t.Set(it.key, it.value)
			}
			return true
		})
		return nil
	})
	if err != nil {
		return err
	}
	f.over.mu.Lock()
	defer f.over.mu.Unlock()
	f.over.mu.frozen, f.over.mu.flushing = nil, 0
	return nil
}

// BeginReplace makes views fail until EndReplace, while the store's content is
// replaced. No flush may be under way.
func (o *Overlay) BeginReplace() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.replacing = true
	o.mu.freezes++
}

// EndReplace empties the overlay; hash is that of the store's new records.
func (o *Overlay) EndReplace(hash uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.active, o.mu.snap, o.mu.frozen = newTree(), nil, nil
	o.mu.bytes, o.mu.flushing, o.mu.hash, o.mu.replacing = 0, 0, hash, false
}

// HashOf sums the hash over all of a store's records.
func HashOf(s Store) (hash uint64, err error) {
	err = s.View(func(r Reader) error {
		return r.Ascend(firstKey, nil, func(k, v []byte) bool {
			hash += RecordHash(k, v)
			return true
		})
	})
	return hash, err
}
