// Package sched is the seam for time and concurrency. Code that uses it runs
// on plain goroutines in production, and one task at a time, chosen by a seed,
// in the simulation.
//
// The rule that makes both work: a sync.Mutex may be held across anything but
// a wait of this package (Cond.Wait releases its own). Then in the simulation,
// where tasks switch only at waits, a plain mutex is never contended.
package sched

import (
	"sync"
	"time"
)

// Sched starts, times and blocks tasks.
type Sched interface {
	// Now is monotonic and counts time in which the machine was suspended
	// (CLOCK_BOOTTIME), from an arbitrary start.
	Now() time.Duration
	// Wall is the time of day, for file times only.
	Wall() time.Time
	// Go starts a task; name shows in traces.
	Go(name string, fn func())
	// NewCond returns a condition variable over l.
	NewCond(l sync.Locker) Cond
	// AfterFunc runs fn in a task of its own after d.
	AfterFunc(d time.Duration, fn func()) Timer
	// Uint64 returns a random number: from the seed in the simulation.
	Uint64() uint64
}

// Cond is a condition variable with a bounded wait. Wait and WaitFor are
// called with the lock held, release it while waiting and hold it on return.
// As with sync.Cond the caller loops on its condition.
type Cond interface {
	Wait()
	// WaitFor waits at most d and reports whether it was woken in time.
	WaitFor(d time.Duration) bool
	Signal()
	Broadcast()
}

// Timer is a pending AfterFunc.
type Timer interface {
	// Stop reports whether it kept the function from running.
	Stop() bool
}
