package sched

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/ids"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCondWakes(t *testing.T) {
	var r Real
	var mu sync.Mutex
	c := r.NewCond(&mu)
	turn := 0
	for i := range 8 {
		r.Go("player", func() {
			mu.Lock()
			defer mu.Unlock()
			for turn != i {
				c.Wait()
			}
			turn++
			c.Broadcast()
		})
	}
	r.Wait()
	require.Equal(t, 8, turn)
}

func TestCondTimesOutAndForgets(t *testing.T) {
	var r Real
	var mu sync.Mutex
	c := r.NewCond(&mu).(*realCond)
	mu.Lock()
	require.False(t, c.WaitFor(time.Millisecond))
	mu.Unlock()
	require.Empty(t, c.mu.waiters, "a waiter that timed out must not swallow a later signal")
}

func TestSignalIsNeverLost(t *testing.T) {
	var r Real
	var mu sync.Mutex
	c := r.NewCond(&mu)
	queued, taken := 0, 0
	const jobs = 2000
	for range 4 {
		r.Go("worker", func() {
			mu.Lock()
			defer mu.Unlock()
			for taken < jobs {
				if queued == 0 {
					c.WaitFor(50 * time.Microsecond)
					continue
				}
				queued--
				taken++
				if taken == jobs {
					c.Broadcast()
				}
			}
		})
	}
	for range jobs {
		mu.Lock()
		queued++
		c.Signal()
		mu.Unlock()
	}
	r.Wait()
	require.Equal(t, jobs, taken)
}

func TestClockAndTimer(t *testing.T) {
	var r Real
	a := r.Now()
	done := make(chan struct{})
	r.AfterFunc(time.Millisecond, func() { close(done) })
	<-done
	require.GreaterOrEqual(t, r.Now()-a, time.Millisecond)
	require.True(t, r.AfterFunc(time.Hour, func() {}).Stop())
}

func TestNewUUIDIsRandomThroughout(t *testing.T) {
	var r Real
	var or ids.UUID
	for range 64 {
		u := NewUUID(&r)
		for i := range u {
			or[i] |= u[i]
		}
	}
	for i, b := range or {
		require.NotZero(t, b, "byte %d is never set", i)
	}
}
