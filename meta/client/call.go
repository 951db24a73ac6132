package client

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// window is the set of places of one session.
type window struct {
	session ids.Session
	seq     [api.Places]uint64
	free    []uint8
}

func newWindow(s ids.Session) *window {
	w := &window{session: s}
	for p := api.Places - 1; p >= 0; p-- {
		w.free = append(w.free, uint8(p))
	}
	return w
}

// call is one request from when it is made until it is answered. Its fields
// are guarded by Client.mu; frame does not change once the call is queued.
type call struct {
	id        uint64
	order     uint64 // of first sending: retries keep it
	kind      api.Kind
	req       api.Request
	frame     []byte
	win       *window // mutations of a session
	place     uint8
	cond      sched.Cond
	admitted  bool
	pushed    bool // may have reached a server
	again     bool // was sent more than once
	done      bool
	cancelled bool
	detached  bool // the caller has gone, the place waits for the answer
	begun     time.Duration
	sent      time.Duration
	backoff   time.Duration
	reply     []byte
	err       error
	then      func(reply []byte, err error) // instead of a caller; with mu held
	touch     touch                         // what a change takes out of the cache
	seq       uint64                        // of the cache, when it was queued
}

// Do sends a request and decodes the reply into reply, which may be nil. It
// goes on over lost connections and changes of leader until it is answered,
// ctx ends or OpTimeout passes. Errors wrap an errkind: what the service
// answered, or Interrupted (ctx), Timeout, Unavailable (closed). A mutation
// that ends by ctx or time may still be applied later: it goes on in the
// background and keeps its place of the window until it is answered.
//
// Open and Create with Open put the inode into the set of open inodes, Release
// takes it out: the caller orders Open and Release of one inode. Lookup and
// GetAttr may be answered from memory under a lease.
func (c *Client) Do(ctx context.Context, req api.Request, reply codec.Message) error {
	return c.do(ctx, req, reply, false)
}

func (c *Client) do(ctx context.Context, req api.Request, reply codec.Message, last bool) error {
	c.mu.Lock()
	hit := !c.mu.closing && c.cached(req, reply)
	c.mu.Unlock()
	if hit {
		return nil
	}
	body, seq, err := c.exchange(ctx, req, last)
	if err != nil {
		return err
	}
	var h api.Reply
	rest, err := codec.DecodePrefix(body, &h)
	if err != nil {
		return errkind.Corrupt.Wrap("reply to %s: %v", req.Kind(), err)
	}
	if h.Err != errkind.OK {
		return h.Failure()
	}
	if reply == nil {
		return nil
	}
	if err := codec.Decode(rest, reply); err != nil {
		return errkind.Corrupt.Wrap("reply to %s: %v", req.Kind(), err)
	}
	if k := req.Kind(); k == api.KindLookup || k == api.KindGetAttr {
		c.learn(req, reply, seq)
	}
	return nil
}

// exchange returns the encoded reply, and the cache's seq as of the sending.
func (c *Client) exchange(ctx context.Context, req api.Request, last bool) ([]byte, uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed || c.mu.closing && !last {
		return nil, 0, c.failure(req.Kind().String(), errkind.Unavailable)
	}
	k := c.newCall(req)
	stop := c.onCancel(ctx, func() {
		k.cancelled = true
		k.cond.Signal()
	})
	err := c.admit(ctx, k)
	if err == nil {
		err = c.checkBlocks(k)
	}
	if err == nil {
		h := c.header(k)
		c.mu.Unlock()
		frame := k.encode(h)
		c.mu.Lock()
		k.frame = frame
		c.queue(k)
		err = c.await(ctx, k)
	}
	reply, seq := k.reply, k.seq
	if k.admitted && !k.done && !k.detached {
		c.release(k)
	}
	if stop() && !k.detached {
		c.recycle(k)
	}
	return reply, seq, err
}

