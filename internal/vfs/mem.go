package vfs

import (
	"fmt"
	"io/fs"
	"path"
	"sort"
	"strings"
	"sync"
	"syscall"
)

// PageSize is the unit in which Mem keeps, loses and accounts bytes.
const PageSize = 4096

// Op names an operation of a Mem, for its hook.
type Op string

// The operations that a hook hears of.
const (
	OpCreate   Op = "create"
	OpOpen     Op = "open"
	OpRemove   Op = "remove"
	OpRename   Op = "rename"
	OpSyncDir  Op = "syncdir"
	OpRead     Op = "read"
	OpWrite    Op = "write"
	OpAllocate Op = "allocate"
	OpPunch    Op = "punch"
	OpTruncate Op = "truncate"
	OpSync     Op = "sync"
)

// Call describes an operation that is about to run.
type Call struct {
	Op   Op
	Name string // of the file when it was opened, or the directory
	Off  int64
	Len  int64
}

// Mem is a file system in memory that knows which bytes and names have been
// synced, and can therefore be crashed. Safe for concurrent use.
type Mem struct {
	mu struct {
		sync.Mutex
		memState
	}
}

type memState struct {
	names    map[string]*inode // what a reader sees; directories are nil inodes
	durable  map[string]*inode // what is surely there after a crash
	pending  []nameOp          // changes of names since their SyncDir, oldest first
	capacity int64             // bytes, 0 for no bound
	used     int64             // pages held, in bytes
	readOnly bool
	hook     func(Call) error
	life     int // raised by Crash: older handles are dead
}

// nameOp is one change of names that a crash may lose.
type nameOp struct {
	from, to string // create: to alone; remove: from alone; rename: both
	ino      *inode
}

func (o nameOp) touches(dir string) bool {
	return o.from != "" && path.Dir(o.from) == dir || o.to != "" && path.Dir(o.to) == dir
}

func (o nameOp) apply(names map[string]*inode) {
	if o.from != "" {
		delete(names, o.from)
	}
	if o.to != "" {
		names[o.to] = o.ino
	}
}

// NewMem returns an empty file system without a capacity bound.
func NewMem() *Mem {
	m := &Mem{}
	m.mu.names = map[string]*inode{".": nil}
	m.mu.durable = map[string]*inode{".": nil}
	return m
}

// SetCapacity bounds the bytes that files may hold; 0 lifts the bound.
func (m *Mem) SetCapacity(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.capacity = bytes
}

// SetReadOnly makes every change fail with EROFS, or ends that.
func (m *Mem) SetReadOnly(on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.readOnly = on
}

// SetHook installs a function that is called before each operation, outside
// every lock; the operation fails with the error that it returns. A failed
// Sync behaves as Linux does: the dirty pages count as clean afterwards and
// are not durable, and the next Sync says nothing of them. Nil removes it.
func (m *Mem) SetHook(hook func(Call) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.hook = hook
}

func (m *Mem) before(c Call, writes bool) error {
	m.mu.Lock()
	hook, ro := m.mu.hook, m.mu.readOnly
	m.mu.Unlock()
	if hook != nil {
		if err := hook(c); err != nil {
			return pathErr(string(c.Op), c.Name, err)
		}
	}
	if ro && writes {
		return pathErr(string(c.Op), c.Name, syscall.EROFS)
	}
	return nil
}

