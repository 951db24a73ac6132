package worker

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

const (
	maxPending = 64 << 10 // chunks of a disk that wait for a verdict; others are left to the walk
	maxOrdered = 8 << 10  // deletions that wait; they are ordered again
	maxAsks    = 2048     // questions in one call
	// staleVerdict is how old a verdict may be when it is carried out: somebody
	// may put the chunk back later, under another job.
	staleVerdict = 20 * time.Second
)

// keeper is one disk's background. Its fields without mu belong to its task.
type keeper struct {
	w     *Worker
	id    ids.DiskID
	store Disk
	name  string

	pending map[ids.ChunkKey]time.Duration // when to ask about it
	walk    ids.ChunkKey                   // where the walk over all chunks is
	walkAt  time.Duration                  // not before
	said    string                         // the last error of Maintain that was logged

	mu struct {
		sync.Mutex
		ordered []ids.ChunkKey
	}
}

func newKeeper(w *Worker, d Disk) *keeper {
	return &keeper{
		w: w, id: d.ID, store: d, name: d.Store.Inventory().UUID().String(),
		pending: map[ids.ChunkKey]time.Duration{},
	}
}

func (k *keeper) usage() Usage {
	inv := k.store.Store.Inventory()
	return Usage{ID: k.id, UUID: inv.UUID(), Usage: inv.Usage()}
}

// order replaces the deletions that wait: what is missing was freed meanwhile,
// or comes again.
func (k *keeper) order(keys []ids.ChunkKey) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.ordered = keys[:min(len(keys), maxOrdered)]
}

// loop does the disk's work each second.
func (k *keeper) loop() {
	for {
		k.deleteOrdered()
		if err := k.store.Store.Inventory().Maintain(); err != nil {
			k.complain("disk maintenance failed", err)
		}
		k.findYoung()
		k.walkOn()
		k.askDue()
		if !k.w.rest(k.w.cfg.BeatEvery) {
			return
		}
	}
}

// complain logs an error once, not each second.
func (k *keeper) complain(what string, err error) {
	if err.Error() != k.said {
		k.said = err.Error()
		k.w.cfg.Log.Warn(what, "disk", k.name, "err", err)
	}
}

// deleteOrdered carries out the deletions of dead blocks.
func (k *keeper) deleteOrdered() {
	k.mu.Lock()
	keys := k.mu.ordered
	k.mu.ordered = nil
	k.mu.Unlock()
	for len(keys) > 0 && k.w.ctx.Err() == nil {
		n := min(len(keys), k.w.cfg.DeletePage)
		if err := k.delete(keys[:n]); err != nil {
			k.complain("cannot delete chunks", err)
			return
		}
		freed := make([]At, n)
		for i, key := range keys[:n] {
			freed[i] = At{key, k.id}
			delete(k.pending, key)
		}
		k.w.addFreed(freed)
		keys = keys[n:]
	}
}

// addFreed keeps deletions for the next heartbeat; what is too much is ordered
// and reported again.
func (w *Worker) addFreed(list []At) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if room := maxOrdered*len(w.disks) - len(w.mu.freed); len(list) > room {
		list = list[:max(0, room)]
	}
	w.mu.freed = append(w.mu.freed, list...)
}

func (k *keeper) delete(keys []ids.ChunkKey) error { return k.store.Store.Delete(keys) }

// findYoung notes chunks that were made lately.
func (k *keeper) findYoung() {
	s, ok := k.store.Store.(interface{ Young() []ids.ChunkKey })
	if !ok {
		return
	}
	now := k.w.cfg.Sched.Now()
	for _, key := range s.Young() {
		k.note(key, now+k.w.cfg.AskAfter)
	}
}

func (k *keeper) note(key ids.ChunkKey, at time.Duration) {
	if _, ok := k.pending[key]; ok || len(k.pending) < maxPending {
		k.pending[key] = at
	}
}

