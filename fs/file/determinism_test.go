package file_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/sim"
)

// runWorld does the same work in a world of the seed and returns its trace.
func runWorld(t *testing.T, seed uint64) uint64 {
	world := sim.NewWorld(seed)
	defer world.Close()
	blocks := newBlocks(world)
	blocks.faults = faults{refuse: 10, deny: 10, narrow: 30, maxDelay: 20 * time.Millisecond}
	s := newSession(t, newService(t, world), 1)
	e := newEngine(s, blocks, world, 4<<20)
	left := 6
	var failed error
	for i := range left {
		attr := s.create(t, string(rune('a'+i)))
		world.Go("writer", func() {
			h := e.OpenCreated(attr, file.OpenFlags{Write: true})
			for k := range 8 {
				off := int64(k*200_000) + int64(i%2*k%3*4096)
				if _, err := h.WriteAt(ctx, random(uint64(k), 200_000), off, file.WriteFlags{}); err != nil {
					failed = err
				}
			}
			if err := h.Flush(ctx); err != nil {
				failed = err
			}
			if _, err := readAll(h, 2_000_000); err != nil {
				failed = err
			}
			h.Release()
			if left--; left == 0 {
				failed = e.Close(ctx)
				left--
			}
		})
	}
	require.NoError(t, world.Run(time.Hour, func() bool { return left < 0 }))
	require.NoError(t, failed)
	return world.TraceHash()
}

func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	traces := map[uint64]bool{}
	for seed := range uint64(5) {
		first := runWorld(t, seed)
		for range 3 {
			require.Equal(t, first, runWorld(t, seed))
		}
		traces[first] = true
	}
	require.Len(t, traces, 5, "different seeds run differently")
}
