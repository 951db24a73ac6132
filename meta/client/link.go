package client

import (
	"context"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// link is one connection to a server that led when it began. Its fields are
// guarded by Client.mu.
type link struct {
	conn  stream.Conn
	addr  string
	queue [][]byte // frames to send
	dead  bool
	cond  sched.Cond
	heard time.Duration
}

// push queues a frame; the sender packs what has gathered into one message.
// The number of calls under way bounds the queue.
func (l *link) push(frame []byte) {
	if l.dead {
		return
	}
	l.queue = append(l.queue, frame)
	if len(l.queue) == 1 {
		l.cond.Signal()
	}
}

// runLinks keeps one connection to the leader until the client closes.
func (c *Client) runLinks() {
	backoff := minBackoff
	hops := 0
	for {
		addr, hinted, ok := c.nextAddr()
		if !ok {
			return
		}
		hops++
		conn, hello, err := c.connect(addr)
		switch {
		case err != nil:
			c.trouble(err)
		case hello.Leading:
			backoff, hops = minBackoff, 0
			c.serve(conn, addr)
			continue
		default:
			conn.Close()
			if hello.Leader != "" && hello.Leader != addr && hops < 4 {
				c.setHint(hello.Leader)
				continue
			}
			err = errkind.NotLeader.Wrap("%s does not lead, and knows no leader", addr)
			c.trouble(err)
		}
		if hinted && err != nil && hops < 4 {
			continue // the hint was stale: try the configured addresses at once
		}
		hops = 0
		c.pause(backoff)
		backoff = min(2*backoff, maxBackoff)
	}
}

// nextAddr chooses the next server: the hint, or round the configured ones.
func (c *Client) nextAddr() (addr string, hinted, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return "", false, false
	}
	if c.mu.hint != "" {
		addr, c.mu.hint = c.mu.hint, ""
		return addr, true, true
	}
	addr = c.cfg.Addrs[c.mu.addr%len(c.cfg.Addrs)]
	c.mu.addr++
	return addr, false, true
}

func (c *Client) setHint(addr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.hint = addr
}

// trouble remembers why there is no connection.
func (c *Client) trouble(err error) {
	c.cfg.Log.Debug("metadata connection", "err", err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.lastErr = err
	k := errkind.Of(err)
	if (k == errkind.Version || k == errkind.WrongCluster) && c.identity.Load() == nil && c.mu.fatal == nil {
		c.mu.fatal = err
		c.ready.Broadcast()
	}
}

// pause waits about d, with jitter, or until the client closes.
func (c *Client) pause(d time.Duration) {
	d += time.Duration(c.cfg.Sched.Uint64() % uint64(d))
	c.mu.Lock()
	defer c.mu.Unlock()
	end := c.cfg.Sched.Now() + d
	for !c.mu.closed && c.cfg.Sched.Now() < end {
		c.wake.WaitFor(end - c.cfg.Sched.Now())
	}
}

// connect reaches addr and exchanges hellos.
func (c *Client) connect(addr string) (stream.Conn, stream.HelloReply, error) {
	conn, err := c.cfg.Transport.Connect(c.dialing, addr)
	if err != nil {
		return nil, stream.HelloReply{}, err
	}
	cluster := c.cfg.Cluster
	if id := c.identity.Load(); id != nil {
		cluster = id.cluster
	}
	t := c.cfg.Sched.AfterFunc(helloLimit, conn.Close)
	hello, err := stream.Greet(conn, &stream.Hello{
		MinVersion: stream.MinVersion, MaxVersion: stream.MaxVersion, Cluster: cluster, Name: c.cfg.Name,
	})
	if err == nil && !t.Stop() {
		err = errkind.Unavailable.Wrap("it did not answer hello in %s", helloLimit)
	}
	t.Stop()
	if err != nil {
		conn.Close()
		return nil, hello, errkind.Of(err).Wrap("metadata server %s: %v", addr, err)
	}
	return conn, hello, nil
}

// serve uses the connection until it fails.
func (c *Client) serve(conn stream.Conn, addr string) {
	l := &link{conn: conn, addr: addr, heard: c.cfg.Sched.Now()}
	l.cond = c.cfg.Sched.NewCond(&c.mu)
	defer conn.Close()
	if !c.linkUp(l) {
		return
	}
	c.start("meta-send", func() { c.runSender(l) })
	err := c.receive(l)
	c.mu.Lock()
	defer c.mu.Unlock()
	l.dead = true
	l.cond.Broadcast()
	c.mu.link = nil
	c.dropLease()
	if !c.mu.closed {
		c.mu.lastErr = err
		c.cfg.Log.Debug("metadata connection lost", "addr", addr, "err", err)
	}
}

// linkUp makes l the connection and sends on it all that waits for an answer:
// first the session's renewal with its open inodes, then the calls in the
// order in which they were first sent.
func (c *Client) linkUp(l *link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return false
	}
	c.mu.link = l
	c.mu.lastErr = nil
	if !c.cfg.NoSession {
		c.forget(c.mu.renew.call)
		c.mu.renew.call = nil
		c.renewNow(true)
	}
	for _, k := range c.ordered() {
		if k != c.mu.renew.call {
			c.send(k)
		}
	}
	if c.mu.win == nil && !c.cfg.NoSession {
		c.openSession()
	}
	c.ready.Broadcast()
	return true
}