func (c *Client) newCall(req api.Request) *call {
	var k *call
	if n := len(c.mu.free); n > 0 {
		k, c.mu.free = c.mu.free[n-1], c.mu.free[:n-1]
		*k = call{cond: k.cond}
	} else {
		k = &call{cond: c.cfg.Sched.NewCond(&c.mu)}
	}
	c.mu.nextID++
	k.id, k.kind, k.req, k.begun = c.mu.nextID, req.Kind(), req, c.cfg.Sched.Now()
	return k
}

// recycle keeps a finished call for another use.
func (c *Client) recycle(k *call) {
	if len(c.mu.free) < maxQueries {
		*k = call{cond: k.cond}
		c.mu.free = append(c.mu.free, k)
	}
}

// admit waits for a place (mutations of a session) or for room among the
// queries. First come, first served.
func (c *Client) admit(ctx context.Context, k *call) error {
	if k.kind.Mutation() && !c.cfg.NoSession {
		c.mu.waitMut = append(c.mu.waitMut, k)
	} else {
		c.mu.waitQry = append(c.mu.waitQry, k)
	}
	c.admitNext()
	for !k.admitted && !k.done {
		err := c.over(ctx, k)
		if err == nil && !c.waitUntil(k.cond, k.begun) {
			err = c.failure(k.kind.String(), errkind.Timeout)
		}
		if err != nil && !k.admitted {
			c.mu.waitMut = remove(c.mu.waitMut, k)
			c.mu.waitQry = remove(c.mu.waitQry, k)
			return err
		}
	}
	return k.err
}

// remove takes k out of a queue, if it is there.
func remove(q []*call, k *call) []*call {
	if i := slices.Index(q, k); i >= 0 {
		return slices.Delete(q, i, i+1)
	}
	return q
}

// over returns the error of a call whose context has ended, or nil.
func (c *Client) over(ctx context.Context, k *call) error {
	if !k.cancelled {
		return nil
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.failure(k.kind.String(), errkind.Timeout)
	}
	return errkind.Interrupted.Wrap("%s", k.kind)
}

// admitNext gives free places and room to those who wait for them.
func (c *Client) admitNext() {
	for len(c.mu.waitMut) > 0 && c.mu.win != nil && len(c.mu.win.free) > 0 {
		k := c.mu.waitMut[0]
		c.mu.waitMut = c.mu.waitMut[1:]
		w := c.mu.win
		k.win, k.place = w, w.free[len(w.free)-1]
		w.free = w.free[:len(w.free)-1]
		w.seq[k.place]++
		k.admitted = true
		k.cond.Signal()
	}
	for len(c.mu.waitQry) > 0 && c.mu.queries < maxQueries && (c.mu.win != nil || c.cfg.NoSession) {
		k := c.mu.waitQry[0]
		c.mu.waitQry = c.mu.waitQry[1:]
		c.mu.queries++
		k.admitted = true
		k.cond.Signal()
	}
}

// release gives back what admit took.
func (c *Client) release(k *call) {
	if !k.admitted {
		return // the client's own calls take nothing
	}
	k.admitted = false
	if k.win != nil {
		k.win.free = append(k.win.free, k.place)
	} else {
		c.mu.queries--
	}
	c.admitNext()
}

// checkBlocks refuses a commit of blocks that an earlier session made: they
// are garbage since that session ended.
func (c *Client) checkBlocks(k *call) error {
	m, ok := k.req.(*api.Commit)
	if !ok || k.win == nil {
		return nil
	}
	for i := range m.Blocks {
		if s := m.Blocks[i].ID.Session(); s != k.win.session {
			return errkind.Expired.Wrap("commit inode %d: block %s was written by session %d, which has ended", m.Ino, m.Blocks[i].ID, s)
		}
	}
	return nil
}

func (c *Client) header(k *call) api.Header {
	h := api.Header{Version: api.Version, Kind: k.kind, Session: c.sessionLocked(), Epoch: c.mu.epoch, Slot: slotOf(k.req)}
	if k.win != nil {
		h.Session, h.Place, h.Seq = k.win.session, k.place, k.win.seq[k.place]
	}
	return h
}

