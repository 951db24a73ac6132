// Package store is the flash engine behind chunk.Store: one disk of segment
// files that hold self-describing chunks, and an index that is derived from
// them. docs/format/segment.md describes the files, docs/design/data-path.md
// the rules (3, 6, 7, 8, 9).
//
// The package starts no task of its own: Maintain does the periodic work.
//
// Locks, outermost first: del (one Delete at a time), openChunk.gate (one
// chunk's writes), ckpt (checkpoints, activation of segments), alloc (handing
// out ranges and writing their headers, so that a checkpoint falls between two
// of them), Store.mu. All but mu may be held across disk operations; mu never is.
package store

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// Config of a store. FS, Sched and Log are required; zero values elsewhere
// mean the defaults.
type Config struct {
	FS    vfs.FS
	Sched sched.Sched
	Log   *slog.Logger
	// SegmentSize of new segment files, bytes. Default: a 1,024th of the disk in
	// whole chunks of 16 MiB, at least 4 and at most 16 of them; up to 64 where
	// that makes fewer than 16,384 segments.
	SegmentSize int64
	// PoolBytes is how much written but free space is kept for reuse before it
	// is punched. Default: a hundredth of the disk, at most 4 GiB.
	PoolBytes int64
	// ReserveBytes of the disk are never given to chunks, so that deletes and
	// checkpoints work on a full disk. Default: a 64th of the disk, at most 256 MiB.
	ReserveBytes int64
	// CheckpointEvery and CheckpointBytes say when Maintain writes a
	// checkpoint: defaults 30 s and 1 GiB of new chunks.
	CheckpointEvery time.Duration
	CheckpointBytes int64
	// MaxOpen bounds the chunks that are open at once. Default 16,384.
	MaxOpen int
}

func (c *Config) setDefaults(capacity int64) {
	const chunkSize = ids.MaxChunk + pageSize
	if c.SegmentSize == 0 {
		n := min(max(capacity/1024/chunkSize, 4), 16)
		c.SegmentSize = pageSize + chunkSize*min(max(n, capacity/16384/chunkSize), 64)
	}
	c.SegmentSize &^= pageSize - 1
	if c.PoolBytes == 0 {
		c.PoolBytes = min(capacity/100, 4<<30)
	}
	if c.ReserveBytes == 0 {
		c.ReserveBytes = min(capacity/64, 256<<20)
	}
	if c.CheckpointEvery == 0 {
		c.CheckpointEvery = 30 * time.Second
	}
	if c.CheckpointBytes == 0 {
		c.CheckpointBytes = 1 << 30
	}
	if c.MaxOpen == 0 {
		c.MaxOpen = 16 << 10
	}
}

// Store is one disk. Safe for concurrent use; see chunk.Store.
type Store struct {
	cfg  Config
	id   Identity
	fs   vfs.FS
	log  *slog.Logger
	lock io.Closer // against a second process, nil where the FS has no such thing

	del   *gate
	ckpt  *gate
	alloc *gate
	clog  *ckptLog // guarded by ckpt; nil on a disk that was read-only at Open

	mu struct {
		sync.Mutex
		state
	}
	synced sched.Cond // over mu: a group commit ended
}

// state is what Store.mu guards.
type state struct {
	closed   bool
	readOnly error // why the disk refuses changes; nil while it takes them

	idx  index
	segs map[uint32]*segment
	next uint32 // number of the next new segment
	open map[ids.ChunkKey]*openChunk
	pins map[spot]*pin
	seen fronts

	active  [classes]*run // where new chunks go
	standby *run          // the next one, already in the checkpoint

	changed     []ids.ChunkKey // since the last checkpoint, with repetitions
	changedSegs []uint32       // likewise
	written     int64          // bytes of chunks made since the last checkpoint
	lastCkpt    time.Duration

	young []ids.ChunkKey // made since Young was called

	dirty []*segment // written since the last fdatasync
	group group
}

// Open brings up the disk that f holds. The directory must have been formatted.
// Errors: NotFound without identity, Busy when another process has it, Corrupt.
func Open(cfg Config) (*Store, error) {
	id, err := ReadIdentity(cfg.FS)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	capacity, _, err := cfg.FS.Space()
	if err != nil {
		return nil, wrapIO("open disk "+id.Disk.String(), err)
	}
	cfg.setDefaults(int64(capacity))
	s := &Store{cfg: cfg, id: id, fs: cfg.FS, log: cfg.Log}
	if l, ok := cfg.FS.(interface{ Lock() (io.Closer, error) }); ok {
		if s.lock, err = l.Lock(); err != nil {
			return nil, errkind.Busy.Wrap("open disk %s: another process uses it: %v", id.Disk, err)
		}
	}
	s.del, s.ckpt, s.alloc = newGate(cfg.Sched), newGate(cfg.Sched), newGate(cfg.Sched)
	s.synced = cfg.Sched.NewCond(&s.mu)
	s.mu.idx = newIndex()
	s.mu.segs = map[uint32]*segment{}
	s.mu.open = map[ids.ChunkKey]*openChunk{}
	s.mu.pins = map[spot]*pin{}
	if err := s.recover(); err != nil {
		s.closeFiles()
		return nil, fmt.Errorf("open disk %s: %w", id.Disk, err)
	}
	return s, nil
}

// Identity returns what the disk's identity file said at Open.
func (s *Store) Identity() Identity { return s.id }

// Inventory returns the whole-disk view: the store itself.
func (s *Store) Inventory() chunk.Inventory { return s }

// UUID of the disk.
func (s *Store) UUID() ids.UUID { return s.id.Disk }

