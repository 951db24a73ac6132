package file

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Meta is the metadata service as the engine sees it. Do sends a request,
// retrying until it is answered or ctx ends, and decodes the reply's body;
// errors wrap an errkind. Safe for concurrent use.
type Meta interface {
	Do(ctx context.Context, req api.Request, reply codec.Message) error
}

// IDs makes block ids of the mount's session. It must not block: it is called
// with a lock held.
type IDs interface {
	NextBlockID(slot ids.Slot) ids.BlockID
}

// Config is what an engine needs. Zero values of the numbers take the default.
type Config struct {
	Meta   Meta
	IDs    IDs
	Blocks chunk.Blocks
	Sched  sched.Sched
	Log    *slog.Logger
	// Budget bounds the buffers of the engine, in bytes (1 GiB).
	Budget int64
	// OpTimeout bounds every wait (60 s). An inode whose bytes could not be
	// stored for that long loses them, and every handle gets the error.
	OpTimeout time.Duration
	// FlushEvery bounds how long a written byte stays uncommitted, and a block
	// open (5 s).
	FlushEvery time.Duration
	// Wall gives file times in ns since 1970, corrected to the servers' clock;
	// nil is Sched.Wall.
	Wall func() int64
	// Invalidate is called, from a task that holds no lock, when pages that the
	// kernel may hold from off on are wrong: dirty bytes were dropped (err says
	// why), or an append landed elsewhere (err is nil). May be nil.
	Invalidate func(ino ids.Ino, off uint64, err error)
}

// minBudget keeps the pools large enough to be divided.
const minBudget = 2 << 20

// Engine serves all files of one mount. Safe for concurrent use.
type Engine struct {
	cfg      Config
	budget   *budget
	sendPool *sendPool
	copyPool *sendPool // for CopyRange: its holder waits for write buffers
	idlePool *sendPool // for compaction, which holds buffers while it reads
	cache    *cache
	blockIDs blockIDs
	maxPiece int        // the longest write that is done at once, bytes
	cond     sched.Cond // over mu
	mu       struct {
		sync.Mutex
		inodes     map[ids.Ino]*inode
		dirty      list.List // of *inode, oldest first
		closed     bool
		compacting bool // one inode at a time
		tasks      int
		ticker     sched.Timer
		lastSeen   memory[version]
		shapes     memory[shape]
		lost       memory[error]
		releases   []ids.Ino // to be released, in order
		releasing  []ids.Ino // in the call under way
	}
}

// New starts an engine. End it with Close.
func New(cfg Config) *Engine {
	cfg.Budget = max(cmp.Or(cfg.Budget, 1<<30), minBudget)
	cfg.OpTimeout = cmp.Or(cfg.OpTimeout, time.Minute)
	cfg.FlushEvery = cmp.Or(cfg.FlushEvery, 5*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	e := &Engine{cfg: cfg}
	e.budget = newBudget(cfg.Sched, cfg.Budget*5/8, e.relieve)
	e.maxPiece = min(MaxWrite, int(e.budget.total/4))
	e.sendPool = newSendPool(cfg.Sched)
	e.copyPool = newSendPool(cfg.Sched)
	e.idlePool = newSendPool(cfg.Sched)
	e.cache = newCache(e, cfg.Budget/4)
	e.blockIDs.ids = cfg.IDs
	e.cond = cfg.Sched.NewCond(&e.mu)
	e.mu.inodes = map[ids.Ino]*inode{}
	e.mu.lastSeen.limit, e.mu.shapes.limit, e.mu.lost.limit = 1<<16, 1<<16, 1024
	e.mu.ticker = cfg.Sched.AfterFunc(cfg.FlushEvery/5, func() { e.task("tick", e.tick) })
	return e
}

func (e *Engine) wall() int64 {
	if e.cfg.Wall != nil {
		return e.cfg.Wall()
	}
	return e.cfg.Sched.Wall().UnixNano()
}

// task starts a task that Close waits for.
func (e *Engine) task(name string, fn func()) {
	e.mu.Lock()
	e.mu.tasks++
	e.mu.Unlock()
	e.cfg.Sched.Go("file."+name, func() {
		defer func() {
			e.mu.Lock()
			e.mu.tasks--
			e.cond.Broadcast()
			e.mu.Unlock()
		}()
		fn()
	})
}

// notify calls Config.Invalidate from a task.
func (e *Engine) notify(ino ids.Ino, off uint64, err error) {
	if e.cfg.Invalidate != nil {
		e.task("invalidate", func() { e.cfg.Invalidate(ino, off, err) })
	}
}

// get returns the inode's state, making it when there is none, and keeps it
// until unhold.
func (e *Engine) get(ino ids.Ino) *inode {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.mu.inodes[ino]
	if n == nil {
		n = &inode{e: e, ino: ino}
		n.mu.shape, _ = e.mu.shapes.take(ino)
		n.acct.n = n
		n.cond = e.cfg.Sched.NewCond(&n.mu)
		e.mu.inodes[ino] = n
	}
	n.users++
	return n
}

// loaded returns the inode's state, kept until unhold, or nil.
func (e *Engine) loaded(ino ids.Ino) *inode {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.mu.inodes[ino]
	if n != nil {
		n.users++
	}
	return n
}

// hold keeps the inode's state.
func (e *Engine) hold(n *inode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n.users++
}

// unhold undoes hold, get or loaded. The last one of a clean inode without
// handles drops the state. n.mu must not be held.
func (e *Engine) unhold(n *inode) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	n.users--
	e.forgetLocked(n)
}

