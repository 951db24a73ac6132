package file

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// unit is the granularity in which memory is counted, in bytes (rule 27).
const unit = 64 << 10

// roundUp rounds n up to whole units, and at least one.
func roundUp(n int) int { return max(unit, (n+unit-1)/unit*unit) }

// freeList keeps buffers for reuse, by size. Its owner's lock guards it.
// Buffers of 64 KiB and more come page-aligned from the Go heap.
type freeList struct {
	classes []sizeClass // ordered by size
	bytes   int64
}

type sizeClass struct {
	size int
	bufs [][]byte
}

func (f *freeList) class(size int) *sizeClass {
	i, ok := slices.BinarySearchFunc(f.classes, size, func(c sizeClass, n int) int { return c.size - n })
	if !ok {
		f.classes = slices.Insert(f.classes, i, sizeClass{size: size})
	}
	return &f.classes[i]
}

// get returns a buffer of size bytes with undefined content.
func (f *freeList) get(size int) []byte {
	c := f.class(size)
	if n := len(c.bufs); n > 0 {
		b := c.bufs[n-1]
		c.bufs = c.bufs[:n-1]
		f.bytes -= int64(size)
		return b
	}
	return make([]byte, size)
}

func (f *freeList) put(b []byte) {
	c := f.class(len(b))
	c.bufs = append(c.bufs, b)
	f.bytes += int64(len(b))
}

// trim drops buffers, largest first, until at most limit bytes are kept.
func (f *freeList) trim(limit int64) {
	for i := len(f.classes) - 1; i >= 0 && f.bytes > limit; i-- {
		c := &f.classes[i]
		for n := len(c.bufs); n > 0 && f.bytes > limit; n-- {
			c.bufs[n-1] = nil
			c.bufs = c.bufs[:n-1]
			f.bytes -= int64(c.size)
		}
	}
}

// account is what one inode holds of a budget; the budget's lock guards it.
type account struct {
	held int64
	n    *inode
}

// budget is the pool of write buffers. A buffer is first acquired as bytes,
// which may wait, and then taken, which never does.
type budget struct {
	total   int64
	reserve int64 // only for pages that the kernel writes back
	cond    sched.Cond
	sched   sched.Sched
	// pressure is called without the lock when memory runs short.
	pressure func(*account)
	mu       struct {
		sync.Mutex
		used    int64 // acquired bytes
		sending int64 // of these, in buffers that are on their way out
		peak    int64
		queue   []*claim
		free    freeList
	}
}

// claim is one waiting acquire.
type claim struct {
	acct      *account
	n         int64
	writeback bool
	granted   bool
}

func newBudget(s sched.Sched, total int64, pressure func(*account)) *budget {
	b := &budget{total: total, reserve: total / 16, sched: s, pressure: pressure}
	b.cond = s.NewCond(&b.mu)
	return b
}

// fits reports whether a claim may be granted now.
func (b *budget) fits(c *claim) bool {
	limit := b.total
	if !c.writeback {
		limit -= b.reserve
	}
	return b.mu.used+c.n <= limit && c.acct.held+c.n <= b.total/2
}

func (b *budget) grant(c *claim) {
	b.mu.used += c.n
	b.mu.peak = max(b.mu.peak, b.mu.used)
	c.acct.held += c.n
	c.granted = true
}

// serve grants waiting claims in order of arrival. One whose inode is at its
// limit, or that waits for the common part, does not hold up those behind it.
func (b *budget) serve() {
	kept := b.mu.queue[:0]
	blocked := false
	woke := false
	for _, c := range b.mu.queue {
		overInode := c.acct.held+c.n > b.total/2
		if !overInode && (!blocked || c.writeback) && b.fits(c) {
			b.grant(c)
			woke = true
			continue
		}
		blocked = blocked || !overInode
		kept = append(kept, c)
	}
	clear(b.mu.queue[len(kept):])
	b.mu.queue = kept
	if woke {
		b.cond.Broadcast()
	}
}

