package store

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// steps is a scheduler whose clock and random numbers are the test's.
type steps struct {
	sched.Real
	mu struct {
		sync.Mutex
		now  time.Duration
		next uint64
	}
}

func (s *steps) Now() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.now
}

func (s *steps) advance(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.now += d
}

func (s *steps) Uint64() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.next++
	return s.mu.next * 0x9e3779b97f4a7c15
}

var testIdentity = Identity{Disk: ids.UUID{1, 2, 3}, Server: ids.UUID{4}, Cluster: ids.UUID{5}, DiskID: 6, ServerID: 7}

// testConfig is a small disk: segments of 1 MiB, nothing kept in reserve.
func testConfig(f vfs.FS) Config {
	return Config{
		FS: f, Sched: &steps{}, Log: slog.New(slog.DiscardHandler),
		SegmentSize: 1 << 20, PoolBytes: 2 << 20, ReserveBytes: 64 << 10,
	}
}

func newMem(t require.TestingT, capacity int64) *vfs.Mem {
	m := vfs.NewMem()
	m.SetCapacity(capacity)
	require.NoError(t, Format(m, testIdentity))
	return m
}

func openStore(t require.TestingT, cfg Config) *Store {
	s, err := Open(cfg)
	require.NoError(t, err)
	return s
}

func TestContractMem(t *testing.T) {
	chunktest.Run(t, func(t *testing.T) chunk.Store {
		s := openStore(t, testConfig(newMem(t, 256<<20)))
		t.Cleanup(func() {
			require.NoError(t, s.Check())
			require.NoError(t, s.Close())
			require.NoError(t, s.Close())
		})
		return s
	})
}

func TestContractOS(t *testing.T) {
	chunktest.Run(t, func(t *testing.T) chunk.Store {
		o, err := vfs.NewOS(t.TempDir())
		require.NoError(t, err)
		require.NoError(t, Format(o, testIdentity))
		cfg := testConfig(o)
		cfg.SegmentSize = 8 << 20
		s := openStore(t, cfg)
		t.Cleanup(func() {
			require.NoError(t, s.Check())
			require.NoError(t, s.Close())
		})
		return s
	})
}
