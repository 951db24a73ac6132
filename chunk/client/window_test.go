package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

func TestWindowServesInOrder(t *testing.T) {
	s := &sched.Real{}
	w := newWindow(&Client{sched: s}, 10)
	require.NoError(t, w.acquire(context.Background(), 8))
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	got := make(chan int, 3)
	queued := func(n int) func() bool {
		return func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.mu.queue) == n
		}
	}
	wait := func(ctx context.Context, i int, n int64) {
		s.Go("wait", func() {
			if err := w.acquire(ctx, n); err != nil {
				i = -1
			}
			got <- i
		})
		require.Eventually(t, queued(i), 10*time.Second, time.Millisecond)
	}
	wait(ctx, 1, 10)
	wait(context.Background(), 2, 5)
	wait(context.Background(), 3, 2)
	require.False(t, w.try(1), "nobody passes those who wait")
	require.Empty(t, got, "a small one does not pass a large one")
	stop()
	require.Equal(t, -1, <-got)
	// The third fits with what is taken, but the second came first.
	require.Eventually(t, queued(2), 10*time.Second, time.Millisecond)
	w.release(8)
	require.ElementsMatch(t, []int{2, 3}, []int{<-got, <-got})
	require.EqualValues(t, 7, w.mu.used)
	require.NoError(t, w.acquire(context.Background(), 3))
	require.Equal(t, errkind.Interrupted, errkind.Of(w.acquire(ctx, 1)))
	s.Wait()
}
