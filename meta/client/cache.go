package client

import (
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Bounds of the cache.
const (
	maxCached = 1 << 14 // names, and as many attributes
	// maxAge bounds how long something is answered from memory without being
	// asked for again: background work of the service, which no lease keeps
	// back, changes the space that a truncated file takes.
	maxAge     = time.Second
	leaseAgain = time.Second // after a refusal
	// lendSlack is how much later than told the kernel may stop using what was
	// lent: it counts in ticks of up to 10 ms, from when it reads the reply,
	// which is written after Lend has returned.
	lendSlack = 50 * time.Millisecond
)

// lease is the right to answer from memory: no other session's change is
// applied before until, or before the lease is given back.
type lease struct {
	until    time.Duration
	call     *call         // that asks for it
	refused  time.Duration // when it was last refused
	recalled time.Duration // when it was last lost
	asked    bool          // ever
	// number names the lease: it is raised whenever one ends, by a recall or by
	// time, so that what was learned before is not taken for covered.
	number uint64
	lent   time.Duration // until when the kernel uses what it was told
}

// cache holds what Lookup and GetAttr answered under the lease. What a change
// of this session's own touches is not answered from memory between its
// sending and its answer; seq orders these events, so that an answer that may
// be older than a change is not kept. Guarded by Client.mu.
type cache struct {
	names map[nameKey]*name
	attrs map[ids.Ino]*attr
	seq   uint64
	// emptied is seq when things were last dropped: what is not in the maps may
	// have been touched until then.
	emptied uint64
	// While wide, nothing is kept or answered: a change under way touches nobody
	// knows what, or one does that began before such a one ended, at wideEnd.
	wide    bool
	widened int // such changes under way
	wideEnd uint64
}

type nameKey struct {
	parent ids.Ino
	name   string
}

// mark is the state of one thing in the cache.
type mark struct {
	pending int    // changes under way that touch it
	touched uint64 // seq of the last event that touched it
	have    bool
	at      time.Duration // when it was put in
}

type name struct {
	mark
	ino ids.Ino
}

type attr struct {
	mark
	attr api.Attr
}

// touch is what one change touches.
type touch struct {
	active bool
	wide   bool
	seq    uint64 // when it began
	name   nameKey
	ino    ids.Ino // zero: none
}

func newCache() cache {
	return cache{names: make(map[nameKey]*name), attrs: make(map[ids.Ino]*attr)}
}

// empty drops everything but the counts of changes under way.
func (c *cache) empty() {
	c.seq++
	c.emptied = c.seq
	for k, n := range c.names {
		n.have = false
		if n.pending == 0 {
			delete(c.names, k)
		}
	}
	for i, a := range c.attrs {
		a.have = false
		if a.pending == 0 {
			delete(c.attrs, i)
		}
	}
}

func (c *cache) nameOf(k nameKey) *name {
	n := c.names[k]
	if n == nil {
		n = new(name)
		c.names[k] = n
	}
	return n
}

func (c *cache) attrOf(i ids.Ino) *attr {
	a := c.attrs[i]
	if a == nil {
		a = new(attr)
		c.attrs[i] = a
	}
	return a
}

// fresh reports whether what was asked for, or changed, at seq may be kept.
func (c *cache) fresh(m *mark, known bool, seq uint64) bool {
	if c.wide || c.emptied > seq {
		return false
	}
	return !known || m.pending == 0 && m.touched <= seq
}

func (c *cache) putName(k nameKey, ino ids.Ino, seq uint64, now time.Duration) {
	n, known := c.names[k]
	if !known {
		n = new(name)
	}
	if c.fresh(&n.mark, known, seq) {
		c.names[k] = n
		n.ino, n.have, n.at = ino, true, now
	}
}

func (c *cache) putAttr(v *api.Attr, seq uint64, now time.Duration) {
	a, known := c.attrs[v.Ino]
	if !known {
		a = new(attr)
	}
	if c.fresh(&a.mark, known, seq) && (!a.have || a.attr.Change <= v.Change) {
		c.attrs[v.Ino] = a
		a.attr, a.have, a.at = *v, true, now
	}
}

// getAttr returns what is kept of an inode.
func (c *cache) getAttr(i ids.Ino, now time.Duration) (*api.Attr, bool) {
	a := c.attrs[i]
	if a == nil || !a.have || now-a.at > maxAge {
		return nil, false
	}
	return &a.attr, true
}

// cached answers a request from memory, if that is allowed; with mu held.
func (c *Client) cached(req api.Request, reply codec.Message) bool {
	var parent, ino ids.Ino
	var of []byte
	switch m := req.(type) {
	case *api.GetAttr:
		ino = m.Ino
	case *api.Lookup:
		parent, of = m.Parent, m.Name
	default:
		return false
	}
	now := c.cfg.Sched.Now()
	c.wantLease(now)
	e, ok := reply.(*api.Entry)
	if now >= c.mu.lease.until || c.mu.cache.wide || !ok {
		return false
	}
	if parent != 0 {
		n := c.mu.cache.names[nameKey{parent, string(of)}]
		if n == nil || !n.have || now-n.at > maxAge {
			return false
		}
		ino = n.ino
	}
	a, ok := c.mu.cache.getAttr(ino, now)
	if ok {
		*e = api.Entry{Attr: *a}
	}
	return ok
}

// learn keeps what a query answered; seq is that of when it was sent.
func (c *Client) learn(req api.Request, reply codec.Message, seq uint64) {
	e, ok := reply.(*api.Entry)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.cfg.Sched.Now()
	if now >= c.mu.lease.until {
		return
	}
	m, isLookup := req.(*api.Lookup)
	if isLookup && string(m.Name) != "." && string(m.Name) != ".." {
		c.mu.cache.putName(nameKey{m.Parent, string(m.Name)}, e.Attr.Ino, seq, now)
	}
	c.mu.cache.putAttr(&e.Attr, seq, now)
	c.mu.cache.bound()
}

// beginChange takes what a change may touch out of the cache until endChange;
// with mu held, before it is sent.
func (c *Client) beginChange(k *call) {
	if !k.kind.ChangesTree() {
		return
	}
	h := &c.mu.cache
	h.seq++
	t := touch{active: true, seq: h.seq}
	switch m := k.req.(type) {
	case *api.Create:
		t.name = nameKey{m.Parent, string(m.Name)}
	case *api.Unlink:
		t.name = nameKey{m.Parent, string(m.Name)}
		if n := h.names[t.name]; n != nil && n.have && !h.wide && c.cfg.Sched.Now() < c.mu.lease.until {
			t.ino = n.ino
		} else {
			t.wide = true // of whom the name is taken shows only later
		}
	case *api.Commit:
		t.ino = m.Ino
	case *api.SetAttr:
		t.ino = m.Ino
	case *api.SetXattr:
		t.ino = m.Ino
	case *api.RemoveXattr:
		t.ino = m.Ino
	default:
		t.wide = true
	}
	k.touch = t
	if t.wide {
		h.wide = true
		h.widened++
		return
	}
	if t.name.parent != 0 {
		h.nameOf(t.name).begin(h.seq)
	}
	if t.ino != 0 {
		h.attrOf(t.ino).begin(h.seq)
	}
}

func (m *mark) begin(seq uint64) {
	m.pending++
	m.touched, m.have = seq, false
}

// end reports whether the change that began at seq is the only one since then.
func (m *mark) end(began, seq uint64) bool {
	m.pending--
	alone := m.pending == 0 && m.touched == began
	m.touched, m.have = seq, false
	return alone
}

// endChange ends what beginChange began, and keeps what the reply tells if
// nothing else can have changed it meanwhile; with mu held.
func (c *Client) endChange(k *call, reply []byte) {
	t := k.touch
	if !t.active {
		return
	}
	k.touch = touch{}
	h := &c.mu.cache
	h.seq++
	if t.wide {
		h.widened--
		h.wideEnd = h.seq
	} else {
		c.settle(k, &t, reply)
	}
	if h.wide && h.widened == 0 && !c.changing(h.wideEnd) {
		h.wide = false
		h.empty()
	}
	h.bound()
}

// changing reports whether a change is under way that began before seq.
func (c *Client) changing(seq uint64) bool {
	for _, k := range c.mu.calls {
		if k.touch.active && k.touch.seq < seq {
			return true
		}
	}
	return false
}

// bound keeps the cache small.
func (c *cache) bound() {
	if len(c.names) > maxCached || len(c.attrs) > maxCached {
		c.empty()
	}
}

func (c *Client) settle(k *call, t *touch, reply []byte) {
	h := &c.mu.cache
	nameAlone, inoAlone := false, false
	if t.name.parent != 0 {
		nameAlone = h.names[t.name].end(t.seq, h.seq)
	}
	if t.ino != 0 {
		inoAlone = h.attrs[t.ino].end(t.seq, h.seq)
	}
	var e api.Entry
	now := c.cfg.Sched.Now()
	// The reply to what was sent again may be one that was kept for long.
	ok := !k.again && now < c.mu.lease.until && h.emptied <= t.seq && entryOf(k.kind, reply, &e)
	if t.name.parent != 0 {
		h.putDir(t.name.parent, e.Dir, now)
	}
	switch {
	case !ok:
	case k.kind == api.KindUnlink:
		if e.Attr.Ino != t.ino {
			h.empty() // another had got the name meanwhile
		}
	case k.kind == api.KindCreate:
		if nameAlone {
			h.putName(t.name, e.Attr.Ino, h.seq, now)
		}
		h.putAttr(&e.Attr, t.seq, now)
	case inoAlone:
		h.putAttr(&e.Attr, h.seq, now)
	}
}

// putDir keeps a directory as a change of its names left it. Replies come in
// the order of the changes; v is nil when it is not known.
func (c *cache) putDir(i ids.Ino, v *api.Attr, now time.Duration) {
	a := c.attrs[i]
	switch {
	case v == nil:
		a = c.attrOf(i)
		a.touched, a.have = c.seq, false
	case a == nil || a.pending == 0:
		c.putAttr(v, c.seq, now)
	}
}

// entryOf decodes the attributes in the reply to a change; false on an error.
func entryOf(kind api.Kind, reply []byte, e *api.Entry) bool {
	var head api.Reply
	rest, err := codec.DecodePrefix(reply, &head)
	if err != nil || head.Err != errkind.OK {
		return false
	}
	if kind == api.KindCommit {
		var m api.Committed
		err = codec.Decode(rest, &m)
		e.Attr = m.Attr
		return err == nil
	}
	return codec.Decode(rest, e) == nil
}

// wantLease asks for the lease, or for more of it, when it is wanted; with mu held.
func (c *Client) wantLease(now time.Duration) {
	l := &c.mu.lease
	if l.call != nil || c.mu.win == nil || c.mu.link == nil || c.mu.closing || l.until-now > leaseAgain/2 ||
		l.asked && now-max(l.refused, l.recalled) < leaseAgain {
		return
	}
	l.asked = true
	l.call = c.ask(&api.Lease{}, nil)
	k := l.call
	k.then = func(reply []byte, err error) { c.leased(k, reply, err) }
}

// leased takes the answer to a question for the lease.
func (c *Client) leased(k *call, reply []byte, err error) {
	l, now := &c.mu.lease, c.cfg.Sched.Now()
	if l.call != k {
		return
	}
	l.call = nil
	var m api.Leased
	if _, err := answer(reply, err, &m); err != nil || m.Millis == 0 {
		l.refused = now
		return
	}
	if now >= l.until {
		c.mu.cache.empty() // what was learned before may be wrong by now
		l.number++
	}
	l.until = max(l.until, k.sent+time.Duration(m.Millis)*time.Millisecond)
}

// dropLease forgets the lease and all that it covered; with mu held.
func (c *Client) dropLease() {
	l := &c.mu.lease
	c.forget(l.call)
	l.call, l.until, l.recalled = nil, 0, c.cfg.Sched.Now()
	l.number++
	c.mu.cache.empty()
}

// Lease names the lease that is held at this moment; zero when none is. Begin
// with it what shall be lent.
func (c *Client) Lease() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cfg.Sched.Now() >= c.mu.lease.until {
		return 0
	}
	return c.mu.lease.number
}

// Lend returns for how long, at most limit, answers got since Lease returned
// the number may be used without asking; 0 when that lease has ended. A recall
// is answered only after that (data-path rule 28).
func (c *Client) Lend(number uint64, limit time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, now := &c.mu.lease, c.cfg.Sched.Now()
	if number == 0 || number != l.number || now >= l.until {
		return 0
	}
	d := min(limit, l.until-now-lendSlack)
	if d <= 0 {
		return 0
	}
	l.lent = max(l.lent, now+d+lendSlack)
	return d
}

// giveBack answers a recall, once nobody uses what was lent under the lease;
// with mu held.
func (c *Client) giveBack() {
	c.dropLease()
	back := func() { c.ask(&api.Lease{Return: true}, func([]byte, error) {}) }
	wait := c.mu.lease.lent - c.cfg.Sched.Now()
	if wait <= 0 {
		back()
		return
	}
	from := c.mu.link
	c.cfg.Sched.AfterFunc(wait, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		// A connection that ended took the lease with it.
		if c.mu.link == from && from != nil && !c.mu.closing {
			back()
		}
	})
}
