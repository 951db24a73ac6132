package file

import (
	"cmp"
	"context"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	maxLanes    = 4             // streams of one file that fill blocks of their own
	streamWrite = 64 << 10      // a write of this length that continues no lane begins one
	maxPacks    = 32            // uncommitted packs of an inode; more wait for a commit
	maxGaps     = 32            // ranges that one write may add to its pack
	maxEntries  = 8192          // uncommitted ranges of an inode
	inlineLimit = api.MaxInline // bytes
)

// lane is a place where the next bytes of a file are logged: a sequential
// stream keeps to one, so that its bytes lie together in blocks of their own.
type lane struct {
	pk   *pack // nil between two blocks
	next uint64
	size int // length of its buffers
	app  bool
	used uint64
}

// room describes what a write needs.
type room struct {
	lane *lane // nil: a new one
	need int64 // bytes of buffers
}

// write logs p at off (or at the end) and returns. All of p or nothing.
func (n *inode) write(ctx context.Context, h *Handle, p []byte, off uint64, fl WriteFlags) error {
	e := n.e
	deadline := e.deadline()
	var have int64
	defer func() { e.budget.giveBack(&n.acct, have) }()
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		if err := h.kept(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return errkind.Interrupted.Wrap("write to inode %s", n.ino)
		}
		if fl.Append {
			off = n.size()
		}
		if off > api.MaxFileSize || uint64(len(p)) > api.MaxFileSize-off {
			return errkind.TooBig.Wrap("write %d bytes at %d of inode %s", len(p), off, n.ino)
		}
		if n.mu.attr.Layout.Validate() != nil {
			return errkind.Invalid.Wrap("write to inode %s, which has the layout %s", n.ino, n.mu.attr.Layout)
		}
		waited, err := n.admit(ctx, deadline, off, off+uint64(len(p)), fl.Append)
		if err != nil {
			return cmp.Or(h.kept(), err)
		}
		if waited {
			continue
		}
		r := n.plan(off, len(p), fl.Append)
		if r.need <= have {
			n.logAt(r, p, off, fl, &have)
			return nil
		}
		n.mu.Unlock()
		e.budget.giveBack(&n.acct, have)
		have = 0
		err = e.budget.acquire(ctx, deadline, &n.acct, r.need, fl.Writeback)
		n.mu.Lock()
		if err != nil {
			return errkind.Of(err).Wrap("wait for %d bytes of write buffer for inode %s", r.need, n.ino)
		}
		have = r.need
	}
}

// admit waits, if it must, until a change of [lo, hi) may be made; true means
// that it waited and everything must be looked at again.
func (n *inode) admit(ctx context.Context, deadline time.Duration, lo, hi uint64, app bool) (bool, error) {
	if n.mu.app.active && !app && hi > n.mu.app.base {
		// The run's place is not final: nothing else may lie on or behind it.
		_, err := n.flushLocked(ctx)
		return true, err
	}
	wantSeq := uint64(0)
	if len(n.mu.packs) >= maxPacks {
		wantSeq = n.mu.packs[0].seq
	}
	if pk := n.mu.ov.splits(lo, hi); pk != nil && pk.pieces >= maxPieces {
		wantSeq = max(wantSeq, pk.seq)
	}
	if len(n.mu.ov.list) >= maxEntries {
		wantSeq = n.mu.packSeq
		n.freezeLanes()
	}
	if wantSeq == 0 {
		return false, nil
	}
	for _, pk := range n.mu.packs {
		if pk.seq <= wantSeq && !pk.closed {
			n.dropLane(pk)
			pk.close()
		}
	}
	if n.mu.app.active {
		n.freezeAll()
	}
	n.want(wantSeq, n.mu.change)
	return true, n.wait(ctx, deadline)
}

// pickLane chooses the lane for a write; nil asks for a new one.
func (n *inode) pickLane(off uint64, length int, app bool) *lane {
	var scatter, oldest *lane
	count := 0
	for _, l := range n.mu.lanes {
		if l.app != app {
			continue
		}
		if l.next == off || app {
			return l
		}
		count++
		if oldest == nil || l.used < oldest.used {
			oldest = l
		}
		if l.pk != nil && !l.pk.pumped {
			scatter = l
		}
	}
	switch {
	case length < streamWrite && scatter != nil:
		return scatter
	case count < maxLanes:
		return nil
	}
	return oldest
}

// bufferSize is the length of a new lane's buffers.
func (n *inode) bufferSize() int {
	return min(n.mu.attr.Layout.StripeData(), max(unit, int(n.e.budget.total/8)/unit*unit))
}

// plan computes what a write of length bytes needs. Bytes that will be
// overwritten in place are counted too: what is not used goes back.
func (n *inode) plan(off uint64, length int, app bool) room {
	l := n.pickLane(off, length, app)
	size, left, need := n.bufferSize(), length, int64(0)
	fresh := true
	if l != nil {
		size = l.size
		if pk := l.pk; pk != nil && !n.mustClose(pk) {
			fresh = len(pk.bufs) == 0
			if b := pk.last(); b != nil {
				left -= min(left, len(b.mem)-b.n)
				if left > 0 && len(b.mem) < size {
					need += int64(size)
					left -= min(left, size-len(b.mem))
				}
			}
			if int(pk.length)+length > n.mu.attr.Layout.MaxBlockData() {
				need += int64(size)
			}
		}
	}
	if fresh && left < unit {
		return room{l, need + unit}
	}
	return room{l, need + int64((left+size-1)/size*size)}
}

