package kv

import (
	"bytes"
	"errors"
	"sync"
)

// ErrCrashed is returned by a Mem after Crash.
var ErrCrashed = errors.New("kv: the store has crashed")

// Mem is a Store in memory, for tests and the simulation. An Update is durable
// at the moment at which it returns nil and leaves no trace before.
type Mem struct {
	// BeforeCommit, when set, is called by Update and Commit before anything
	// becomes durable: it may wait, or fail the transaction.
	BeforeCommit func() error

	mu struct {
		sync.Mutex
		tree    tree
		crashed bool
	}
}

// NewMem returns an empty store.
func NewMem() *Mem {
	m := &Mem{}
	m.mu.tree = newTree()
	return m
}

// Crash ends the store, as a power cut does: later calls fail, and an Update
// under way commits nothing. It returns a store with what was durable.
func (m *Mem) Crash() *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.crashed = true
	n := NewMem()
	n.mu.tree = m.mu.tree
	return n
}

func (m *Mem) current() (tree, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.crashed {
		return tree{}, ErrCrashed
	}
	return m.mu.tree, nil
}

// View calls fn with the state of the last Update.
func (m *Mem) View(fn func(Reader) error) error {
	t, err := m.current()
	if err != nil {
		return err
	}
	return fn(memReader{t})
}

// Update runs fn on a copy and puts it in place. Updates must not run
// concurrently with each other.
func (m *Mem) Update(fn func(Txn) error) error {
	m.mu.Lock()
	t := m.mu.tree.copy()
	m.mu.Unlock()
	if err := fn(memTxn{memReader{t}}); err != nil {
		return err
	}
	return m.commit(t)
}

func (m *Mem) commit(t tree) error {
	if m.BeforeCommit != nil {
		if err := m.BeforeCommit(); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.crashed {
		return ErrCrashed
	}
	m.mu.tree = t
	return nil
}

// Close does nothing: the content can be opened again by using it.
func (*Mem) Close() error { return nil }

// Replace starts an empty replacement.
func (m *Mem) Replace() (Replacement, error) { return &memReplacement{mem: m, tree: newTree()}, nil }

type memReplacement struct {
	mem  *Mem
	tree tree
}

func (r *memReplacement) Put(key, value []byte) error {
	r.tree.Set(item{key: bytes.Clone(key), value: bytes.Clone(value)})
	return nil
}
func (r *memReplacement) Commit() error { return r.mem.commit(r.tree) }
func (r *memReplacement) Abort()        { r.tree = newTree() }

type memReader struct{ t tree }

func (r memReader) Get(key []byte) ([]byte, error) {
	it, ok := r.t.Get(item{key: key})
	if !ok {
		return nil, nil
	}
	return it.get(), nil
}

func (r memReader) Ascend(lo, hi []byte, fn func(key, value []byte) bool) error {
	for c := r.t.from(lo); c.valid; c.next() {
		it := c.it.Item()
		if (hi != nil && bytes.Compare(it.key, hi) >= 0) || !fn(it.key, it.get()) {
			break
		}
	}
	return nil
}

func (r memReader) Descend(hi, lo []byte, fn func(key, value []byte) bool) error {
	for c := r.t.downFrom(hi); c.valid; c.prev() {
		it := c.it.Item()
		if bytes.Compare(it.key, lo) < 0 || !fn(it.key, it.get()) {
			break
		}
	}
	return nil
}

type memTxn struct{ memReader }

func (t memTxn) Set(key, value []byte) { t.t.Set(item{key: key, value: value}) }
func (t memTxn) Delete(key []byte)     { t.t.Delete(item{key: key}) }
