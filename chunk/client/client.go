// Package client writes and reads whole blocks over many chunk servers: it
// implements chunk.Blocks. It places and codes blocks, writes around servers
// that fail or stall, verifies every byte that it returns, and finishes late
// chunks in the background. Rules are numbered in docs/design/data-path.md.
//
// Locks, in the order in which they are taken: a block's (writer, opening,
// small, read), then any one of the leaves (health, latePool, tables, window,
// budget, a call's own). No lock is held over a wait, nor over a callback of
// the user. Callbacks of the transport come on goroutines of its own.
package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Transport carries requests to chunk servers.
type Transport interface {
	// Send starts a request and returns at once. done is called exactly once,
	// never on the caller's stack: with the reply, or with an error that wraps
	// Unavailable, Timeout, … when none will come. After cancel, which may be
	// called at any time and more than once, done comes promptly. Once done has
	// been called the transport touches neither payload nor Dst any more.
	Send(addr string, req *wire.Request, done func(*wire.Response, error)) (cancel func())
}

// Reporter hears what the metadata service should know. Its methods are called
// from background tasks without any lock and may wait, but not for ever.
type Reporter interface {
	// ChunkPlaced tells that a chunk which the committed block record lacks is
	// durable on disk. version is the one that Seal gave the block.
	ChunkPlaced(key ids.ChunkKey, disk ids.DiskID, version uint64)
	// ChunkDamaged tells that a chunk is not what its block record says, or not
	// there at all. The record may be outdated: compare before acting on it.
	ChunkDamaged(key ids.ChunkKey, disk ids.DiskID, why string)
}

// Config is what a Client works with. Zero numbers mean the defaults.
type Config struct {
	Transport Transport
	Map       func() *cluster.Map // the newest map; never changed once returned
	Reporter  Reporter
	Sched     sched.Sched
	Log       *slog.Logger

	LateBudget  int64 // bytes of cells kept for late chunks; default 128 MiB
	ReadBudget  int64 // bytes of reads in flight; default 64 MiB
	TableBudget int64 // bytes of checksum tables kept for readers; default 8 MiB
	Window      int   // stripes in flight per block; default 3
	// Timeout bounds every wait that has no other bound: for grants, for a seal,
	// for enough chunks to read. Default 30 s.
	Timeout time.Duration
	// LateTimeout is how long a late chunk is tried before it is left to the
	// repair queue. Default 10 s.
	LateTimeout time.Duration
}

func (c *Config) defaults() {
	def := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&c.LateBudget, 128<<20)
	def(&c.ReadBudget, 64<<20)
	def(&c.TableBudget, 8<<20)
	def((*int64)(&c.Timeout), int64(30*time.Second))
	def((*int64)(&c.LateTimeout), int64(10*time.Second))
	if c.Window <= 0 {
		c.Window = 3
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// Client implements chunk.Blocks for one mount or job. Safe for concurrent use.
type Client struct {
	cfg    Config
	sched  sched.Sched
	log    *slog.Logger
	health *health
	late   *latePool
	tables *tables
	window *window
	hedges *budget
	finish *finisher
	// onFree, set by tests, sees every buffer before it goes back to its pool.
	onFree func([]byte)

	damaged struct {
		sync.Mutex
		seen map[damageKey]time.Duration // when it was reported last
		fifo []damageKey
	}
}

type damageKey struct {
	key  ids.ChunkKey
	disk ids.DiskID
}

var _ chunk.Blocks = (*Client)(nil)

// New returns a client. Close it when done.
func New(cfg Config) *Client {
	cfg.defaults()
	c := &Client{cfg: cfg, sched: cfg.Sched, log: cfg.Log}
	c.health = newHealth(c)
	c.late = newLatePool(c, cfg.LateBudget)
	c.tables = newTables(cfg.TableBudget)
	c.window = newWindow(c, cfg.ReadBudget)
	c.hedges = &budget{tokens: hedgeBurst}
	c.finish = newFinisher(c)
	c.damaged.seen = make(map[damageKey]time.Duration)
	return c
}

// Close ends the background work: pings stop, late chunks are left to the
// repair queue. It waits for the tasks that are under way; blocks that are
// still open must have been sealed or abandoned before.
func (c *Client) Close() {
	c.health.close()
	c.finish.close()
}

// maxReported bounds how many damaged chunks are remembered as reported, and
// reportAgain for how long.
const (
	maxReported = 1024
	reportAgain = time.Minute
)

// reportDamage tells the reporter of a damaged chunk, once a minute at most.
func (c *Client) reportDamage(key ids.ChunkKey, disk ids.DiskID, why string) {
	k := damageKey{key, disk}
	c.damaged.Lock()
	now := c.sched.Now()
	last, seen := c.damaged.seen[k]
	known := seen && now-last < reportAgain
	if seen && !known {
		c.damaged.seen[k] = now
	}
	if !seen {
		if len(c.damaged.fifo) >= maxReported {
			delete(c.damaged.seen, c.damaged.fifo[0])
			c.damaged.fifo = c.damaged.fifo[1:]
		}
		c.damaged.seen[k] = now
		c.damaged.fifo = append(c.damaged.fifo, k)
	}
	c.damaged.Unlock()
	if known {
		return
	}
	c.log.Warn("chunk damaged or missing", "chunk", key.String(), "disk", disk, "why", why)
	if c.cfg.Reporter != nil {
		c.sched.Go("report damage", func() { c.cfg.Reporter.ChunkDamaged(key, disk, why) })
	}
}

// reportPlaced tells the reporter that a late chunk is durable.
func (c *Client) reportPlaced(key ids.ChunkKey, disk ids.DiskID, version uint64) {
	if c.cfg.Reporter != nil {
		c.sched.Go("report placed", func() { c.cfg.Reporter.ChunkPlaced(key, disk, version) })
	}
}

// wake makes a context's end broadcast cond; the returned function undoes it.
// The lock is taken so that a waiter between its check and its wait is not missed.
func wake(ctx context.Context, mu sync.Locker, cond sched.Cond) func() bool {
	return sched.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		cond.Broadcast()
	})
}

// ended turns the end of a context into an error.
func ended(ctx context.Context, what string) error {
	switch err := ctx.Err(); {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return errkind.Timeout.Wrap("%s", what)
	}
	return errkind.Interrupted.Wrap("%s", what)
}