// Usage reports the disk's space.
func (s *Store) Usage() chunk.Usage {
	size, free, err := s.fs.Space()
	s.mu.Lock()
	defer s.mu.Unlock()
	u := chunk.Usage{Capacity: size, Chunks: uint64(s.mu.idx.len())}
	if r := uint64(s.cfg.ReserveBytes); err == nil && free > r {
		u.Free = free - r
	}
	u.Free += s.mu.reusable()
	if why := s.mu.readOnly; why != nil {
		u.ReadOnly, u.Reason = true, why.Error()
	} else if err != nil {
		u.ReadOnly, u.Reason = true, err.Error()
	}
	return u
}

// reusable is what is free within the segments and still takes space on the
// disk, in bytes.
func (st *state) reusable() uint64 {
	var pages uint64
	for _, seg := range st.segs {
		pages += uint64(seg.free.pages()) - uint64(seg.punched.pages())
	}
	for _, r := range st.runs() {
		pages += uint64(r.pagesLeft())
	}
	return pages * pageSize
}

// List returns up to max chunks with keys greater than after, in order.
func (s *Store) List(after ids.ChunkKey, most int) ([]chunk.Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.mu.alive(); err != nil {
		return nil, err
	}
	var out []chunk.Info
	s.mu.idx.after(after, func(e entry) bool {
		if len(out) >= most {
			return false
		}
		i := chunk.Info{Key: e.key(), State: e.state}
		if e.state == chunk.StateSealed {
			i.Length, i.Digest = e.length, e.digest
		}
		out = append(out, i)
		return true
	})
	return out, nil
}

// youngMost bounds what Young remembers.
const youngMost = 64 << 10

// Young returns the chunks made since it was called last, so that somebody can
// ask what became of them without walking the whole index. It remembers at
// most 65,536; the walk finds the others.
func (s *Store) Young() []ids.ChunkKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := s.mu.young
	s.mu.young = nil
	return keys
}

// AbandonOpen deletes the chunks that an earlier life of the process left open.
func (s *Store) AbandonOpen() (int, error) {
	var keys []ids.ChunkKey
	s.mu.Lock()
	s.mu.idx.all(func(e entry) bool {
		if e.state == chunk.StateOpen && s.mu.open[e.key()] == nil {
			keys = append(keys, e.key())
		}
		return true
	})
	s.mu.Unlock()
	return len(keys), s.Delete(keys)
}

// Close checkpoints the index and closes the files. Readers must be closed
// before. Closing twice is harmless.
func (s *Store) Close() error {
	s.ckpt.lock()
	defer s.ckpt.unlock()
	s.mu.Lock()
	closed, failed := s.mu.closed, s.mu.readOnly
	s.mu.Unlock()
	if closed {
		return nil
	}
	var err error
	if failed == nil {
		s.retireAll()
		err = s.checkpoint(false)
	}
	s.mu.Lock()
	s.mu.closed = true
	s.mu.Unlock()
	s.closeFiles()
	if err != nil {
		return fmt.Errorf("close disk %s: %w", s.id.Disk, err)
	}
	return nil
}

// retireAll leaves a restart nothing to look for.
func (s *Store) retireAll() {
	s.alloc.lock()
	defer s.alloc.unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for cl := range s.mu.active {
		s.mu.active[cl].retire()
		s.mu.active[cl] = nil
	}
	s.mu.standby.retire()
	s.mu.standby = nil
}

func (s *Store) closeFiles() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seg := range s.mu.segs {
		seg.file.Close()
	}
	if s.clog != nil {
		s.clog.file.Close()
	}
	if s.lock != nil {
		s.lock.Close()
	}
}

func (st *state) alive() error {
	if st.closed {
		return errkind.Internal.Wrap("the disk is closed")
	}
	return nil
}

// writable returns why the disk takes no changes, or nil.
func (st *state) writable() error {
	if err := st.alive(); err != nil {
		return err
	}
	return st.readOnly
}

func (s *Store) writable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.writable()
}

// failed turns the error of a disk operation into one with a kind. Anything
// but a full disk makes the disk refuse changes from now on.
func (s *Store) failed(op string, err error) error {
	if isFull(err) {
		return errkind.NoSpace.Wrap("%s on disk %s: %v", op, s.id.Disk, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || s.mu.readOnly != nil {
		return errkind.ReadOnly.Wrap("%s on disk %s: %v", op, s.id.Disk, err)
	}
	s.mu.readOnly = errkind.ReadOnly.Wrap("disk %s refuses new chunks since %s failed: %v", s.id.Disk, op, err)
	s.log.Error("disk failed; it refuses new chunks and goes on serving reads", "disk", s.id.Disk.String(), "op", op, "err", err)
	return s.mu.readOnly
}

func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, errkind.NoSpace)
}

// wrapIO gives an error of the file system a kind, when the store is not up.
func wrapIO(op string, err error) error {
	switch {
	case isFull(err):
		return errkind.NoSpace.Wrap("%s: %v", op, err)
	case errors.Is(err, syscall.EROFS):
		return errkind.ReadOnly.Wrap("%s: %v", op, err)
	}
	return errkind.Internal.Wrap("%s: %v", op, err)
}

// gate is a lock that may be held across waits.
type gate struct {
	free sched.Cond
	mu   struct {
		sync.Mutex
		held bool
	}
}

func newGate(sc sched.Sched) *gate {
	g := &gate{}
	g.free = sc.NewCond(&g.mu)
	return g
}

func (g *gate) lock() {
	g.mu.Lock()
	for g.mu.held {
		g.free.Wait()
	}
	g.mu.held = true
	g.mu.Unlock()
}

func (g *gate) unlock() {
	g.mu.Lock()
	g.mu.held = false
	g.free.Signal()
	g.mu.Unlock()
}