// walkOn asks about the next piece of the inventory: whatever was missed, or
// was made by an earlier life of the process, is found within one walk.
func (k *keeper) walkOn() {
	now := k.w.cfg.Sched.Now()
	if now < k.walkAt {
		return
	}
	list, err := k.store.Store.Inventory().List(k.walk, k.w.cfg.WalkPage)
	if err != nil {
		k.complain("cannot list chunks", err)
		return
	}
	if len(list) == 0 {
		k.walk, k.walkAt = ids.ChunkKey{}, now+k.w.cfg.WalkEvery
		return
	}
	var keys []ids.ChunkKey
	for _, i := range list {
		if _, ok := k.pending[i.Key]; !ok {
			keys = append(keys, i.Key)
		}
	}
	if k.ask(keys) {
		k.walk = list[len(list)-1].Key
	}
}

// askDue asks about the chunks whose time has come.
func (k *keeper) askDue() {
	now := k.w.cfg.Sched.Now()
	var keys []ids.ChunkKey
	for key, at := range k.pending {
		if at <= now {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, compareKeys)
	k.ask(keys)
}

func compareKeys(a, b ids.ChunkKey) int {
	if c := a.Block.Compare(b.Block); c != 0 {
		return c
	}
	return int(a.Index) - int(b.Index)
}

// ask gets verdicts and carries them out. It reports whether all were given.
func (k *keeper) ask(keys []ids.ChunkKey) bool {
	for len(keys) > 0 {
		n := min(len(keys), maxAsks)
		asks := make([]Ask, 0, n)
		for _, key := range keys[:n] {
			if !k.w.isBusy(At{key, k.id}) {
				asks = append(asks, Ask{Key: key})
			}
		}
		doomed, ok := k.judge(asks)
		if !ok || !k.condemn(doomed) {
			return false
		}
		keys = keys[n:]
	}
	return true
}

// judge asks and returns the chunks that should go, with the time of asking.
func (k *keeper) judge(asks []Ask) (doomed []Ask, ok bool) {
	if len(asks) == 0 {
		return nil, true
	}
	ctx, end := k.w.bound(k.w.cfg.CallBound)
	defer end()
	start := k.w.cfg.Sched.Now()
	verdicts, err := k.w.cfg.Control.Verdicts(ctx, k.id, asks)
	if err == nil && len(verdicts) != len(asks) {
		err = errkind.Internal.Wrap("%d verdicts for %d chunks", len(verdicts), len(asks))
	}
	if err != nil {
		k.complain("cannot ask about chunks", err)
		return nil, false
	}
	now := k.w.cfg.Sched.Now()
	for i, a := range asks {
		switch {
		case verdicts[i] == NotYet:
			k.note(a.Key, now+k.w.cfg.AskEvery)
		case verdicts[i] == Delete && now-start < staleVerdict:
			doomed = append(doomed, a)
		case verdicts[i] == Delete:
			k.note(a.Key, now)
		default:
			delete(k.pending, a.Key)
		}
	}
	return doomed, true
}

// condemn deletes chunks that were judged by their block's own session, once
// their headers say that it wrote them; others are asked about again.
func (k *keeper) condemn(doomed []Ask) bool {
	var foreign []Ask
	var keys []ids.ChunkKey
	for _, a := range doomed {
		if s := k.writer(a.Key); s != 0 && a.Writer == 0 {
			foreign = append(foreign, Ask{a.Key, s})
		} else {
			keys = append(keys, a.Key)
		}
	}
	again, ok := k.judge(foreign)
	for _, a := range again {
		keys = append(keys, a.Key)
	}
	keys = slices.DeleteFunc(keys, func(key ids.ChunkKey) bool { return k.w.isBusy(At{key, k.id}) })
	if len(keys) == 0 {
		return ok
	}
	if err := k.delete(keys); err != nil {
		k.complain("cannot delete chunks that no file has", err)
		return false
	}
	for _, key := range keys {
		delete(k.pending, key)
	}
	k.w.cfg.Log.Debug("deleted chunks that no file has", "disk", k.name, "chunks", len(keys))
	return ok
}

// writer returns the session in the chunk's header; 0 is the block's own, also
// of a chunk that cannot be read: nothing may be lost with that one.
func (k *keeper) writer(key ids.ChunkKey) ids.Session {
	r, err := k.store.Store.Pin(key)
	if err != nil {
		if !errors.Is(err, errkind.NoChunk) {
			k.w.cfg.Log.Warn("a chunk that no file has is damaged", "disk", k.name, "chunk", key.String(), "err", err)
		}
		return 0
	}
	defer r.Close()
	return r.Header().Session
}
