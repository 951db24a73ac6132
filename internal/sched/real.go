package sched

import (
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Real runs tasks as plain goroutines on the machine's clock. Its zero value
// is ready; Wait ends when every task started by Go has ended.
type Real struct{ tasks sync.WaitGroup }

// Now reads CLOCK_BOOTTIME.
func (*Real) Now() time.Duration {
	var ts unix.Timespec
	// The call cannot fail on a kernel that has FUSE.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}

// Wall reads the time of day.
func (*Real) Wall() time.Time { return time.Now() }

// Go starts fn in a goroutine.
func (r *Real) Go(_ string, fn func()) { r.tasks.Go(fn) }

// Wait returns when all tasks have ended.
func (r *Real) Wait() { r.tasks.Wait() }

// AfterFunc runs fn in a goroutine after d.
func (*Real) AfterFunc(d time.Duration, fn func()) Timer { return time.AfterFunc(d, fn) }

// Uint64 returns a random number.
func (*Real) Uint64() uint64 { return rand.Uint64() }

// NewCond returns a condition variable whose waits can be bounded.
func (*Real) NewCond(l sync.Locker) Cond { return &realCond{lock: l} }

// realCond keeps its waiters as channels, because sync.Cond has no bounded
// wait. The list is guarded by the condition's own lock except that Signal and
// Broadcast may, as with sync.Cond, be called without it.
type realCond struct {
	lock sync.Locker
	mu   struct {
		sync.Mutex
		waiters []chan struct{}
	}
}

func (c *realCond) add() chan struct{} {
	ch := make(chan struct{}, 1)
	c.mu.Lock()
	c.mu.waiters = append(c.mu.waiters, ch)
	c.mu.Unlock()
	return ch
}

// Wait blocks until woken.
func (c *realCond) Wait() {
	ch := c.add()
	c.lock.Unlock()
	<-ch
	c.lock.Lock()
}

// WaitFor blocks until woken or d has passed.
func (c *realCond) WaitFor(d time.Duration) bool {
	ch := c.add()
	c.lock.Unlock()
	t := time.NewTimer(d)
	woken := true
	select {
	case <-ch:
	case <-t.C:
		woken = c.remove(ch)
	}
	t.Stop()
	c.lock.Lock()
	return woken
}

// remove forgets a waiter that timed out; true when it was woken meanwhile.
func (c *realCond) remove(ch chan struct{}) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, w := range c.mu.waiters {
		if w == ch {
			c.mu.waiters = append(c.mu.waiters[:i], c.mu.waiters[i+1:]...)
			return false
		}
	}
	return true
}

// Signal wakes the longest waiter.
func (c *realCond) Signal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.waiters) > 0 {
		c.mu.waiters[0] <- struct{}{}
		c.mu.waiters = append(c.mu.waiters[:0], c.mu.waiters[1:]...)
	}
}

// Broadcast wakes all waiters.
func (c *realCond) Broadcast() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.mu.waiters {
		w <- struct{}{}
	}
	c.mu.waiters = c.mu.waiters[:0]
}