func (e *Engine) addDirty(n *inode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n.dirtyAt = e.mu.dirty.PushBack(n)
}

func (e *Engine) removeDirty(n *inode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.dirty.Remove(n.dirtyAt)
	n.dirtyAt = nil
	e.forgetLocked(n)
}

// forgetLocked drops the state of an inode that nobody needs; n.mu and e.mu
// are held.
func (e *Engine) forgetLocked(n *inode) {
	if n.users > 0 || n.dirtyAt != nil || e.mu.inodes[n.ino] != n {
		return
	}
	delete(e.mu.inodes, n.ino)
	if n.registered {
		n.registered = false
		e.mu.releases = append(e.mu.releases, n.ino)
	}
	if !n.mu.foreign && n.mu.attr.Ino != 0 && n.mu.pagesVer == n.mu.attr.MapVersion {
		e.mu.lastSeen.put(n.ino, version{n.mu.attr.MapVersion, n.mu.attr.Size})
	}
	if n.mu.shape.version == n.mu.attr.MapVersion && n.mu.attr.Ino != 0 {
		e.mu.shapes.put(n.ino, n.mu.shape)
	}
	if n.mu.err != nil && !n.mu.errSeen {
		e.mu.lost.put(n.ino, n.mu.err)
	}
}

func (e *Engine) dirtyInodes() []*inode {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]*inode, 0, e.mu.dirty.Len())
	for el := e.mu.dirty.Front(); el != nil; el = el.Next() {
		out = append(out, el.Value.(*inode))
	}
	return out
}

// DirtyInos lists the inodes with uncommitted changes, oldest first.
func (e *Engine) DirtyInos() []ids.Ino {
	var out []ids.Ino
	for _, n := range e.dirtyInodes() {
		out = append(out, n.ino)
	}
	return out
}

// OpenInos lists the inodes that are registered as open, in ascending order:
// what a Renew with Full must tell.
func (e *Engine) OpenInos() []ids.Ino {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := slices.Clone(e.mu.releases)
	out = append(out, e.mu.releasing...)
	for ino, n := range e.mu.inodes {
		if n.registered {
			out = append(out, ino)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Floor is the lowest block counter that the session may still commit (rule 17).
func (e *Engine) Floor() uint64 { return e.blockIDs.floorWithout(nil) }

// FlushIno commits everything written to the inode so far; nil at once when
// there is nothing. Call it for the source of a rename, and before a change of
// times. A kept error stays for the handles.
func (e *Engine) FlushIno(ctx context.Context, ino ids.Ino) error {
	n := e.loaded(ino)
	if n == nil {
		return nil
	}
	defer e.unhold(n)
	n.mu.Lock()
	defer n.mu.Unlock()
	_, err := n.flushLocked(ctx)
	return err
}

// Overlay puts the inode's uncommitted size, times, stored bytes and killed
// privileges over attributes from the metadata service (rule 29), and learns
// from them that the file changed elsewhere. Call it on every attribute that
// goes to the kernel.
func (e *Engine) Overlay(a *api.Attr) {
	n := e.loaded(a.Ino)
	if n == nil {
		return
	}
	defer e.unhold(n)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.attr.Ino != 0 {
		n.install(a, false, 0)
		if a.Change < n.mu.attr.Change {
			*a = n.mu.attr // a commit overtook the question
		}
	}
	n.overlayAttr(a)
}

// Close flushes every inode, sends what releases are pending and ends all
// tasks. It returns the first error of a flush, or of ctx.
func (e *Engine) Close(ctx context.Context) error {
	var first error
	for _, n := range e.dirtyInodes() {
		n.mu.Lock()
		n.startFlush()
		n.mu.Unlock()
	}
	for _, n := range e.dirtyInodes() {
		if err := e.FlushIno(ctx, n.ino); err != nil && first == nil {
			first = err
		}
	}
	e.mu.Lock()
	e.mu.closed = true
	e.mu.ticker.Stop()
	deadline := e.deadline()
	for e.mu.tasks > 0 {
		if err := waitOn(ctx, e.cfg.Sched, e.cond, deadline); err != nil {
			err = errkind.Of(err).Wrap("end %d tasks of the file engine", e.mu.tasks)
			e.mu.Unlock()
			return errors.Join(first, err)
		}
	}
	e.mu.Unlock()
	e.sendReleases()
	return first
}
