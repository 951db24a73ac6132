// Package worker is the life of a chunk server beside its requests: it reports
// to the metadata service each second, deletes the chunks that it is told to,
// rebuilds lost ones, finds out what became of chunks that nobody has
// committed, and lets the disks do their periodic work.
//
// One task sends heartbeats and never touches a disk, so a hanging disk does
// not make the server look dead. Each disk has a task for its deletions, its
// questions and its maintenance; each job has one while it lasts.
//
// There is one lock, Worker.mu; it is never held over a call of an interface.
package worker

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// At names a chunk on a disk.
type At struct {
	Key  ids.ChunkKey
	Disk ids.DiskID
}

// Usage is one disk's report.
type Usage struct {
	ID   ids.DiskID
	UUID ids.UUID
	chunk.Usage
}

// Report is what a heartbeat tells.
type Report struct {
	Disks []Usage
	Freed []At // deletions ordered earlier that are durable
	Done  []Result
	Room  int // jobs that the server would take besides
}

// Result is the outcome of one job; nil Err is success.
type Result struct {
	Job uint64
	Err error
}

// JobKind says what is to be done.
type JobKind uint8

// The kinds of job.
const (
	JobRepair  JobKind = iota + 1 // rebuild chunk Index of Block on Target and have it recorded
	JobCompact                    // rewrite [Off, End) of Ino
)

// Job is one order that takes time.
type Job struct {
	ID       uint64
	Kind     JobKind
	Block    ids.Block
	Index    uint8
	Target   ids.DiskID
	Ino      ids.Ino
	Off, End uint64
}

// Orders answer a report.
type Orders struct {
	Delete  []At // repeated until they are reported as freed
	Jobs    []Job
	Unknown bool // the server must register again
}

// Ask is a question about a chunk. Writer is the session in its header when
// that is not the block's own, else zero.
type Ask struct {
	Key    ids.ChunkKey
	Writer ids.Session
}

// Verdict is the answer (data-path rule 17).
type Verdict uint8

// The verdicts.
const (
	Keep Verdict = iota
	Delete
	NotYet
)

// Control is the metadata service. Calls end with an error when their context
// does. Safe for concurrent use.
type Control interface {
	Heartbeat(ctx context.Context, r *Report) (*Orders, error)
	// Verdicts answers in the order of the questions.
	Verdicts(ctx context.Context, disk ids.DiskID, asks []Ask) ([]Verdict, error)
	// Place records that the chunk is durable on the disk, if the block record
	// still has the version; an error of kind Changed otherwise, NotFound when
	// the block is dead.
	Place(ctx context.Context, at At, version uint64) error
	// Register makes the server known once more.
	Register(ctx context.Context) error
}

// Rebuilder computes a chunk from the others of its block; chunk/client does.
type Rebuilder interface {
	// RebuildChunk hands the chunk's pieces to w in order and ends with an error
	// unless they are, together, what the block record says.
	RebuildChunk(ctx context.Context, b *ids.Block, index int, w func(off uint32, data []byte, sums []uint64) error) error
}

// Compactor rewrites a piece of a file.
type Compactor interface {
	Compact(ctx context.Context, ino ids.Ino, off, end uint64) error
}

// Disk is one store and its number in the cluster. A store may have a method
// Young() []ids.ChunkKey, which lists the chunks made since it was called
// last; without it they are found by walking the inventory.
type Disk struct {
	ID    ids.DiskID
	Store chunk.Store
}

// Config of a Worker. Control, Disks, Sched and Log are required; without a
// Rebuilder or Compactor jobs of their kind fail as Unsupported. Zero numbers
// mean the defaults.
type Config struct {
	Control Control
	Rebuild Rebuilder
	Compact Compactor
	// Session is the session of this server that its repairs are written under,
	// 0 when it has none (now).
	Session func() ids.Session
	Disks   []Disk
	Sched   sched.Sched
	Log     *slog.Logger

	MaxJobs    int           // at once; default 2, each takes up to 16 MiB
	BeatEvery  time.Duration // default 1 s
	CallBound  time.Duration // for one call of Control; default 5 s
	JobBound   time.Duration // for one job; default 2 minutes
	AskAfter   time.Duration // age at which a chunk is asked about first; default 10 s
	AskEvery   time.Duration // how often again while the answer is NotYet; default 10 s
	WalkEvery  time.Duration // rest between two walks over all chunks; default 10 minutes
	WalkPage   int           // chunks of a walk in each second; default 2,048
	DeletePage int           // chunks deleted in one go; default 256
}