// runSender writes frames to the connection, as many as wait in one message.
func (c *Client) runSender(l *link) {
	var batch [][]byte
	for {
		batch = c.nextBatch(l, batch[:0])
		if len(batch) == 0 {
			return
		}
		size := 0
		for _, f := range batch {
			size += len(f)
		}
		msg := stream.NewBuffer(size)
		for i, f := range batch {
			msg = append(msg, f...)
			batch[i] = nil
		}
		if err := l.conn.Send(msg); err != nil {
			l.conn.Close() // receive notices
			return
		}
	}
}

// nextBatch waits for frames and takes up to stream.MaxBatch bytes of them.
func (c *Client) nextBatch(l *link, batch [][]byte) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(l.queue) == 0 && !l.dead {
		l.cond.Wait()
	}
	if l.dead {
		return nil
	}
	size := 0
	for len(l.queue) > 0 && (size == 0 || size+len(l.queue[0]) <= stream.MaxBatch) {
		size += len(l.queue[0])
		batch = append(batch, l.queue[0])
		l.queue[0] = nil
		l.queue = l.queue[1:]
	}
	if len(l.queue) == 0 {
		l.queue = nil
	}
	return batch
}

// receive handles what the server sends until the connection fails.
func (c *Client) receive(l *link) error {
	for {
		msg, err := l.conn.Recv()
		if err != nil {
			return errkind.Unavailable.Wrap("metadata server %s: %v", l.addr, err)
		}
		if err := c.handleMessage(l, msg); err != nil {
			return err
		}
	}
}

func (c *Client) handleMessage(l *link, msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.heard = c.cfg.Sched.Now()
	alone := true
	for len(msg) > 0 {
		f, rest, err := stream.Next(msg)
		if err != nil {
			return errkind.Of(err).Wrap("metadata server %s: %v", l.addr, err)
		}
		alone = alone && len(rest) == 0
		if err := c.handleFrame(l, f, alone); err != nil {
			return err
		}
		msg = rest
	}
	return nil
}

// handleFrame handles one frame; alone says that nothing else lies in its memory.
func (c *Client) handleFrame(l *link, f stream.Frame, alone bool) error {
	k := c.mu.calls[f.ID]
	switch f.Type {
	case stream.TypeReply:
		if k == nil {
			return nil // given up
		}
		if !alone {
			f.Body = append(make([]byte, 0, len(f.Body)), f.Body...) // or a small reply keeps the whole message alive
		}
		c.trackReply(k, f.Body)
		c.finish(k, f.Body, nil)
	case stream.TypeRefuse:
		var r stream.Refusal
		if err := codec.Decode(f.Body, &r); err != nil {
			return errkind.Corrupt.Wrap("metadata server %s: refusal: %v", l.addr, err)
		}
		return c.refused(l, k, &r)
	case stream.TypePush:
		var p api.Pushed
		if err := codec.Decode(f.Body, &p); err != nil {
			return errkind.Corrupt.Wrap("metadata server %s: push: %v", l.addr, err)
		}
		c.handlePush(api.Kind(f.ID), p)
	default:
		return errkind.Invalid.Wrap("metadata server %s: a frame of type %d", l.addr, f.Type)
	}
	return nil
}

