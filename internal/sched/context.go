package sched

import (
	"context"
	"slices"
	"sync"
	"time"
)

// AfterFunc is context.AfterFunc, except that a context with a method of that
// name (those of this package) runs fn itself: in the simulation nothing may
// run in a goroutine that the scheduler does not know.
func AfterFunc(ctx context.Context, fn func()) (stop func() bool) {
	// First, because Done may cost such a context more than AfterFunc does.
	if a, ok := ctx.(interface {
		AfterFunc(fn func()) (stop func() bool)
	}); ok {
		return a.AfterFunc(fn)
	}
	if ctx.Done() == nil {
		return func() bool { return true }
	}
	return context.AfterFunc(ctx, fn)
}

// WithTimeout returns a context that ends with parent, by cancel, or after d
// on the clock of s. What waits for its end through AfterFunc runs in a task of
// s. Cancel releases what the context holds; it may be called more than once.
func WithTimeout(parent context.Context, s Sched, d time.Duration) (ctx context.Context, cancel context.CancelFunc) {
	c, release := newContext(parent, s)
	t := s.AfterFunc(d, func() { c.end(context.DeadlineExceeded) })
	return c, func() {
		t.Stop()
		release()
	}
}

// WithCancel is WithTimeout without a time.
func WithCancel(parent context.Context, s Sched) (ctx context.Context, cancel context.CancelFunc) {
	return newContext(parent, s)
}

func newContext(parent context.Context, s Sched) (*timed, context.CancelFunc) {
	c := &timed{Context: parent, sched: s, done: make(chan struct{})}
	if err := parent.Err(); err != nil {
		c.end(err)
		return c, func() {}
	}
	stop := AfterFunc(parent, func() { c.end(parent.Err()) })
	return c, func() {
		stop()
		c.end(context.Canceled)
	}
}

// timed is a context of this package: parent's but for its end.
type timed struct {
	context.Context
	sched Sched
	done  chan struct{}
	mu    struct {
		sync.Mutex
		err   error
		waits []*func()
	}
}

// Done is closed at the end.
func (c *timed) Done() <-chan struct{} { return c.done }

// Err is nil before the end.
func (c *timed) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.err
}

// AfterFunc runs fn in a task once the context has ended.
func (c *timed) AfterFunc(fn func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		c.sched.Go("context end", fn)
		return func() bool { return false }
	}
	w := &fn
	c.mu.waits = append(c.mu.waits, w)
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.Index(c.mu.waits, w)
		if i < 0 {
			return false
		}
		c.mu.waits = slices.Delete(c.mu.waits, i, i+1)
		return true
	}
}

func (c *timed) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return
	}
	c.mu.err = err
	close(c.done)
	for _, w := range c.mu.waits {
		c.sched.Go("context end", *w)
	}
	c.mu.waits = nil
}