func (c *Config) setDefaults() {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.BeatEvery, time.Second},
		{&c.CallBound, 5 * time.Second},
		{&c.JobBound, 2 * time.Minute},
		{&c.AskAfter, 10 * time.Second},
		{&c.AskEvery, 10 * time.Second},
		{&c.WalkEvery, 10 * time.Minute},
	} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	for _, d := range []struct {
		v   *int
		def int
	}{{&c.MaxJobs, 2}, {&c.WalkPage, 2048}, {&c.DeletePage, 256}} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	if c.Session == nil {
		c.Session = func() ids.Session { return 0 }
	}
}

// Worker is the running background of one chunk server.
type Worker struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	disks  []*keeper

	mu struct {
		sync.Mutex
		state
	}
	wake sched.Cond // over mu: closing, or new orders
}

type state struct {
	closing bool
	tasks   int
	freed   []At
	done    []Result
	jobs    map[uint64]struct{}
	busy    map[At]struct{} // targets of jobs: not to be asked about or deleted
}

// Start begins the work. Close ends it.
func Start(cfg Config) *Worker {
	cfg.setDefaults()
	w := &Worker{cfg: cfg}
	w.ctx, w.cancel = sched.WithCancel(context.Background(), cfg.Sched)
	w.wake = cfg.Sched.NewCond(&w.mu)
	w.mu.jobs, w.mu.busy = map[uint64]struct{}{}, map[At]struct{}{}
	for _, d := range cfg.Disks {
		w.disks = append(w.disks, newKeeper(w, d))
	}
	w.run("heartbeat", w.beats)
	for _, k := range w.disks {
		w.run("keeper", k.loop)
	}
	return w
}

// run starts a task that Close waits for.
func (w *Worker) run(name string, fn func()) {
	w.mu.Lock()
	w.mu.tasks++
	w.mu.Unlock()
	w.cfg.Sched.Go(name, func() {
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.mu.tasks--
			w.wake.Broadcast()
		}()
		fn()
	})
}

// Close cancels what is under way and returns when every task has ended.
func (w *Worker) Close() {
	w.cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.closing = true
	w.wake.Broadcast()
	for w.mu.tasks > 0 {
		w.wake.Wait()
	}
}

// rest waits for d and reports whether work goes on.
func (w *Worker) rest(d time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	end := w.cfg.Sched.Now() + d
	for !w.mu.closing {
		left := end - w.cfg.Sched.Now()
		if left <= 0 {
			break
		}
		w.wake.WaitFor(left)
	}
	return !w.mu.closing
}

// bound returns a context that ends after d.
func (w *Worker) bound(d time.Duration) (context.Context, func()) {
	return sched.WithTimeout(w.ctx, w.cfg.Sched, d)
}

// beats reports each second for as long as the worker lives.
func (w *Worker) beats() {
	for {
		if err := w.beat(); err != nil && w.ctx.Err() == nil {
			w.cfg.Log.Warn("heartbeat failed", "err", err)
		}
		if !w.rest(w.cfg.BeatEvery) {
			return
		}
	}
}

// Bounds of what one heartbeat tells; the rest goes with the next.
const (
	maxFreed = 4096
	maxDone  = 256
)

func (w *Worker) beat() error {
	r := &Report{}
	for _, k := range w.disks {
		r.Disks = append(r.Disks, k.usage())
	}
	w.mu.Lock()
	r.Freed = slices.Clone(w.mu.freed[:min(len(w.mu.freed), maxFreed)])
	r.Done = slices.Clone(w.mu.done[:min(len(w.mu.done), maxDone)])
	r.Room = max(0, w.cfg.MaxJobs-len(w.mu.jobs))
	w.mu.Unlock()
	ctx, end := w.bound(w.cfg.CallBound)
	defer end()
	o, err := w.cfg.Control.Heartbeat(ctx, r)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.mu.freed = slices.Delete(w.mu.freed, 0, len(r.Freed))
	w.mu.done = slices.Delete(w.mu.done, 0, len(r.Done))
	w.mu.Unlock()
	w.take(o)
	if o.Unknown {
		return w.cfg.Control.Register(ctx)
	}
	return nil
}

// take hands the orders out.
func (w *Worker) take(o *Orders) {
	for _, k := range w.disks {
		var keys []ids.ChunkKey
		for _, at := range o.Delete {
			if at.Disk == k.id {
				keys = append(keys, at.Key)
			}
		}
		k.order(keys)
	}
	for i := range o.Jobs {
		w.startJob(&o.Jobs[i])
	}
}

func (w *Worker) disk(id ids.DiskID) *keeper {
	for _, k := range w.disks {
		if k.id == id {
			return k
		}
	}
	return nil
}

// isBusy reports whether a job is making the chunk.
func (w *Worker) isBusy(at At) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.mu.busy[at]
	return ok
}

func unsupported(what string) error {
	return errkind.Unsupported.Wrap("this chunk server does no %s", what)
}
