package client

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// askState is where one question for a grant stands.
type askState uint8

const (
	askPending askState = iota
	askBusy             // asked again after a while
	askGranted
	askGone // refused, silent, or not needed
)

// ask is one question for a grant.
type ask struct {
	peer
	index  int
	state  askState
	since  time.Duration
	credit uint32
	cancel func()
}

// opening gathers the grants for one block under one id and layout.
type opening struct {
	c       *Client
	what    wire.Open // the message, without disk and index
	width   int
	skip    map[ids.DiskID]bool // disks that refused; survives the opening
	refusal string              // the last reason of a refusal
	silence bool                // some server did not answer: it may be back soon

	mu struct {
		sync.Mutex
		place *placement
		asks  []*ask
		slots []*ask // granted, by chunk index
		ended bool
	}
	cond sched.Cond
}

func (c *Client) newOpening(what wire.Open, place *placement, skip map[ids.DiskID]bool) *opening {
	o := &opening{c: c, what: what, width: what.Layout.Width(), skip: skip}
	o.mu.place = place
	o.mu.slots = make([]*ask, o.width)
	o.cond = c.sched.NewCond(&o.mu)
	return o
}

// gather asks K+M+1 disks and returns the first grants for each chunk index in
// distinct domains (rule 23). Entries are nil where no disk could be had; all
// grants are kept then too, and the caller drops them.
func (o *opening) gather(ctx context.Context) ([]*ask, error) {
	defer wake(ctx, &o.mu, o.cond)()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.first()
	deadline := o.c.sched.Now() + o.c.cfg.Timeout
	for {
		next := o.sweep()
		if o.filled() == o.width || o.open() == 0 {
			break
		}
		if err := ended(ctx, "wait for grants"); err != nil {
			o.end(true)
			return nil, err
		}
		left := deadline - o.c.sched.Now()
		if left <= 0 {
			o.end(true)
			return nil, errkind.Timeout.Wrap("wait for grants of block %s: servers are busy", o.what.Key.Block)
		}
		o.cond.WaitFor(min(next, left))
	}
	o.end(false)
	return o.mu.slots, nil
}

// first asks a disk for each index and a spare. All messages carry the disks of
// the first choice as siblings: they are a hint, and the header of a chunk must
// be the same however often its grant is asked for.
func (o *opening) first() {
	for i := range o.width {
		if p, ok := o.mu.place.next(); ok {
			o.mu.asks = append(o.mu.asks, &ask{peer: p, index: i})
			o.what.Siblings = append(o.what.Siblings, p.disk)
		}
	}
	for _, a := range o.mu.asks {
		o.send(a)
	}
	o.askNext(o.width - 1) // the spare
}

// filled counts the chunk indices that have a grant.
func (o *opening) filled() int {
	n := 0
	for _, a := range o.mu.slots {
		if a != nil {
			n++
		}
	}
	return n
}

// open counts questions that may still bring a grant.
func (o *opening) open() int {
	n := 0
	for _, a := range o.mu.asks {
		if a.state == askPending || a.state == askBusy || a.state == askGranted && o.mu.slots[a.index] != a {
			n++
		}
	}
	return n
}

// askNext asks the next disk for an index; false when there is none.
func (o *opening) askNext(index int) bool {
	p, ok := o.mu.place.next()
	if ok {
		a := &ask{peer: p, index: index}
		o.mu.asks = append(o.mu.asks, a)
		o.send(a)
	}
	return ok
}

func (o *opening) send(a *ask) {
	a.state, a.since = askPending, o.c.sched.Now()
	m := o.what
	m.Disk, m.Key.Index = a.disk, uint8(a.index)
	index := a.index
	a.cancel = o.c.send(a.peer, &wire.Request{Op: wire.OpOpen, Body: &m}, o.c.cfg.Timeout, func(r reply) { o.answered(a, index, r) })
}

func (o *opening) answered(a *ask, index int, r reply) {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.cond.Broadcast()
	if a.state != askPending || a.index != index {
		return // given up meanwhile; the abort that followed drops the grant
	}
	switch grant, ok := grantOf(r); {
	case ok:
		o.c.health.granted(r.took)
		a.state, a.credit = askGranted, grant.Credit
		if o.mu.ended {
			o.giveUp(a)
		}
	case o.mu.ended:
		a.state = askGone
	case errkind.Of(r.err) == errkind.Busy:
		a.state = askBusy
		o.c.sched.AfterFunc(r.busyDelay(), func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			if a.state == askBusy && !o.mu.ended {
				o.send(a)
			}
		})
	default:
		o.refusal = r.err.Error()
		o.skip[a.disk] = !transient(r.err)
		if transient(r.err) {
			o.silence = true
			o.c.health.fail(a.peer, r.err.Error())
		}
		o.replace(a)
	}
}

func grantOf(r reply) (*wire.Grant, bool) {
	if r.err != nil {
		return nil, false
	}
	g, ok := r.Body.(*wire.Grant)
	return g, ok
}

// replace gives an ask up and asks another disk in its place.
func (o *opening) replace(a *ask) {
	a.state = askGone
	o.mu.place.drop(a.peer)
	if o.mu.slots[a.index] == nil && !o.mu.ended {
		o.askNext(a.index)
	}
}

