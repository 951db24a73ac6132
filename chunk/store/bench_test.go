package store

import (
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

// BenchmarkChunk stores chunks of 12 MiB in pieces of 1 MiB from four writers
// at once, and deletes them; STORE_BENCH_DIR chooses the disk. It reports the
// slowest hundredth of seals with their sync, and the CPU time per GiB.
func BenchmarkChunk(b *testing.B) {
	dir := os.Getenv("STORE_BENCH_DIR")
	if dir == "" {
		dir = b.TempDir()
	}
	dir, err := os.MkdirTemp(dir, "store")
	require.NoError(b, err)
	defer func() { require.NoError(b, os.RemoveAll(dir)) }()
	o, err := vfs.NewOS(dir)
	require.NoError(b, err)
	require.NoError(b, Format(o, testIdentity))
	cfg := testConfig(o)
	cfg.SegmentSize, cfg.PoolBytes = 0, 4<<30
	s := openStore(b, cfg)
	const size, piece, writers = 12 << 20, 1 << 20, 4
	data := chunktest.Bytes(chunktest.Key(1, 0), piece)
	sums := chunktest.Sums(data, 16)
	var mu sync.Mutex
	var seals []time.Duration
	one := func(n uint64) {
		h := chunktest.Header(chunktest.Key(n, 0), size)
		require.NoError(b, s.Open(h))
		for off := uint32(0); off < size; off += piece {
			require.NoError(b, s.Put(h.Key, off, data, sums))
		}
		start := time.Now()
		done, err := s.Seal(h.Key, size)
		require.NoError(b, err)
		require.NoError(b, s.Sync(done.Ticket))
		mu.Lock()
		seals = append(seals, time.Since(start))
		mu.Unlock()
		require.NoError(b, s.Delete([]ids.ChunkKey{h.Key}))
	}
	b.SetBytes(size * writers)
	cpu := cpuTime()
	n := uint64(0)
	for b.Loop() {
		var wg sync.WaitGroup
		for range writers {
			n++
			key := n
			wg.Go(func() { one(key) })
		}
		wg.Wait()
		require.NoError(b, s.Maintain())
	}
	slices.Sort(seals)
	b.ReportMetric(float64(seals[len(seals)*99/100].Microseconds()), "µs/seal-p99")
	b.ReportMetric((cpuTime()-cpu).Seconds()*(1<<30)/float64(n*size), "cpu-s/GiB")
	require.NoError(b, s.Close())
}

func cpuTime() time.Duration {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
