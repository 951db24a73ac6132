// Package bolt is the metadata store on bbolt. See docs/format/store.md.
package bolt

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	bbolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
)

const (
	// mapSize is address space only: when a map must grow, bbolt makes writers
	// and new readers wait for all readers.
	mapSize     = 64 << 30
	lockTimeout = 2 * time.Second
	// fillBatch bounds the memory of a replacement's transactions, in bytes.
	fillBatch = 8 << 20
)

var bucket = []byte("ckptfs1")

// Store is a kv.Store in one file. Safe for concurrent use; one Update at a time.
type Store struct {
	path string
	mu   struct {
		sync.RWMutex // read-held during views and updates, held while the file is exchanged
		db           *bbolt.DB
	}
}

// options: the free list is written with each flush (5 ms of CPU at 50,000 free
// pages, once a second), because without it opening scans the whole file
// (measured: 2.2 CPU-seconds for 590 MiB), and opening is part of every failover.
func options(noSync bool) *bbolt.Options {
	return &bbolt.Options{
		Timeout: lockTimeout, FreelistType: bbolt.FreelistMapType, InitialMmapSize: mapSize, NoSync: noSync,
	}
}

// Open opens the store at path, or creates it; its directory must exist.
func Open(path string) (*Store, error) {
	// A replacement that was never put in place is of no use.
	if err := os.Remove(path + ".new"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove the unfinished copy of the metadata store: %w", err)
	}
	s := &Store{path: path}
	db, err := openDB(path, false)
	if err != nil {
		return nil, err
	}
	s.mu.db = db
	return s, syncDir(filepath.Dir(path))
}

func openDB(path string, noSync bool) (*bbolt.DB, error) {
	db, err := bbolt.Open(path, 0o600, options(noSync))
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, errkind.Busy.Wrap("open metadata store %s: another process has it open; stop it first", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open metadata store %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucket)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create metadata store %s: %w", path, err), db.Close())
	}
	return db, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open directory of the metadata store: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}

// View calls fn with a view of the last Update.
func (s *Store) View(fn func(kv.Reader) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.db.View(func(tx *bbolt.Tx) error {
		return fn(&txn{path: s.path, b: tx.Bucket(bucket)})
	})
}

// Update runs fn in one synced transaction.
func (s *Store) Update(fn func(kv.Txn) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.db.Update(func(tx *bbolt.Tx) error {
		t := &txn{path: s.path, b: tx.Bucket(bucket)}
		if err := fn(t); err != nil {
			return err
		}
		return t.err
	})
}

// Close waits for views and updates to end.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.db.Close()
}

// Size is the file's size in bytes.
func (s *Store) Size() (n int64, err error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	err = s.mu.db.View(func(tx *bbolt.Tx) error {
		n = tx.Size()
		return nil
	})
	return n, err
}

// txn reads and writes the bucket. The first write error sticks and fails the
// transaction.
type txn struct {
	path string
	b    *bbolt.Bucket
	err  error
}

func (t *txn) damaged(key []byte) error {
	return errkind.Corrupt.Wrap("metadata record %q in %s fails its checksum and is not served: "+
		"stop this server, move its directory aside and let it copy the state from another metadata server, "+
		"or restore a backup", key, t.path)
}

func (t *txn) Get(key []byte) ([]byte, error) {
	env := t.b.Get(key)
	if env == nil {
		return nil, nil
	}
	value, ok := open(key, env)
	if !ok {
		return nil, t.damaged(key)
	}
	return value, nil
}

func (t *txn) Ascend(lo, hi []byte, fn func(key, value []byte) bool) error {
	c := t.b.Cursor()
	for k, env := c.Seek(lo); k != nil && (hi == nil || bytes.Compare(k, hi) < 0); k, env = c.Next() {
		value, ok := open(k, env)
		if !ok {
			return t.damaged(k)
		}
		if !fn(k, value) {
			break
		}
	}
	return nil
}

func (t *txn) Descend(hi, lo []byte, fn func(key, value []byte) bool) error {
	c := t.b.Cursor()
	var k, env []byte
	if hi != nil {
		k, env = c.Seek(hi)
	}
	switch {
	case k == nil:
		k, env = c.Last()
	case !bytes.Equal(k, hi):
		k, env = c.Prev()
	}
	for ; k != nil && bytes.Compare(k, lo) >= 0; k, env = c.Prev() {
		value, ok := open(k, env)
		if !ok {
			return t.damaged(k)
		}
		if !fn(k, value) {
			break
		}
	}
	return nil
}

func (t *txn) Set(key, value []byte) {
	if t.err == nil {
		if err := t.b.Put(key, seal(key, value)); err != nil {
			t.err = fmt.Errorf("write metadata record %q: %w", key, err)
		}
	}
}

func (t *txn) Delete(key []byte) {
	if t.err == nil {
		if err := t.b.Delete(key); err != nil {
			t.err = fmt.Errorf("delete metadata record %q: %w", key, err)
		}
	}
}

// Replace starts an empty store next to the present one.
func (s *Store) Replace() (kv.Replacement, error) {
	path := s.path + ".new"
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove an older copy of the metadata store: %w", err)
	}
	db, err := openDB(path, true)
	if err != nil {
		return nil, err
	}
	return &replacement{store: s, db: db, path: path}, nil
}

// replacement fills a new file; nothing is synced before Commit.
type replacement struct {
	store *Store
	db    *bbolt.DB // nil once ended
	path  string
	tx    *bbolt.Tx
	bytes int
}

func (r *replacement) Put(key, value []byte) error {
	if r.db == nil {
		return errors.New("the copy of the metadata store has ended")
	}
	if r.tx == nil {
		tx, err := r.db.Begin(true)
		if err != nil {
			return fmt.Errorf("fill copy of the metadata store: %w", err)
		}
		r.tx, r.bytes = tx, 0
	}
	b := r.tx.Bucket(bucket)
	b.FillPercent = 0.9
	if err := b.Put(bytes.Clone(key), seal(key, value)); err != nil {
		return fmt.Errorf("fill copy of the metadata store: %w", err)
	}
	if r.bytes += len(key) + len(value); r.bytes >= fillBatch {
		return r.flush()
	}
	return nil
}

func (r *replacement) flush() error {
	if r.tx == nil {
		return nil
	}
	err := r.tx.Commit()
	r.tx = nil
	if err != nil {
		return fmt.Errorf("fill copy of the metadata store: %w", err)
	}
	return nil
}

// Commit syncs the new file, renames it over the old one and opens it.
func (r *replacement) Commit() error {
	if r.db == nil {
		return errors.New("the copy of the metadata store has ended")
	}
	if err := r.flush(); err != nil {
		return err
	}
	db := r.db
	r.db = nil
	if err := errors.Join(db.Sync(), db.Close()); err != nil {
		return fmt.Errorf("sync copy of the metadata store: %w", err)
	}
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mu.db.Close(); err != nil {
		return fmt.Errorf("close metadata store %s: %w", s.path, err)
	}
	if err := os.Rename(r.path, s.path); err != nil {
		return fmt.Errorf("install copy of the metadata store: %w", err)
	}
	if err := syncDir(filepath.Dir(s.path)); err != nil {
		return err
	}
	now, err := openDB(s.path, false)
	if err != nil {
		return err
	}
	s.mu.db = now
	return nil
}

func (r *replacement) Abort() {
	if r.db == nil {
		return
	}
	if r.tx != nil {
		_ = r.tx.Rollback() // the file is removed below
		r.tx = nil
	}
	_ = r.db.Close()
	r.db = nil
	_ = os.Remove(r.path) // Open and Replace remove a leftover
}
