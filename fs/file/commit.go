package file

import (
	"context"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	commitBlocks = 8                 // sealed packs that start a commit unasked
	maxOps       = api.MaxOps - 12   // ranges in one commit, leaving room for the rest
	maxEncoded   = api.MaxCommit / 2 // estimated bytes of one commit
)

// round is one commit under way.
type round struct {
	req    api.Commit
	packs  []*pack
	holes  int
	all    bool   // every hole is in it
	change uint64 // the changes that are committed with it
	app    bool   // it holds the run of appended bytes
	split  *pack  // must become two blocks, because the commit of it alone is too large
	units  int    // what could be divided
	steps  uint64 // by how much it raises the map version
	bytes  int
}

// ready reports whether a commit should be made now: of at least commitBlocks
// packs, or of everything that a flush asked for once all of it is sealed, so
// that a close costs one commit.
func (n *inode) ready() bool {
	sealed, pending, wanted := 0, false, n.mu.done < n.mu.wantChange
	for _, pk := range n.mu.packs {
		switch {
		case pk.state == packSealed:
			sealed++
			wanted = wanted || pk.seq <= n.mu.wantSeq
		case pk.seq <= n.mu.wantSeq:
			pending = true
		}
	}
	return sealed >= commitBlocks || !pending && wanted
}

// kick starts the commit task when there is something for it to do.
func (n *inode) kick() {
	if n.mu.committing || !n.ready() {
		return
	}
	n.mu.committing = true
	n.e.hold(n)
	n.e.task("commit", n.commitLoop)
}

// commitLoop commits until nothing more is ready. One runs at a time.
func (n *inode) commitLoop() {
	n.mu.Lock()
	for n.ready() {
		if pk := n.oversized(); pk != nil {
			n.mu.Unlock()
			n.splitPack(pk)
			n.mu.Lock()
			continue
		}
		r := n.gather()
		if r == nil {
			break
		}
		seen := n.mu.errSeq
		n.mu.Unlock()
		r.req.Floor = n.e.blockIDs.floorWithout(r.req.Blocks)
		var reply api.Committed
		err := n.send(&r.req, &reply)
		n.mu.Lock()
		done := n.conclude(r, &reply, err, seen)
		n.mu.Unlock()
		for _, w := range done {
			w.Committed()
		}
		if r.split != nil {
			n.splitPack(r.split)
		}
		n.mu.Lock()
	}
	n.mu.committing = false
	n.settle()
	n.cond.Broadcast()
	compact := n.worthCompacting() && n.beginCompaction()
	n.mu.Unlock()
	if compact {
		n.compact()
	}
	n.e.unhold(n)
}

// send makes the commit, again and again while the metadata service is busy
// freeing what earlier truncations left.
func (n *inode) send(req *api.Commit, reply *api.Committed) error {
	end := n.e.deadline()
	for {
		ctx, stop := n.e.opContext(context.Background())
		err := n.e.cfg.Meta.Do(ctx, req, reply)
		stop()
		if errkind.Of(err) != errkind.Busy || n.e.cfg.Sched.Now() >= end {
			return err
		}
		n.mu.Lock()
		n.cond.WaitFor(pollEvery)
		n.mu.Unlock()
	}
}

// gather collects the next commit and marks what is in it as in flight.
func (n *inode) gather() *round {
	for _, pk := range slices.Clone(n.mu.packs) {
		if pk.state == packSealed && pk.pieces == 0 {
			pk.kill()
			n.forget(pk)
		}
	}
	r := &round{req: api.Commit{Ino: n.ino, Mtime: n.mu.mtime}}
	size := n.mu.attr.Size
	if n.mu.trunc != nil {
		if *n.mu.trunc < size {
			r.steps++
		}
		size = *n.mu.trunc
		r.req.Ops = append(r.req.Ops, api.Op{Kind: api.OpTruncate, Off: size})
		n.mu.truncFlight, n.mu.trunc = n.mu.trunc, nil
	}
	if n.mu.kill {
		r.req.Ops = append(r.req.Ops, api.Op{Kind: api.OpKillPriv})
		n.mu.kill = false
	}
	limit := maxOps
	if n.mu.unitLimit > 0 {
		limit = n.mu.unitLimit
	}
	n.gatherHoles(r, size, limit)
	n.gatherPacks(r, limit)
	if n.mu.extend > 0 {
		for _, op := range r.req.Ops {
			if op.Kind == api.OpWrite || op.Kind == api.OpInline {
				size = max(size, op.Off+op.Len)
			}
		}
		if n.mu.extend > size {
			r.req.Ops = append(r.req.Ops, api.Op{Kind: api.OpExtend, Off: n.mu.extend})
		}
		n.mu.extendFlight, n.mu.extend = n.mu.extend, 0
	}
	n.gatherAppended(r)
	r.change = n.mu.done
	if r.all {
		r.change = n.mu.change
	}
	for _, op := range r.req.Ops {
		switch op.Kind {
		case api.OpTruncate, api.OpExtend, api.OpKillPriv:
		default:
			r.steps++
		}
	}
	if len(r.req.Ops) == 0 {
		// Nothing that the metadata service must know.
		n.mu.ov.remove(func(en entry) bool { return en.flight })
		n.mu.extendFlight = 0
		n.mu.done = r.change
		return nil
	}
	return r
}