func pathErr(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func (s *memState) isDir(name string) bool {
	ino, ok := s.names[name]
	return ok && ino == nil
}

// Create makes a new file.
func (m *Mem) Create(name string) (File, error) {
	name = path.Clean(name)
	if err := m.before(Call{Op: OpCreate, Name: name}, true); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.mu.names[name]; ok {
		return nil, pathErr("create", name, fs.ErrExist)
	}
	if !m.mu.isDir(path.Dir(name)) {
		return nil, pathErr("create", name, fs.ErrNotExist)
	}
	ino := &inode{cur: map[int64]*page{}, durable: map[int64]*page{}, dirty: map[int64]struct{}{}, links: 1}
	m.changeName(nameOp{to: name, ino: ino})
	return m.handle(name, ino), nil
}

// Open opens an existing file.
func (m *Mem) Open(name string) (File, error) {
	name = path.Clean(name)
	if err := m.before(Call{Op: OpOpen, Name: name}, false); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ino, ok := m.mu.names[name]
	switch {
	case !ok:
		return nil, pathErr("open", name, fs.ErrNotExist)
	case ino == nil:
		return nil, pathErr("open", name, syscall.EISDIR)
	}
	return m.handle(name, ino), nil
}

func (m *Mem) handle(name string, ino *inode) *memFile {
	ino.opens++
	return &memFile{fs: m, name: name, ino: ino, life: m.mu.life}
}

// changeName applies a change now and remembers it as not yet durable.
func (m *Mem) changeName(op nameOp) {
	op.apply(m.mu.names)
	m.mu.pending = append(m.mu.pending, op)
}

func (m *Mem) unlinked(ino *inode) {
	ino.links--
	m.reap(ino)
}

// reap returns the space of a file that has neither a name nor a handle.
func (m *Mem) reap(ino *inode) {
	if ino.links == 0 && ino.opens == 0 {
		m.mu.used -= ino.held() * PageSize
		ino.released = true
	}
}

// Remove removes a file or an empty directory.
func (m *Mem) Remove(name string) error {
	name = path.Clean(name)
	if err := m.before(Call{Op: OpRemove, Name: name}, true); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ino, ok := m.mu.names[name]
	if !ok {
		return pathErr("remove", name, fs.ErrNotExist)
	}
	if ino == nil && len(m.mu.children(name)) > 0 {
		return pathErr("remove", name, syscall.ENOTEMPTY)
	}
	m.changeName(nameOp{from: name})
	if ino != nil {
		m.unlinked(ino)
	}
	return nil
}

// Rename moves a file, replacing what is at the new name.
func (m *Mem) Rename(from, to string) error {
	from, to = path.Clean(from), path.Clean(to)
	if err := m.before(Call{Op: OpRename, Name: from}, true); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ino, ok := m.mu.names[from]
	switch {
	case !ok || !m.mu.isDir(path.Dir(to)):
		return pathErr("rename", from, fs.ErrNotExist)
	case ino == nil || m.mu.isDir(to):
		return pathErr("rename", from, fmt.Errorf("directories are not renamed: %w", syscall.EISDIR))
	case from == to:
		return nil
	}
	old := m.mu.names[to]
	m.changeName(nameOp{from: from, to: to, ino: ino})
	if old != nil {
		m.unlinked(old)
	}
	return nil
}

// MkdirAll makes a directory and its parents.
func (m *Mem) MkdirAll(dir string) error {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	parts := strings.Split(dir, "/")
	for i := range parts {
		name := path.Join(parts[:i+1]...)
		if ino, ok := m.mu.names[name]; ok {
			if ino != nil {
				return pathErr("mkdir", name, syscall.ENOTDIR)
			}
			continue
		}
		if m.mu.readOnly {
			return pathErr("mkdir", name, syscall.EROFS)
		}
		m.changeName(nameOp{to: name})
	}
	return nil
}

func (s *memState) children(dir string) []string {
	var out []string
	for name := range s.names {
		if name != "." && path.Dir(name) == dir {
			out = append(out, path.Base(name))
		}
	}
	sort.Strings(out)
	return out
}

// List returns the names in dir in ascending order.
func (m *Mem) List(dir string) ([]string, error) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.mu.isDir(dir) {
		return nil, pathErr("list", dir, fs.ErrNotExist)
	}
	return m.mu.children(dir), nil
}

// SyncDir makes the changes of names in dir durable.
func (m *Mem) SyncDir(dir string) error {
	dir = path.Clean(dir)
	if err := m.before(Call{Op: OpSyncDir, Name: dir}, true); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.mu.isDir(dir) {
		return pathErr("syncdir", dir, fs.ErrNotExist)
	}
	rest := m.mu.pending[:0:0]
	for _, op := range m.mu.pending {
		if op.touches(dir) {
			op.apply(m.mu.durable)
		} else {
			rest = append(rest, op)
		}
	}
	m.mu.pending = rest
	return nil
}

// Space returns the capacity and what is free of it. Without a bound both are
// very large.
func (m *Mem) Space() (size, free uint64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	capacity := m.mu.capacity
	if capacity == 0 {
		capacity = 1 << 50
	}
	return uint64(capacity), uint64(max(0, capacity-m.mu.used)), nil
}

// take accounts n more pages, or fails with ENOSPC.
func (m *Mem) take(n int64) error {
	if m.mu.capacity > 0 && m.mu.used+n*PageSize > m.mu.capacity {
		return syscall.ENOSPC
	}
	m.mu.used += n * PageSize
	return nil
}