// acquire waits until n bytes are free, ctx ends or the deadline passes.
func (b *budget) acquire(ctx context.Context, deadline time.Duration, acct *account, n int64, writeback bool) error {
	if n == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c := &claim{acct: acct, n: n, writeback: writeback}
	if len(b.mu.queue) == 0 && b.fits(c) {
		b.grant(c)
		if b.total-b.mu.used < b.total/8 {
			b.mu.Unlock()
			b.pressure(acct)
			b.mu.Lock()
		}
		return nil
	}
	b.mu.queue = append(b.mu.queue, c)
	for !c.granted {
		b.mu.Unlock()
		b.pressure(acct)
		b.mu.Lock()
		if c.granted {
			break
		}
		if err := waitOn(ctx, b.sched, b.cond, deadline); err != nil && !c.granted {
			b.mu.queue = slices.DeleteFunc(b.mu.queue, func(o *claim) bool { return o == c })
			b.serve()
			return err
		}
	}
	return nil
}

// take turns size acquired bytes into a buffer.
func (b *budget) take(size int) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.mu.free.get(size)
	b.mu.free.trim(max(0, b.total-b.mu.used))
	return p
}

// giveBack returns acquired bytes that were not taken.
func (b *budget) giveBack(acct *account, n int64) {
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.used -= n
	acct.held -= n
	b.serve()
}

// force acquires bytes beyond the limit: for the rare write that needs a
// buffer more than it was thought to, and must not wait in the middle.
func (b *budget) force(acct *account, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grant(&claim{acct: acct, n: n})
}

// freeze counts a buffer of n bytes as on its way out.
func (b *budget) freeze(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.sending += int64(n)
}

// put returns a buffer; frozen says whether freeze was called for it.
func (b *budget) put(acct *account, p []byte, frozen bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := int64(len(p))
	b.mu.used -= n
	acct.held -= n
	if frozen {
		b.mu.sending -= n
	}
	b.mu.free.put(p)
	b.mu.free.trim(max(0, b.total-b.mu.used))
	b.serve()
}

// short reports how many more bytes should be sent on their way.
func (b *budget) short() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	free := b.total - b.mu.used
	if len(b.mu.queue) == 0 && free >= b.total/8 {
		return 0
	}
	return max(0, b.total/4-free-b.mu.sending)
}

// crowded reports whether a claim waits because its inode is at its limit.
func (b *budget) crowded(acct *account) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.mu.queue {
		if c.acct == acct && acct.held+c.n > b.total/2 {
			return true
		}
	}
	return false
}

// pollEvery bounds how long a wait overlooks that its context has ended.
const pollEvery = 100 * time.Millisecond

// waitOn waits once on c, whose lock is held: nil means look again. It ends
// with Timeout at the deadline (on the scheduler's clock) and at that of ctx, and
// with Interrupted when ctx was ended.
func waitOn(ctx context.Context, s sched.Sched, c sched.Cond, deadline time.Duration) error {
	switch err := ctx.Err(); {
	case errors.Is(err, context.DeadlineExceeded):
		return errkind.Timeout
	case err != nil:
		return errkind.Interrupted
	}
	left := deadline - s.Now()
	if left <= 0 {
		return errkind.Timeout
	}
	if ctx.Done() != nil {
		left = min(left, pollEvery)
	}
	c.WaitFor(left)
	return nil
}

// sendPool is the reserve for stripes that must be gathered from several
// buffers. Whoever holds one waits for nothing but the servers.
type sendPool struct {
	cond  sched.Cond
	sched sched.Sched
	mu    struct {
		sync.Mutex
		left int
		free freeList
	}
}

// sendStripes is how many stripes may be gathered at once.
const sendStripes = 2

func newSendPool(s sched.Sched) *sendPool {
	p := &sendPool{sched: s}
	p.mu.left = sendStripes
	p.cond = s.NewCond(&p.mu)
	return p
}

func (p *sendPool) get(ctx context.Context, deadline time.Duration, size int) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.mu.left == 0 {
		if err := waitOn(ctx, p.sched, p.cond, deadline); err != nil {
			return nil, err
		}
	}
	p.mu.left--
	return p.mu.free.get(roundUp(size)), nil
}

func (p *sendPool) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.left++
	p.mu.free.put(b)
	p.mu.free.trim(sendStripes * int64(len(b)))
	p.cond.Signal()
}