// gatherHoles adds punches. What lies behind the committed size needs none.
func (n *inode) gatherHoles(r *round, size uint64, limit int) {
	r.all = true
	for i := range n.mu.ov.list {
		en := &n.mu.ov.list[i]
		if en.pk != nil {
			continue
		}
		if r.units >= limit {
			r.all = false
			return
		}
		en.flight = true
		r.holes++
		if en.off < size {
			r.units++
			r.req.Ops = append(r.req.Ops, api.Op{Kind: api.OpPunch, Off: en.off, Len: min(en.end, size) - en.off})
		}
	}
}

// gatherPacks adds the sealed packs that fit, oldest first, but no appended ones.
func (n *inode) gatherPacks(r *round, limit int) {
	units, ops := 0, len(r.req.Ops)
	for _, pk := range n.mu.packs {
		if pk.state != packSealed || pk.app {
			continue
		}
		if ops+pk.maxOpsOf() > maxOps || r.bytes+pk.encoded() > maxEncoded || n.mu.unitLimit > 0 && r.units+1 > limit {
			if units == 0 && r.units == 0 {
				continue
			}
			break
		}
		units++
		r.units++
		ops += pk.maxOpsOf() // they become operations below
		n.take(r, pk)
	}
	if len(r.packs) == 0 {
		return
	}
	for _, en := range n.mu.ov.list {
		if en.pk != nil && en.pk.state == packFlight && !en.pk.app {
			r.req.Ops = append(r.req.Ops, en.ops()...)
		}
	}
}

// take puts a sealed pack into the commit.
func (n *inode) take(r *round, pk *pack) {
	pk.state = packFlight
	r.packs = append(r.packs, pk)
	r.bytes += pk.encoded()
	r.req.Blocks = append(r.req.Blocks, n.referred(pk)...)
}

// gatherAppended adds the run of appended bytes, once all of it is sealed and
// everything that was written before it is committed or in this commit.
func (n *inode) gatherAppended(r *round) {
	app := &n.mu.app
	if !app.active || app.cut == 0 || !r.all {
		return
	}
	for _, pk := range n.mu.packs {
		if pk.seq <= app.seq && pk.state != packSealed && pk.state != packFlight {
			return
		}
		if pk.seq <= app.seq && pk.state == packSealed && !pk.app {
			return // did not fit
		}
	}
	op := api.Op{Kind: api.OpAppend, Off: app.base, Len: app.cut - app.base}
	for _, en := range n.mu.ov.list {
		if !en.app || en.off >= app.cut {
			continue
		}
		for _, x := range en.extents() {
			x.Off -= app.base
			op.Extents = append(op.Extents, x)
		}
	}
	if len(op.Extents) == 0 {
		*app = appRun{}
		return
	}
	for _, pk := range n.mu.packs {
		if pk.app && pk.seq <= app.seq && pk.state == packSealed {
			n.take(r, pk)
		}
	}
	r.req.Ops = append(r.req.Ops, op)
	r.app = true
}

// conclude settles a commit that was answered, and returns the writers to tell.
func (n *inode) conclude(r *round, reply *api.Committed, err error, seen uint64) []chunk.BlockWriter {
	if n.mu.errSeq != seen {
		// The inode failed meanwhile: its state is gone, these packs are not.
		if err == nil {
			n.install(&reply.Attr, true, 0)
		}
		return n.retire(r, outcomeOf(err))
	}
	if errkind.Of(err) == errkind.Split && n.divide(r) {
		return nil
	}
	if err == nil && r.app && len(reply.Bases) != 1 {
		err = errkind.Internal.Wrap("an append was answered with %d places", len(reply.Bases))
	}
	if err != nil {
		done := n.retire(r, outcomeOf(err))
		n.fail(fmt.Errorf("commit inode %s: %w", n.ino, err))
		return done
	}
	n.mu.ov.remove(func(en entry) bool {
		return en.flight || en.pk != nil && en.pk.state == packFlight
	})
	n.mu.truncFlight, n.mu.extendFlight = nil, 0
	n.mu.done = max(n.mu.done, r.change)
	n.mu.progress++
	n.mu.unitLimit = 0
	n.account(&r.req, reply, r.steps)
	moved, base := n.settleAppended(r, reply)
	done := n.retire(r, outcomeCommitted)
	n.install(&reply.Attr, true, r.steps)
	if moved {
		n.mu.foreign = true
		n.e.notify(n.ino, base, nil)
	}
	n.settle()
	n.cond.Broadcast()
	return done
}