// mustClose reports whether the pack takes no new range.
func (n *inode) mustClose(pk *pack) bool {
	return pk.closed || pk.pieces >= closePieces || int(pk.length) >= n.mu.attr.Layout.MaxBlockData()
}

// logAt carries out an admitted write.
func (n *inode) logAt(r room, p []byte, off uint64, fl WriteFlags, have *int64) {
	l := r.lane
	if l == nil {
		l = &lane{size: n.bufferSize(), app: fl.Append}
		n.mu.lanes = append(n.mu.lanes, l)
	}
	if fl.Append && !n.mu.app.active {
		n.mu.app = appRun{active: true, base: off}
	}
	n.mu.clock++
	l.used = n.mu.clock
	n.touch()
	if fl.KillPriv && !n.mu.kill {
		n.mu.kill = true
		n.changed()
	}
	if l.pk != nil && n.mustClose(l.pk) {
		l.pk.close()
		l.pk = nil
	}
	for gaps := 0; len(p) > 0; gaps++ {
		c := 0
		if gaps < maxGaps {
			c = n.overwrite(p, off, fl.Append)
		}
		if c == 0 {
			c = len(p)
			if gaps < maxGaps {
				c = n.untilOverwrite(off, c, fl.Append)
			}
			n.log(l, p[:c], off, fl.Append, have)
		}
		p = p[c:]
		off += uint64(c)
	}
	l.next = off
	if fl.Append && n.mu.app.cut == 0 && len(n.mu.packs) > commitBlocks {
		n.startFlush()
	}
	n.cond.Broadcast()
}

// inPlace returns the buffer that holds byte off and may still change, with
// the place in it and how many bytes follow.
func (n *inode) inPlace(en entry, off uint64, app bool) (b *buffer, at, length int) {
	if en.pk == nil || en.pk.closed || en.app != app {
		return nil, 0, 0
	}
	pkOff := en.pkOff + uint32(off-en.off)
	b = en.pk.bufferAt(pkOff)
	if b == nil || b.frozen {
		return nil, 0, 0
	}
	at = int(pkOff - b.base)
	return b, at, int(min(en.end-off, uint64(b.n-at)))
}

// overwrite replaces bytes at off that are still in a buffer that may change,
// and returns how many.
func (n *inode) overwrite(p []byte, off uint64, app bool) int {
	en, ok, _ := n.mu.ov.at(off)
	if !ok {
		return 0
	}
	b, at, length := n.inPlace(en, off, app)
	if b == nil {
		return 0
	}
	return copy(b.mem[at:at+length], p)
}

// untilOverwrite returns how many of the length bytes at off come before one
// that overwrite would take.
func (n *inode) untilOverwrite(off uint64, length int, app bool) int {
	end := off + uint64(length)
	for i := n.mu.ov.search(off); i < len(n.mu.ov.list) && n.mu.ov.list[i].off < end; i++ {
		en := n.mu.ov.list[i]
		// Where a run goes on in a younger buffer, only its tail may change.
		for at := max(en.off, off); at < min(en.end, end); {
			if b, _, _ := n.inPlace(en, at, app); b != nil {
				if at > off {
					return int(at - off)
				}
				break
			}
			b := (*buffer)(nil)
			if en.pk != nil {
				b = en.pk.bufferAt(en.pkOff + uint32(at-en.off))
			}
			if b == nil {
				break
			}
			at = en.off + uint64(b.end()-en.pkOff)
		}
	}
	return length
}

// log appends p to the lane's pack.
func (n *inode) log(l *lane, p []byte, off uint64, app bool, have *int64) {
	limit := n.mu.attr.Layout.MaxBlockData()
	for len(p) > 0 {
		if l.pk == nil {
			n.mu.packSeq++
			l.pk = &pack{n: n, seq: n.mu.packSeq, first: n.e.cfg.Sched.Now(), fileOff: off, app: app}
			n.mu.packs = append(n.mu.packs, l.pk)
		}
		pk := l.pk
		b := n.roomIn(l, len(p), have)
		c := copy(b.mem[b.n:], p[:min(len(p), limit-int(pk.length))])
		n.mu.ov.insert(entry{off: off, end: off + uint64(c), pk: pk, pkOff: pk.length, app: app})
		b.n += c
		pk.length += uint32(c)
		off += uint64(c)
		p = p[c:]
		full := int(pk.length) == limit
		if b.n == len(b.mem) && len(b.mem) >= l.size || full {
			pk.freeze(b)
			pk.start()
		}
		if full {
			pk.close()
			l.pk = nil
		}
	}
}

// roomIn returns the buffer of the lane's pack that takes the next byte.
func (n *inode) roomIn(l *lane, length int, have *int64) *buffer {
	pk := l.pk
	b := pk.last()
	if b != nil && b.n < len(b.mem) {
		return b
	}
	size := l.size
	if b == nil && len(pk.bufs) == 0 && length < unit {
		size = unit
	}
	if *have < int64(size) {
		n.e.budget.force(&n.acct, int64(size)-*have)
		*have = int64(size)
	}
	*have -= int64(size)
	mem := n.e.budget.take(size)
	if b != nil {
		// The first buffer of a small file has become too small.
		copy(mem, b.mem[:b.n])
		n.e.budget.put(&n.acct, b.mem, false)
		b.mem = mem
		return b
	}
	b = &buffer{mem: mem, base: pk.length}
	pk.bufs = append(pk.bufs, b)
	return b
}

// dropLane takes the pack off its lane.
func (n *inode) dropLane(pk *pack) {
	for _, l := range n.mu.lanes {
		if l.pk == pk {
			l.pk = nil
		}
	}
}