// sweep assigns grants to indices and gives up on silent servers. It returns
// how long to wait at most for the next look.
func (o *opening) sweep() time.Duration {
	limit, now := o.c.health.silence(), o.c.sched.Now()
	next := limit
	for i := 0; i < len(o.mu.asks); i++ { // replace appends
		a := o.mu.asks[i]
		switch {
		case a.state == askGranted:
			o.assign(a)
		case a.state == askPending && now-a.since >= limit:
			o.silent(a)
		case a.state == askPending:
			next = min(next, limit-(now-a.since))
		}
	}
	return next
}

// silent puts a server out that has not answered in time.
func (o *opening) silent(a *ask) {
	o.c.health.fail(a.peer, "no answer to a request for a grant")
	o.refusal, o.silence = a.addr+" did not answer in time", true
	cancel := a.cancel
	o.replace(a)
	cancel()
	o.c.forget(a.peer, ids.ChunkKey{Block: o.what.Key.Block, Index: uint8(a.index)})
}

// assign puts a grant into its slot. A spare whose index has been taken asks
// again, for the index that is still open; it is known to answer quickly.
func (o *opening) assign(a *ask) {
	switch o.mu.slots[a.index] {
	case a:
	case nil:
		o.mu.slots[a.index] = a
	default:
		if i := o.wanting(); i >= 0 {
			o.c.forget(a.peer, ids.ChunkKey{Block: o.what.Key.Block, Index: uint8(a.index)})
			a.index = i
			o.send(a)
		}
	}
}

// wanting returns an index that a spare should take: the last one without a
// grant, or one for which nobody is asked any more; -1 when there is none.
func (o *opening) wanting() int {
	last := o.filled() == o.width-1
	for i, s := range o.mu.slots {
		if s == nil && (last || !o.asked(i)) {
			return i
		}
	}
	return -1
}

func (o *opening) asked(index int) bool {
	for _, a := range o.mu.asks {
		if a.index == index && (a.state == askPending || a.state == askBusy) {
			return true
		}
	}
	return false
}

// end stops the opening: what is not in a slot is given up, and with all, the
// slots too.
func (o *opening) end(all bool) {
	o.mu.ended = true
	for _, a := range o.mu.asks {
		if all || o.mu.slots[a.index] != a {
			o.giveUp(a)
		}
	}
}

// giveUp cancels an ask and has the server drop what it may have granted.
func (o *opening) giveUp(a *ask) {
	if a.state == askPending && a.cancel != nil {
		a.cancel()
	}
	if a.state != askGone {
		o.c.forget(a.peer, ids.ChunkKey{Block: o.what.Key.Block, Index: uint8(a.index)})
	}
	a.state = askGone
}

// grants opens the chunks of a block: in the layout asked for, or in a
// narrower one of the same M when fewer domains can be reached (rule 1).
func (c *Client) grants(ctx context.Context, spec chunk.BlockSpec) (*opened, error) {
	deadline := c.sched.Now() + c.cfg.Timeout
	skip := make(map[ids.DiskID]bool)
	l := spec.Layout
	for {
		m := c.cfg.Map()
		if m == nil {
			return nil, errkind.Unavailable.Wrap("open a block: no cluster map yet")
		}
		place := c.place(m, spec.Layout.Width(), skip)
		o := c.newOpening(openMessage(spec, l), place, skip)
		slots, err := o.gather(ctx)
		if err != nil {
			return nil, err
		}
		got := o.filled()
		if got == l.Width() {
			return &opened{layout: l, what: o.what, slots: slots}, nil
		}
		o.mu.Lock()
		o.end(true)
		o.mu.Unlock()
		narrow, ok := l.Narrow(got)
		if ok {
			l = narrow
			continue
		}
		l = spec.Layout
		err = tooFew(spec.Layout, got, place, o.refusal)
		if err := ended(ctx, err.Error()); err != nil {
			return nil, err
		}
		if place.outs == 0 && !o.silence || c.sched.Now() >= deadline {
			return nil, err
		}
		if !c.health.waitChange(100 * time.Millisecond) {
			return nil, errkind.Unavailable.Wrap("open a block: the client is closed (%v)", err)
		}
	}
}

func tooFew(l ids.Layout, got int, place *placement, refusal string) error {
	domain := "hosts"
	if place.diskDomains {
		domain = "disks"
	}
	text := []string{"add or repair chunk servers"}
	if refusal != "" {
		text = append(text, "last refusal: "+refusal)
	}
	return errkind.NoSpace.Wrap("write a block in %s: %d %s give space, %d are needed at least (%s); %s",
		l, got, domain, int(l.M)+1, place, strings.Join(text, "; "))
}

// opened is a block whose chunks all have a grant.
type opened struct {
	layout ids.Layout
	what   wire.Open
	slots  []*ask
}

func openMessage(spec chunk.BlockSpec, l ids.Layout) wire.Open {
	reserve := ec.Reserve(l, spec.MaxLen)
	return wire.Open{
		Key: ids.ChunkKey{Block: spec.NextID()}, Layout: l, Ino: spec.Ino, FileOff: spec.FileOff,
		Reserve: uint32(reserve), Granule: ec.Granule(l, reserve),
	}
}
