package testcluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	rounds = flag.Int("rounds", 50, "rounds of killing")
	seed   = flag.Uint64("seed", 0, "seed of the rounds; 0: from the clock")
)

// writerEnv makes the test binary a writer on that directory. Writers are
// processes of their own: a process with open files on a mount cannot start a
// server that the mount waits for, because its child closes them at exec.
const writerEnv = "CKPTFS_TEST_WRITER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerEnv); dir != "" {
		writer(dir)
		return
	}
	code := m.Run()
	RemovePrograms()
	os.Exit(code)
}

// content is the bytes of a file: 1 byte to 4 MiB, the length from the seed too.
func content(seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 7))
	n := 1 + rng.IntN(1<<rng.IntN(23)) // small ones are likely
	p := make([]byte, (n+7)&^7)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], rng.Uint64())
	}
	return p[:n]
}

func fileName(seed uint64) string { return fmt.Sprintf("f%016x", seed) }

// writer writes files until its input ends, and prints the seed of each that
// fsync acknowledged. Errors are allowed: something is being killed.
func writer(dir string) {
	end := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // whatever ends it
		close(end)
	}()
	for {
		select {
		case <-end:
			return
		default:
		}
		seed := rand.Uint64()
		if writeFile(filepath.Join(dir, fileName(seed)), content(seed)) {
			fmt.Println(seed)
		} else {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func writeFile(path string, p []byte) (acked bool) {
	f, err := os.Create(path)
	if err != nil {
		return false
	}
	defer f.Close()
	_, err = f.Write(p)
	return err == nil && f.Sync() == nil
}

// load runs writers on dir; the returned function stops them and returns the
// seeds of what was acknowledged.
func load(t *testing.T, dir string, n int) (stop func() []uint64) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	var mu sync.Mutex
	var acked []uint64
	var all sync.WaitGroup
	var ends []io.Closer
	for range n {
		cmd := exec.CommandContext(context.Background(), self)
		cmd.Env = append(os.Environ(), writerEnv+"="+dir)
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		ends = append(ends, in)
		all.Go(func() {
			for s := bufio.NewScanner(out); s.Scan(); {
				if seed, err := strconv.ParseUint(s.Text(), 10, 64); err == nil {
					mu.Lock()
					acked = append(acked, seed)
					mu.Unlock()
				}
			}
			_ = cmd.Wait() // a writer has no errors of its own
		})
	}
	return func() []uint64 {
		for _, in := range ends {
			_ = in.Close()
		}
		all.Wait()
		return acked
	}
}

// check reads every acknowledged file back.
func check(t *testing.T, dir string, acked []uint64) {
	t.Helper()
	for _, seed := range acked {
		got, err := os.ReadFile(filepath.Join(dir, fileName(seed)))
		require.NoError(t, err, "an fsynced file must be readable")
		want := content(seed)
		require.True(t, bytes.Equal(want, got), "%s: %d bytes, want %d, or other bytes", fileName(seed), len(got), len(want))
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
	// A directory of the file system: while the mount is replaced, the mount
	// point itself is for a moment a directory of the machine's.
	dir := filepath.Join(m.Path, "work")
	require.NoError(t, os.Mkdir(dir, 0o755))
	var acked []uint64
	for round := range *rounds {
		stop := load(t, dir, 4)
		time.Sleep(time.Duration(100+rng.IntN(500)) * time.Millisecond)
		switch victim := rng.IntN(len(c.Chunks) + 2); victim {
		case len(c.Chunks):
			c.Metas[0].Kill()
			c.Metas[0].Start()
		case len(c.Chunks) + 1:
			m.Kill()
			m.Up()
		default:
			c.Chunks[victim].Kill()
			c.Chunks[victim].Start()
			c.Chunks[victim].WaitFor("chunk server ready")
		}
		fresh := stop()
		check(t, dir, fresh)
		acked = append(acked, fresh...)
		t.Logf("round %d: %d files acknowledged", round, len(fresh))
	}
	// A new mount has nothing in memory.
	check(t, filepath.Join(c.Mount("b").Path, "work"), acked)
	require.NotEmpty(t, acked)
}
