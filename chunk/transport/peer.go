package transport

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// cancelGrace is how long an abandoned request may still finish the transfer
// of its buffer, before that is ended by closing the connection.
const cancelGrace = 50 * time.Millisecond

const backoffMin = 50 * time.Millisecond

// peer is one server. Its lock guards its links, sessions and calls.
type peer struct {
	t     *Transport
	addr  string
	links [2]*link
	mu    struct {
		sync.Mutex
		closed  bool
		boot    uint64
		down    error         // why the last dial failed; nil when it did not
		until   time.Duration // not dialled again before
		backoff time.Duration
	}
}

// link is one of a peer's two connections, up or not. Guarded by peer.mu.
type link struct {
	peer    *peer
	kind    wire.Kind
	dialing bool
	sess    *session
	queue   []*call // not handed to a session
}

// call is one request. Guarded by peer.mu.
type call struct {
	req     *wire.Request
	done    func(*wire.Response, error)
	payload int // bytes
	link    *link
	sess    *session // that it was handed to
	id      uint64
	timer   sched.Timer

	writing   bool // the session's writer holds req
	receiving bool // the session's reader holds Dst
	over      bool // resp, err are decided
	told      bool // done has been, or is about to be, called
	resp      *wire.Response
	err       error
}

func newPeer(t *Transport, addr string) *peer {
	p := &peer{t: t, addr: addr}
	for i, k := range []wire.Kind{wire.KindSmall, wire.KindBulk} {
		p.links[i] = &link{peer: p, kind: k}
	}
	return p
}

// start queues a call, dialling when needed.
func (p *peer) start(c *call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := c.link
	if err := p.refusal(l); err != nil {
		c.over, c.told = true, true
		p.t.clock.Go("transport refused", func() { c.done(nil, err) })
		return
	}
	if c.req.Left > 0 {
		c.timer = p.t.clock.AfterFunc(c.req.Left, func() {
			p.cancel(c, errkind.Timeout.Wrap("%s to %s: no answer in %v", c.req.Op, p.addr, c.req.Left))
		})
	}
	l.queue = append(l.queue, c)
	if l.sess != nil {
		l.sess.wakeWriter()
	} else {
		p.dial(l)
	}
}

// refusal says why nothing can be sent now.
func (p *peer) refusal(l *link) error {
	switch {
	case p.mu.closed:
		return errClosed
	case l.sess == nil && p.mu.down != nil && (l.dialing || p.t.clock.Now() < p.mu.until):
		return p.mu.down // while one request tries again the others need not wait
	case len(l.queue) >= p.t.cfg.MaxQueued:
		return errkind.Busy.Wrap("%d requests to %s are waiting to be sent", len(l.queue), p.addr)
	}
	return nil
}

// dial starts to connect a link; the lock is held.
func (p *peer) dial(l *link) {
	if l.dialing || p.mu.closed {
		return
	}
	l.dialing = true
	p.t.spawn("transport dial "+p.addr, func() {
		s, err := connect(l)
		if err != nil {
			p.dialFailed(l, err)
			return
		}
		p.connected(l, s)
	})
}

func (p *peer) dialFailed(l *link, err error) {
	err = fmt.Errorf("connect to chunk server %s: %w", p.addr, err)
	p.mu.Lock()
	first := p.mu.down == nil
	p.mu.backoff = min(max(2*p.mu.backoff, backoffMin), p.t.cfg.BackoffMax)
	spread := time.Duration(p.t.clock.Uint64() % uint64(p.mu.backoff/4+1))
	p.mu.down, p.mu.until = err, p.t.clock.Now()+p.mu.backoff-spread
	l.dialing = false
	failed := l.queue
	l.queue = nil
	for _, c := range failed {
		c.over, c.err = true, err
	}
	tell := p.settle(failed)
	p.mu.Unlock()
	if first {
		p.t.cfg.Log.Warn("chunk server cannot be reached", slog.String("addr", p.addr), slog.Any("error", err))
	}
	tell()
}

