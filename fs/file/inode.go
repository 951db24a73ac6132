package file

import (
	"container/list"
	"context"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// inode is the state of one file that is open or has uncommitted changes,
// shared by all handles.
type inode struct {
	e    *Engine
	ino  ids.Ino
	acct account    // of the engine's budget
	cond sched.Cond // over mu: any change that somebody may wait for

	// The engine's lock guards these.
	users      int           // handles, and calls that work on the inode
	registered bool          // the metadata service knows that it is open here
	dirtyAt    *list.Element // place in the engine's list of dirty inodes

	mu struct {
		sync.Mutex
		attr api.Attr // as of the last commit seen
		emap extentMap
		ov   overlay

		// Changes of the size that no entry of the overlay expresses. Those in
		// "flight" are part of the commit under way.
		trunc, truncFlight   *uint64 // lowest truncation since the last commit
		extend, extendFlight uint64  // explicit size above the data, or 0
		mtime                int64   // pending, or 0
		kill                 bool    // pending OpKillPriv
		app                  appRun

		packs   []*pack // uncommitted, oldest first
		lanes   []*lane
		packSeq uint64
		clock   uint64 // counts uses of lanes and streams

		// change counts changes that are not bytes of packs; done is how many
		// of them are committed.
		change, done uint64
		// A flush wants the packs up to wantSeq and the changes up to
		// wantChange committed.
		wantSeq, wantChange uint64
		progress            uint64 // counts what brings a flush nearer to its end
		committing          bool   // a commit task runs
		unitLimit           int    // after a Split, how many units the next commit may have; 0: no limit

		dirty   bool
		since   time.Duration // when it became dirty, or was last frozen by age
		ranges  int           // committed since the last look at the windows
		windows []uint64      // in which they lie
		shape   shape         // of what is committed, for compaction
		moves   moves         // what is committed while a compaction runs

		cause   error // why the last try to store something failed; nil after progress
		err     error
		errSeq  uint64 // counts errors of write-behind
		errSeen bool   // a handle has returned it

		streams  [maxStreams]stream
		foreign  bool   // the content changed elsewhere while pages were cached
		pagesVer uint64 // map version that the kernel's pages are of
	}
}

// appRun is the uncommitted run of appended bytes. All of it lies behind
// everything else.
type appRun struct {
	active bool
	base   uint64 // where the run is expected to lie
	cut    uint64 // end of the part that the next commit takes; 0: none yet
	seq    uint64 // the last pack that holds bytes before cut
}

// size is the file's size as this engine's callers see it.
func (n *inode) size() uint64 {
	s := n.mu.attr.Size
	switch {
	case n.mu.trunc != nil:
		s = *n.mu.trunc
	case n.mu.truncFlight != nil:
		s = max(*n.mu.truncFlight, n.mu.extendFlight)
	default:
		s = max(s, n.mu.extendFlight)
	}
	return max(s, n.mu.extend, n.mu.ov.dataEnd())
}

// changed notes a change that is not bytes of a pack.
func (n *inode) changed() {
	n.mu.change++
	n.touch()
}

// touch notes that there is something to commit.
func (n *inode) touch() {
	n.mu.mtime = n.e.wall()
	if !n.mu.dirty {
		n.mu.dirty = true
		n.mu.since = n.e.cfg.Sched.Now()
		n.e.addDirty(n)
	}
}

// clean reports whether nothing is uncommitted.
func (n *inode) clean() bool {
	return len(n.mu.packs) == 0 && n.mu.done == n.mu.change
}

// install takes over attributes from the metadata service unless newer ones
// are known. own says that the change is this engine's commit.
func (n *inode) install(a *api.Attr, own bool, steps uint64) {
	if n.mu.attr.Ino != 0 && a.Change <= n.mu.attr.Change {
		return
	}
	old := n.mu.attr.MapVersion
	if a.MapVersion != old && n.mu.attr.Ino != 0 {
		if !own || a.MapVersion != old+steps {
			n.mu.foreign = true
		} else if n.mu.pagesVer == old {
			n.mu.pagesVer = a.MapVersion
		}
	}
	n.mu.attr = *a
	n.mu.shape.see(a)
	if n.mu.emap.version != a.MapVersion {
		n.mu.emap.reset(a.MapVersion)
	}
}

// overlayAttr puts what is uncommitted over a.
func (n *inode) overlayAttr(a *api.Attr) {
	if !n.mu.dirty {
		return
	}
	a.Size = n.size()
	a.Stored = min(a.Size, a.Stored+n.mu.ov.dataBytes())
	if n.mu.mtime != 0 {
		a.Mtime = max(a.Mtime, n.mu.mtime)
		a.Ctime = max(a.Ctime, n.mu.mtime)
	}
	if n.mu.kill {
		a.Mode &^= api.ModeSetuid
		if a.Mode&0o010 != 0 {
			a.Mode &^= api.ModeSetgid
		}
		a.Flags &^= api.FlagCaps
	}
}

// fail keeps err for every handle and drops what is uncommitted (rule 27).
func (n *inode) fail(err error) {
	n.mu.err = err
	n.mu.errSeq++
	n.mu.errSeen = false
	for _, pk := range n.mu.packs {
		pk.kill()
	}
	n.mu.packs = nil
	n.mu.lanes = nil
	n.mu.ov.list = nil
	n.mu.trunc, n.mu.truncFlight = nil, nil
	n.mu.extend, n.mu.extendFlight = 0, 0
	n.mu.mtime, n.mu.kill = 0, false
	n.mu.app = appRun{}
	n.mu.done = n.mu.change
	n.mu.emap.reset(n.mu.emap.version)
	n.mu.foreign = true
	n.settle()
	ino := n.ino
	n.e.cfg.Log.Error("uncommitted bytes of a file are lost; write it again", "ino", ino, "err", err)
	n.e.notify(ino, 0, err)
	n.cond.Broadcast()
}

// settle takes a clean inode off the dirty list.
func (n *inode) settle() {
	if n.mu.dirty && n.clean() {
		n.mu.dirty = false
		n.mu.mtime = 0
		n.e.removeDirty(n)
	}
}

// wait waits once for a change of the inode.
func (n *inode) wait(ctx context.Context, deadline time.Duration) error {
	err := waitOn(ctx, n.e.cfg.Sched, n.cond, deadline)
	if err != nil {
		return errkind.Of(err).Wrap("wait for the bytes of inode %s to be stored", n.ino)
	}
	return nil
}