// encode makes the frame, once for all retries.
func (k *call) encode(h api.Header) []byte {
	p := stream.Begin(make([]byte, 0, 128))
	p = codec.Encode(p, &h)
	p = codec.Encode(p, k.req)
	stream.Finish(p, 0, stream.TypeRequest, k.id)
	return p
}

// queue makes the call known, so that it is sent now and on every new
// connection until it is answered.
func (c *Client) queue(k *call) {
	if c.mu.closed {
		k.done, k.err = true, c.failure(k.kind.String(), errkind.Unavailable)
		c.release(k)
		return
	}
	c.mu.order++
	k.order = c.mu.order
	c.mu.calls[k.id] = k
	c.trackRequest(k)
	c.beginChange(k)
	k.seq = c.mu.cache.seq
	c.send(k)
}

// send puts the call's frame on the connection, if there is one.
func (c *Client) send(k *call) {
	k.sent = c.cfg.Sched.Now()
	if l := c.mu.link; l != nil {
		c.trimRelease(k)
		k.again = k.again || k.pushed
		k.pushed = true
		l.push(k.frame)
	}
}

// await waits for the answer of a queued call.
func (c *Client) await(ctx context.Context, k *call) error {
	for !k.done {
		err := c.over(ctx, k)
		if err == nil && !c.waitUntil(k.cond, k.begun) {
			err = c.failure(k.kind.String(), errkind.Timeout)
		}
		if err != nil && !k.done {
			return c.giveUp(k, err)
		}
	}
	return k.err
}

// giveUp ends the wait of a caller. A query is forgotten; a mutation goes on.
func (c *Client) giveUp(k *call, err error) error {
	if lock, ok := k.req.(*api.Lock); ok && lock.Wait {
		c.sendCancel(k)
		deadline := c.cfg.Sched.Now() + cancelGrace
		for !k.done && c.cfg.Sched.Now() < deadline {
			k.cond.WaitFor(deadline - c.cfg.Sched.Now())
		}
		if k.done {
			return k.err
		}
	}
	if k.win == nil || !k.pushed {
		delete(c.mu.calls, k.id)
		c.endChange(k, nil)
		return err
	}
	k.detached = true
	return err
}

func (c *Client) sendCancel(k *call) {
	if l := c.mu.link; l != nil {
		l.push(stream.Append(nil, stream.TypeCancel, k.id, nil))
	}
}

// finish takes the answer of a call, or the reason why there will be none.
func (c *Client) finish(k *call, reply []byte, err error) {
	delete(c.mu.calls, k.id)
	k.reply, k.err, k.done = reply, err, true
	c.endChange(k, reply)
	c.release(k)
	switch {
	case k.then != nil:
		k.then(reply, err)
	case k.detached:
		c.undo(k)
	default:
		k.cond.Signal()
	}
}

// ordered lists the calls under way in the order of their first sending.
func (c *Client) ordered() []*call {
	all := make([]*call, 0, len(c.mu.calls))
	for _, k := range c.mu.calls {
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b *call) int { return cmp.Compare(a.order, b.order) })
	return all
}

// ask sends a request of the client's own, outside window and limits; then is
// called with mu held.
func (c *Client) ask(req api.Request, then func(reply []byte, err error)) *call {
	k := c.newCall(req)
	k.then = then
	k.frame = k.encode(c.header(k))
	c.queue(k)
	return k
}

// forget drops one of the client's own calls.
func (c *Client) forget(k *call) {
	if k != nil {
		delete(c.mu.calls, k.id)
	}
}

// answer decodes the reply to one of the client's own calls.
func answer(reply []byte, err error, body codec.Message) (api.Reply, error) {
	var h api.Reply
	if err != nil {
		return h, err
	}
	rest, err := codec.DecodePrefix(reply, &h)
	if err == nil && h.Err == errkind.OK {
		err = codec.Decode(rest, body)
	}
	if err != nil {
		return h, err
	}
	return h, h.Failure()
}
