package file

import (
	"cmp"
	"context"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// freezeLanes closes every pack that is being filled.
func (n *inode) freezeLanes() {
	for _, l := range n.mu.lanes {
		if l.pk != nil {
			pk := l.pk
			l.pk = nil
			pk.close()
		}
	}
}

// freezeAll closes all packs and decides where the run of appended bytes that
// is committed next ends: between two writes (rule 14).
func (n *inode) freezeAll() {
	n.freezeLanes()
	if n.mu.app.active && n.mu.app.cut == 0 {
		n.mu.app.cut = n.mu.ov.dataEnd()
		n.mu.app.seq = n.mu.packSeq
	}
}

// want asks for the commit of packs and changes up to the given ones.
func (n *inode) want(seq, change uint64) {
	n.mu.wantSeq = max(n.mu.wantSeq, seq)
	n.mu.wantChange = max(n.mu.wantChange, change)
	n.kick()
}

// startFlush sets off a flush of everything and does not wait.
func (n *inode) startFlush() {
	n.freezeAll()
	n.want(n.mu.packSeq, n.mu.change)
}

// flushLocked commits everything written so far; n.mu is held, but not while
// waiting. failed says that err is one of write-behind, kept for the handles;
// other errors end only the wait. Without any progress for the operation
// time-out the inode's bytes are dropped (rule 27).
func (n *inode) flushLocked(ctx context.Context) (failed bool, err error) {
	seen := n.mu.errSeq
	n.startFlush()
	seq, change := n.mu.packSeq, n.mu.change
	last, deadline := n.mu.progress, n.e.deadline()
	for n.mu.errSeq == seen && !n.flushed(seq, change) {
		if n.mu.progress != last {
			last, deadline = n.mu.progress, n.e.deadline()
		}
		err := n.wait(ctx, deadline)
		switch {
		case err == nil:
		case n.mu.errSeq != seen || n.flushed(seq, change):
		case errkind.Of(err) == errkind.Timeout && n.e.cfg.Sched.Now()+n.e.cfg.OpTimeout/10 >= deadline:
			// Also when the caller's own time, which began a little earlier, is
			// over: else every close of the file waits as long again.
			n.fail(cmp.Or(n.mu.cause, err))
		default:
			return false, err
		}
	}
	if n.mu.errSeq != seen {
		return true, n.mu.err
	}
	return false, nil
}

// flushed reports whether the packs and changes up to the given ones are
// committed or dropped.
func (n *inode) flushed(seq, change uint64) bool {
	return n.mu.done >= change && (len(n.mu.packs) == 0 || n.mu.packs[0].seq > seq)
}

// relieve frees memory when it runs short: the oldest partial stripes become
// short blocks (rule 27). It does not wait.
func (e *Engine) relieve(acct *account) {
	if e.budget.crowded(acct) {
		acct.n.mu.Lock()
		acct.n.freezeAll()
		acct.n.mu.Unlock()
	}
	if e.budget.short() == 0 {
		return
	}
	for _, n := range e.dirtyInodes() {
		if e.budget.short() == 0 {
			return
		}
		n.mu.Lock()
		n.freezeAll()
		n.mu.Unlock()
	}
}

// tick flushes what has been dirty for long (rule 11) and sends releases.
func (e *Engine) tick() {
	now := e.cfg.Sched.Now()
	for _, n := range e.dirtyInodes() {
		n.mu.Lock()
		if n.mu.dirty && now-n.mu.since >= e.cfg.FlushEvery*3/5 {
			n.mu.since = now
			n.startFlush()
		}
		n.mu.Unlock()
	}
	e.sendReleases()
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.mu.closed {
		e.mu.ticker = e.cfg.Sched.AfterFunc(e.cfg.FlushEvery/5, func() { e.task("tick", e.tick) })
	}
}

// deadline is the end of a wait that begins now.
func (e *Engine) deadline() time.Duration { return e.cfg.Sched.Now() + e.cfg.OpTimeout }

// opContext is a context for one call of a server: it ends with parent, after
// the operation time-out, or when the engine is closed.
func (e *Engine) opContext(parent context.Context) (context.Context, func()) {
	return sched.WithTimeout(parent, e.cfg.Sched, e.cfg.OpTimeout)
}