// outcome is what is known of a commit.
type outcome uint8

const (
	outcomeCommitted outcome = iota
	outcomeRefused           // it did not happen and will not
	outcomeUnknown
)

func outcomeOf(err error) outcome {
	switch errkind.Of(err) {
	case errkind.OK:
		return outcomeCommitted
	case errkind.Timeout, errkind.Unavailable, errkind.Interrupted, errkind.Internal, errkind.NotLeader:
		return outcomeUnknown
	}
	return outcomeRefused
}

// retire ends the packs of a round. The blocks of a refused commit are given
// up. When nobody knows whether it happened they are treated as committed, so
// that nothing deletes them, and their ids keep the session's floor down.
func (n *inode) retire(r *round, what outcome) []chunk.BlockWriter {
	var done []chunk.BlockWriter
	for _, pk := range r.packs {
		pk.state = packDead
		for _, b := range pk.bufs {
			pk.drop(b)
		}
		n.forget(pk)
		switch what {
		case outcomeRefused:
			pk.abandon()
			continue
		case outcomeCommitted:
			n.e.blockIDs.retire(pk.issued)
		case outcomeUnknown:
		}
		if pk.w != nil {
			done = append(done, pk.w)
			pk.w = nil
		}
	}
	return done
}

// divide takes a commit that touches too many records back, to be made in
// parts; false when it cannot be divided.
func (n *inode) divide(r *round) bool {
	var only *pack // the one pack that could be divided, if no hole can
	for _, pk := range r.packs {
		if !pk.app {
			only = pk
		}
	}
	if r.units == 0 || r.units == 1 && only != nil && only.inline {
		return false
	}
	for _, pk := range r.packs {
		pk.state = packSealed
	}
	hole := entry{}
	for i := range n.mu.ov.list {
		if en := &n.mu.ov.list[i]; en.flight {
			en.flight = false
			if en.off < n.mu.attr.Size {
				hole = *en
			}
		}
	}
	if t := n.mu.truncFlight; t != nil {
		if n.mu.trunc == nil {
			n.mu.extend = max(n.mu.extend, n.mu.extendFlight)
			n.mu.trunc = t
		} else if *t < *n.mu.trunc {
			n.mu.extend = max(n.mu.extend, *n.mu.trunc)
			n.mu.trunc = t
		}
	} else if n.mu.trunc == nil {
		n.mu.extend = max(n.mu.extend, n.mu.extendFlight)
	}
	n.mu.truncFlight, n.mu.extendFlight = nil, 0
	for _, op := range r.req.Ops {
		n.mu.kill = n.mu.kill || op.Kind == api.OpKillPriv
	}
	if r.units > 1 {
		n.mu.unitLimit = r.units / 2
		return true
	}
	n.mu.unitLimit = 1
	if only != nil {
		r.split = only
		return true
	}
	end := min(hole.end, n.mu.attr.Size)
	if end <= hole.off+1 {
		return false
	}
	mid := hole.off + (end-hole.off)/2
	n.mu.ov.insert(hole.slice(hole.off, mid))
	n.mu.ov.insert(hole.slice(mid, hole.end))
	return true
}

// settleAppended moves what was appended after the committed run to where it
// now is expected; moved says that the run landed elsewhere.
func (n *inode) settleAppended(r *round, reply *api.Committed) (moved bool, from uint64) {
	if !r.app {
		return false, 0
	}
	app := &n.mu.app
	from = app.base
	base := reply.Bases[0] + (app.cut - app.base)
	delta := base - app.cut // may wrap: added modulo 2^64
	left := false
	for i := range n.mu.ov.list {
		if en := &n.mu.ov.list[i]; en.app {
			en.off += delta
			en.end += delta
			left = true
		}
	}
	for _, l := range n.mu.lanes {
		if l.app {
			l.next += delta
		}
	}
	*app = appRun{active: left, base: base}
	if left && n.mu.wantSeq > 0 {
		for _, pk := range n.mu.packs {
			if pk.app && pk.seq <= n.mu.wantSeq {
				n.freezeAll()
				n.mu.wantSeq = max(n.mu.wantSeq, n.mu.app.seq)
				break
			}
		}
	}
	return delta != 0, from
}
