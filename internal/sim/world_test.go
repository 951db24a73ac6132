package sim

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// play runs producers and consumers over a bounded queue and returns the order
// of what was consumed and the trace.
func play(t *testing.T, seed uint64) ([]int, uint64) {
	w := NewWorld(seed)
	defer w.Close()
	var mu sync.Mutex
	c := w.NewCond(&mu)
	var queue, got []int
	for p := range 3 {
		w.Go("producer", func() {
			for i := range 5 {
				w.Sleep(time.Duration(w.Rand().IntN(5)) * time.Millisecond)
				mu.Lock()
				for len(queue) == 2 {
					c.Wait()
				}
				queue = append(queue, p*10+i)
				c.Broadcast()
				mu.Unlock()
			}
		})
	}
	w.Go("consumer", func() {
		mu.Lock()
		defer mu.Unlock()
		for len(got) < 15 {
			if len(queue) == 0 {
				c.WaitFor(time.Millisecond)
				continue
			}
			got = append(got, queue[0])
			queue = queue[1:]
			w.Trace("got %d", got[len(got)-1])
			c.Broadcast()
		}
	})
	require.NoError(t, w.Run(time.Second, func() bool { return len(got) == 15 }))
	return got, w.TraceHash()
}

func TestEqualSeedsEqualTraces(t *testing.T) {
	orders := make(map[[15]int]bool)
	for seed := range uint64(20) {
		a, ha := play(t, seed)
		b, hb := play(t, seed)
		require.Equal(t, a, b)
		require.Equal(t, ha, hb)
		orders[[15]int(a)] = true
	}
	require.Greater(t, len(orders), 5, "seeds must explore different orders")
}

func TestDeadlockIsReported(t *testing.T) {
	w := NewWorld(1)
	defer w.Close()
	var mu sync.Mutex
	c := w.NewCond(&mu)
	w.Go("stuck", func() {
		mu.Lock()
		defer mu.Unlock()
		c.Wait()
	})
	err := w.Run(time.Minute, func() bool { return false })
	require.ErrorContains(t, err, "stuck")
}

func TestVirtualTime(t *testing.T) {
	w := NewWorld(1)
	defer w.Close()
	var woken, fired bool
	w.AfterFunc(time.Hour, func() { fired = true })
	stopped := w.AfterFunc(time.Hour, func() { t.Error("a stopped timer fired") })
	require.True(t, stopped.Stop())
	require.False(t, stopped.Stop())
	start := w.Now()
	w.Go("sleeper", func() { w.Sleep(2 * time.Hour); woken = true })
	require.NoError(t, w.Run(3*time.Hour, func() bool { return woken }))
	require.True(t, fired)
	require.Equal(t, 2*time.Hour, w.Now()-start)
}
