package server

import (
	"container/list"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Server is the logic of a chunk server. Safe for concurrent use.
type Server struct {
	cfg   Config
	lim   Limits
	clock sched.Sched
	pool  *pool
	disks map[ids.DiskID]*disk

	mu struct {
		sync.Mutex
		closing bool
		pending int // requests accepted and not released
		open    map[chunkAt]*openChunk
		byIdle  list.List // of *openChunk, the longest idle first
		waiting list.List // of *item: opens without buffers, oldest first
		puts    budget
		stores  budget
		reads   budget
		parked  []*item // reads without buffers, oldest first
		tasks   int
	}
	drained sched.Cond // pending, tasks or closing changed
}

// budget counts the bytes of one purpose.
type budget struct{ limit, used, peak int64 }

func (b *budget) take(n int64) bool {
	if n > b.limit-b.used {
		return false
	}
	b.used += n
	b.peak = max(b.peak, b.used)
	return true
}

func (b *budget) give(n int64) { b.used -= n }

// chunkAt names a chunk of one of the disks.
type chunkAt struct {
	disk ids.DiskID
	key  ids.ChunkKey
}

// New starts a server: its tasks run until Close.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, lim: cfg.Limits, clock: cfg.Sched, disks: make(map[ids.DiskID]*disk, len(cfg.Disks))}
	s.lim.setDefaults()
	s.lim.Window = max(s.lim.Window, wire.MaxPayload)
	s.pool = newPool(s.lim.PutBuffers + s.lim.StoreBuffers + s.lim.ReadBuffers)
	s.mu.open = make(map[chunkAt]*openChunk)
	s.mu.puts.limit, s.mu.stores.limit, s.mu.reads.limit = s.lim.PutBuffers, s.lim.StoreBuffers, s.lim.ReadBuffers
	s.mu.reads.limit = max(s.mu.reads.limit, 2*wire.MaxPayload)
	s.drained = s.clock.NewCond(&s.mu)
	s.mu.puts.limit = max(s.mu.puts.limit, s.lim.Window)
	share := s.mu.puts.limit
	if len(cfg.Disks) > 1 {
		share = max(share/2, min(share, s.lim.Window))
	}
	for _, d := range cfg.Disks {
		s.disks[d.ID] = s.startDisk(d, share)
	}
	s.start("chunk sweep", s.sweep)
	return s
}

// Disks lists what the server was made with.
func (s *Server) Disks() []Disk { return s.cfg.Disks }

// start runs a task that Close waits for.
func (s *Server) start(name string, fn func()) {
	s.mu.Lock()
	s.mu.tasks++
	s.mu.Unlock()
	s.clock.Go(name, func() {
		fn()
		s.mu.Lock()
		s.mu.tasks--
		s.drained.Broadcast()
		s.mu.Unlock()
	})
}

// Close drains: new requests are refused with Unavailable, what was accepted
// is finished. It returns when all is done, or with errkind.Timeout after
// bound; then tasks may still be stuck in a disk that does not answer.
// The stores stay open.
func (s *Server) Close(bound time.Duration) error {
	s.mu.Lock()
	s.mu.closing = true
	refused := s.takeWaiting()
	s.wakeAll()
	s.mu.Unlock()
	for _, it := range refused {
		s.finish(it, fail(errShutdown))
	}
	end := s.clock.Now() + bound
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.mu.pending > 0 || s.mu.tasks > 0 {
		left := end - s.clock.Now()
		if left <= 0 {
			return errkind.Timeout.Wrap("close chunk server: %d requests and %d tasks have not ended after %v", s.mu.pending, s.mu.tasks, bound)
		}
		s.drained.WaitFor(left)
	}
	s.pool.close()
	return nil
}

func (s *Server) wakeAll() {
	for _, d := range s.cfg.Disks {
		s.disks[d.ID].work.Broadcast()
		s.disks[d.ID].sync.Broadcast()
	}
	s.drained.Broadcast()
}

// Stats is a snapshot of what the server holds.
type Stats struct {
	PutBytes, PutPeak     int64 // granted or received payload of open chunks
	StoreBytes, StorePeak int64
	ReadBytes, ReadPeak   int64
	OpenChunks            int
	Waiting               int // opens without buffers
	Pending               int // requests under way
	Mapped                int64
}

// Stats returns the present numbers.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{
		PutBytes: s.mu.puts.used, PutPeak: s.mu.puts.peak,
		StoreBytes: s.mu.stores.used, StorePeak: s.mu.stores.peak,
		ReadBytes: s.mu.reads.used, ReadPeak: s.mu.reads.peak,
		OpenChunks: len(s.mu.open), Waiting: s.mu.waiting.Len(), Pending: s.mu.pending,
	}
	s.pool.mu.Lock()
	st.Mapped = s.pool.mu.mapped
	s.pool.mu.Unlock()
	return st
}

var errShutdown = errkind.Unavailable.Wrap("the chunk server is shutting down")

// Reply is one response on its way out. Its payload is Payload, or, when File
// is set, the FileLen bytes of it at FileOff. Release must be called once, when
// the payload is no longer needed.
type Reply struct {
	wire.Response
	Op      wire.Op
	ID      uint64
	File    *os.File
	FileOff int64
	FileLen int
	release func()
}

// PayloadLen is the number of payload bytes.
func (r *Reply) PayloadLen() int {
	if r.File != nil {
		return r.FileLen
	}
	return len(r.Payload)
}

// Release gives back what the reply holds: buffer, pin and place.
func (r *Reply) Release() {
	if r.release != nil {
		r.release()
	}
}

// fail makes a reply of an error.
func fail(err error) *Reply {
	kind := errkind.Of(err)
	var busy *busyError
	r := &Reply{Response: wire.Response{Status: kind, Text: strings.TrimSuffix(err.Error(), ": "+kind.Error())}}
	if kind == errkind.Busy {
		g := &wire.Grant{RetryAfter: 10}
		if errors.As(err, &busy) {
			g.RetryAfter = uint32(max(busy.after/time.Millisecond, 1))
		}
		r.Body = g
	}
	return r
}

// busyError is errkind.Busy with a hint when to try again.
type busyError struct {
	after time.Duration
	what  string
}

func (e *busyError) Error() string { return e.what + ": " + errkind.Busy.Error() }
func (e *busyError) Unwrap() error { return errkind.Busy }

// busy says after about how long to try again; the hint is spread so that
// those who were refused together do not return together.
func (s *Server) busy(after time.Duration, what string) error {
	return &busyError{after: after/2 + time.Duration(s.clock.Uint64()%uint64(after)), what: what}
}

// header makes the store's header of an open message.
func header(m *wire.Open) chunk.Header {
	return chunk.Header{Key: m.Key, Layout: m.Layout, Ino: m.Ino, FileOff: m.FileOff, Reserve: m.Reserve, Granule: m.Granule, Siblings: m.Siblings}
}