// connected puts a new session to work.
func (p *peer) connected(l *link, s *session) {
	p.mu.Lock()
	old := p.mu.boot
	restarted := old != 0 && old != s.boot
	p.mu.boot = s.boot
	p.mu.down, p.mu.backoff = nil, 0
	var tell func()
	if restarted {
		// A connection to the life before cannot bring answers any more.
		for _, other := range p.links {
			if other.sess != nil && other.sess.boot != s.boot {
				tell = p.endSession(other.sess, errkind.Unavailable.Wrap("chunk server %s has restarted", p.addr))
			}
		}
	}
	p.mu.Unlock()
	if tell != nil {
		tell()
	}
	if restarted && p.t.cfg.OnRestart != nil {
		p.t.cfg.OnRestart(p.addr, s.boot)
	}
	p.mu.Lock()
	l.dialing = false
	if p.mu.closed {
		p.mu.Unlock()
		s.nc.Close()
		return
	}
	l.sess = s
	s.heard, s.used = p.t.clock.Now(), p.t.clock.Now()
	p.mu.Unlock()
	p.t.spawn("transport write "+p.addr, s.write)
	p.t.spawn("transport read "+p.addr, s.read)
}

// endSession closes a connection and decides the calls that were handed to it.
// Those that a goroutine of the session still holds are told by that one. The
// lock is held; the returned function is called without it.
func (p *peer) endSession(s *session, err error) (tell func()) {
	if s.dead {
		return func() {}
	}
	s.dead = true
	s.nc.Close()
	s.wakeWriter()
	if s.link.sess == s {
		s.link.sess = nil
	}
	calls := make([]*call, 0, len(s.pending))
	for _, c := range s.pending {
		if !c.over {
			c.over, c.err = true, err
		}
		calls = append(calls, c)
	}
	clear(s.pending)
	// What was never sent gets a new connection.
	if len(s.link.queue) > 0 {
		p.dial(s.link)
	}
	return p.settle(calls)
}

// settle returns a function that tells those calls whose outcome is decided and
// whose memory nobody holds. The lock is held; call the function without it.
func (p *peer) settle(calls []*call) (tell func()) {
	ready := calls[:0:0]
	for _, c := range calls {
		if c.over && !c.writing && !c.receiving && !c.told {
			c.told = true
			if c.timer != nil {
				c.timer.Stop()
			}
			ready = append(ready, c)
		}
	}
	return func() {
		for _, c := range ready {
			c.done(c.resp, c.err)
		}
	}
}

// settleLater is settle from a stack that may be the caller's.
func (p *peer) settleLater(c *call) {
	tell := p.settle([]*call{c})
	if c.told {
		p.t.spawn("transport done", tell)
	}
}

// cancel decides a call that is not over.
func (p *peer) cancel(c *call, why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.over {
		return
	}
	c.over, c.err = true, why
	l := c.link
	if c.sess == nil {
		if i := slices.Index(l.queue, c); i >= 0 {
			l.queue = slices.Delete(l.queue, i, i+1)
		}
		p.settleLater(c)
		return
	}
	// The call stays in pending until the server answers, because of its credit.
	s := c.sess
	s.cancels = append(s.cancels, c.id)
	s.wakeWriter()
	if c.writing {
		_ = s.nc.SetWriteDeadline(time.Now().Add(cancelGrace))
	}
	if c.receiving {
		_ = s.nc.SetReadDeadline(time.Now().Add(cancelGrace))
	}
	p.settleLater(c)
}

// close fails everything.
func (p *peer) close() {
	p.mu.Lock()
	p.mu.closed = true
	var tells []func()
	for _, l := range p.links {
		for _, c := range l.queue {
			c.over, c.err = true, errClosed
		}
		tells = append(tells, p.settle(l.queue))
		l.queue = nil
		if l.sess != nil {
			tells = append(tells, p.endSession(l.sess, errClosed))
		}
	}
	p.mu.Unlock()
	for _, tell := range tells {
		tell()
	}
}
