package testcluster

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	rounds = flag.Int("rounds", 50, "rounds of killing")
	seed   = flag.Uint64("seed", 0, "seed of the rounds; 0: from the clock")
)

func TestMain(m *testing.M) {
	code := m.Run()
	RemovePrograms()
	os.Exit(code)
}

// ledger knows every file that was acknowledged by fsync, and nothing else.
type ledger struct {
	mu struct {
		sync.Mutex
		acked map[string]uint64 // name → content seed
	}
}

// content is the bytes of a file: 1 byte to 3 MiB, the length from the seed too.
func content(seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 7))
	n := 1 + rng.IntN(1<<rng.IntN(22)) // small ones are likely
	p := make([]byte, (n+7)&^7)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], rng.Uint64())
	}
	return p[:n]
}

// write makes one file and acknowledges it when fsync said so. Errors are
// allowed: something is being killed.
func (l *ledger) write(dir string, seed uint64) {
	name := fmt.Sprintf("f%016x", seed)
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return
	}
	defer f.Close()
	if _, err := f.Write(content(seed)); err != nil {
		return
	}
	if f.Sync() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.acked[name] = seed
}

// check reads every acknowledged file back.
func (l *ledger) check(t *testing.T, dir string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, seed := range l.mu.acked {
		got, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err, "an fsynced file must be readable")
		require.True(t, bytes.Equal(content(seed), got), "%s: %d bytes, want %d, or other bytes", name, len(got), len(content(seed)))
	}
}

// TestKillAnyProcessLosesNothingFsynced kills one process at a random moment of
// a write load, restarts it, and reads back everything that was fsynced.
func TestKillAnyProcessLosesNothingFsynced(t *testing.T) {
	NeedMount(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	c := New(t, Config{})
	m := c.Mount("a")
	var l ledger
	l.mu.acked = make(map[string]uint64)
	for round := range *rounds {
		stop := make(chan struct{})
		var writers sync.WaitGroup
		for range 4 {
			r := rand.New(rand.NewPCG(rng.Uint64(), 2))
			writers.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						l.write(m.Path, r.Uint64())
					}
				}
			})
		}
		time.Sleep(time.Duration(rng.IntN(400)) * time.Millisecond)
		switch victim := rng.IntN(len(c.Chunks) + 2); victim {
		case len(c.Chunks):
			c.Metas[0].Kill()
			c.Metas[0].Start()
		case len(c.Chunks) + 1:
			m.Kill()
			close(stop)
			writers.Wait()
			m.Up()
		default:
			c.Chunks[victim].Kill()
			c.Chunks[victim].Start()
			c.Chunks[victim].WaitFor("chunk server ready")
		}
		select {
		case <-stop:
		default:
			close(stop)
			writers.Wait()
		}
		if round%5 == 4 || round == *rounds-1 {
			l.check(t, m.Path)
		}
	}
	// A new mount has nothing in memory.
	l.check(t, c.Mount("b").Path)
	require.NotEmpty(t, l.mu.acked)
	t.Logf("%d files acknowledged and read back", len(l.mu.acked))
}
