package client

import (
	"context"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// peer is where a disk is served.
type peer struct {
	disk   ids.DiskID
	server ids.ServerID
	addr   string
	host   string
}

// reply is the outcome of a request: err is nil only for status OK.
type reply struct {
	*wire.Response
	err  error
	took time.Duration
}

// busyDelay is how long the server asks to wait, within sane bounds.
func (r *reply) busyDelay() time.Duration {
	d := 10 * time.Millisecond
	if r.Response != nil {
		if g, ok := r.Body.(*wire.Grant); ok && g.RetryAfter > 0 {
			d = time.Duration(g.RetryAfter) * time.Millisecond
		}
	}
	return min(max(d, time.Millisecond), time.Second)
}

// transient reports whether the same request may succeed later.
func transient(err error) bool {
	switch errkind.Of(err) {
	case errkind.Unavailable, errkind.Timeout, errkind.Busy, errkind.Interrupted:
		return true
	}
	return false
}

// send is Transport.Send with a time-out, a measured duration, and the news
// about the server passed on to the health table. done gets a reply whose err
// wraps Timeout when the time-out ended the request.
func (c *Client) send(p peer, req *wire.Request, timeout time.Duration, done func(reply)) (cancel func()) {
	s := &sending{}
	start := c.sched.Now()
	req.Left = timeout
	stop := c.cfg.Transport.Send(p.addr, req, func(resp *wire.Response, err error) {
		r := reply{Response: resp, err: err, took: c.sched.Now() - start}
		timedOut := s.finish()
		switch {
		case timedOut:
			r.Response = nil
			r.err = errkind.Timeout.Wrap("%s to disk %d at %s: no answer in %s", req.Op, p.disk, p.addr, timeout)
		case err == nil && resp != nil:
			c.health.observe(p.server, resp.QueueDelay)
			r.err = resp.Err()
		case err == nil:
			r.err = errkind.Internal.Wrap("%s to disk %d at %s: empty reply", req.Op, p.disk, p.addr)
		case errkind.Of(err) == errkind.Unavailable && !s.wasCancelled():
			c.health.probe(p)
		}
		done(r)
	})
	s.arm(c.sched, timeout, stop)
	return func() { s.cancel(stop) }
}

// sending is the state of one request.
type sending struct {
	mu struct {
		sync.Mutex
		done, timedOut, cancelled bool
		timer                     sched.Timer
	}
}

func (s *sending) arm(sc sched.Sched, d time.Duration, stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.done {
		return
	}
	s.mu.timer = sc.AfterFunc(d, func() {
		s.mu.Lock()
		fire := !s.mu.done
		s.mu.timedOut = fire
		s.mu.Unlock()
		if fire {
			stop()
		}
	})
}

func (s *sending) finish() (timedOut bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.done = true
	if s.mu.timer != nil {
		s.mu.timer.Stop()
	}
	return s.mu.timedOut
}

func (s *sending) cancel(stop func()) {
	s.mu.Lock()
	s.mu.cancelled = true
	s.mu.Unlock()
	stop()
}

func (s *sending) wasCancelled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.cancelled
}

// call is send and wait. When ctx ends the request is cancelled, and call
// returns once the transport has let go of it.
func (c *Client) call(ctx context.Context, p peer, req *wire.Request, timeout time.Duration) (*wire.Response, error) {
	var w struct {
		sync.Mutex
		got *reply
	}
	cond := c.sched.NewCond(&w)
	defer wake(ctx, &w, cond)()
	cancel := c.send(p, req, timeout, func(r reply) {
		w.Lock()
		defer w.Unlock()
		w.got = &r
		cond.Broadcast()
	})
	w.Lock()
	defer w.Unlock()
	for cancelled := false; w.got == nil; cond.Wait() {
		if ctx.Err() != nil && !cancelled {
			cancelled = true
			w.Unlock()
			cancel()
			w.Lock()
			if w.got != nil {
				break
			}
		}
	}
	if w.got.err != nil {
		if err := ended(ctx, req.Op.String()); err != nil {
			return nil, err
		}
		return nil, w.got.err
	}
	return w.got.Response, nil
}

// forget tells a server to drop an open chunk; nobody waits for the answer. It
// must not be used once a seal of the chunk may have been sent.
func (c *Client) forget(p peer, key ids.ChunkKey) {
	c.send(p, &wire.Request{Op: wire.OpAbort, Class: wire.ClassBackground, Body: &wire.ChunkRef{Disk: p.disk, Key: key}}, 5*time.Second, func(reply) {})
}