// refused has a call sent again: by a new connection to the leader, or here, later.
func (c *Client) refused(l *link, k *call, r *stream.Refusal) error {
	c.mu.lastErr = r.Err.Wrap("metadata server %s: %s", l.addr, r.Text)
	if r.Err == errkind.NotLeader {
		if r.Leader != l.addr {
			c.mu.hint = r.Leader
		}
		return errkind.NotLeader.Wrap("metadata server %s leads no longer", l.addr)
	}
	if k == nil {
		return nil
	}
	k.backoff = min(max(2*k.backoff, minBackoff), maxBackoff)
	d := k.backoff + time.Duration(c.cfg.Sched.Uint64()%uint64(k.backoff))
	id := k.id
	c.cfg.Sched.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if k := c.mu.calls[id]; k != nil && c.mu.link == l {
			c.send(k)
		}
	})
	return nil
}

// trackRequest keeps the set of open inodes; called in sending order.
func (c *Client) trackRequest(k *call) {
	switch m := k.req.(type) {
	case *api.Open:
		c.mu.opens[m.Ino] = struct{}{}
	case *api.Release:
		for _, i := range m.Inos {
			delete(c.mu.opens, i)
		}
	}
}

// trimRelease takes out of a Release that is sent again what was opened
// meanwhile: its first sending may have been handled before that Open, and
// then this one would come behind it.
func (c *Client) trimRelease(k *call) {
	m, ok := k.req.(*api.Release)
	if !ok || !k.pushed {
		return
	}
	left := make([]ids.Ino, 0, len(m.Inos))
	for _, i := range m.Inos {
		if _, open := c.mu.opens[i]; !open {
			left = append(left, i)
		}
	}
	if len(left) < len(m.Inos) {
		k.req = &api.Release{Inos: left}
		k.frame = k.encode(c.header(k))
	}
}

// trackReply keeps the set of open inodes and the highest epoch.
func (c *Client) trackReply(k *call, body []byte) {
	var h api.Reply
	rest, err := codec.DecodePrefix(body, &h)
	if err != nil {
		return // the caller will see it
	}
	c.mu.epoch = max(c.mu.epoch, h.Epoch)
	switch m := k.req.(type) {
	case *api.Open:
		if h.Err == errkind.NotFound || h.Err == errkind.Stale {
			delete(c.mu.opens, m.Ino)
		}
	case *api.Create:
		var e api.Entry
		if (m.Open || m.Orphan) && h.Err == errkind.OK && !k.detached && codec.Decode(rest, &e) == nil {
			c.mu.opens[e.Attr.Ino] = struct{}{}
		}
	}
	if h.Err == errkind.Expired && k.win != nil && k.win == c.mu.win && !c.mu.closing {
		c.loseSession(k.win)
	}
}

// undo takes back what a mutation got for a caller who has gone.
func (c *Client) undo(k *call) {
	var h api.Reply
	rest, err := codec.DecodePrefix(k.reply, &h)
	if k.err != nil || err != nil || h.Err != errkind.OK || c.mu.closing {
		return
	}
	switch m := k.req.(type) {
	case *api.Lock:
		if m.Type == api.Unlock {
			return
		}
		un := *m
		un.Type, un.Wait = api.Unlock, false
		c.startLocked("meta-undo", func() {
			if err := c.Do(context.Background(), &un, &api.Empty{}); err != nil {
				c.cfg.Log.Warn("give back a lock that nobody waits for", "ino", un.Ino, "err", err)
			}
		})
	case *api.Create:
		var e api.Entry
		if (m.Open || m.Orphan) && codec.Decode(rest, &e) == nil {
			if _, open := c.mu.opens[e.Attr.Ino]; !open {
				c.ask(&api.Release{Inos: []ids.Ino{e.Attr.Ino}}, func([]byte, error) {})
			}
		}
	}
}
