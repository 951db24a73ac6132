package testcluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// save writes files of several sizes, fsynced, below dir/name and returns their seeds.
func save(t *testing.T, dir, name string, n int) []uint64 {
	t.Helper()
	dir = filepath.Join(dir, name)
	require.NoError(t, os.Mkdir(dir, 0o755))
	var seeds []uint64
	for i := range n {
		seed := uint64(len(name)*1000 + i)
		require.True(t, writeFile(filepath.Join(dir, fileName(seed)), content(seed)), "a save must succeed")
		seeds = append(seeds, seed)
	}
	return seeds
}

// fresh mounts anew, so that nothing is in memory, and checks what was saved.
func (c *Cluster) fresh(t *testing.T, mount, name string, seeds []uint64) {
	t.Helper()
	m := c.Mount(mount)
	check(t, filepath.Join(m.Path, name), seeds)
	m.Terminate()
}

func TestTwoServersDead(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{})
	m := c.Mount("a")
	healthy := save(t, m.Path, "healthy", 40)
	c.Chunks[0].Kill()
	oneDead := save(t, m.Path, "onedead", 20)
	c.Chunks[1].Kill()
	c.fresh(t, "b", "healthy", healthy)
	twoDead := save(t, m.Path, "twodead", 20)
	c.fresh(t, "c", "twodead", twoDead)
	c.fresh(t, "d", "onedead", oneDead)
	for _, p := range c.Chunks[:2] {
		p.Start()
		p.WaitFor("chunk server ready")
	}
	// What was saved meanwhile survives the loss of two others.
	c.Chunks[2].Kill()
	c.Chunks[3].Kill()
	c.fresh(t, "e", "healthy", healthy)
	c.fresh(t, "f", "onedead", oneDead)
	c.fresh(t, "g", "twodead", twoDead)
}

func TestTooManyServersDeadIsAClearError(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{})
	m := c.Mount("a", "--op-timeout", "5s")
	seeds := save(t, m.Path, "before", 5)
	for _, p := range c.Chunks[:4] {
		p.Kill()
	}
	path := filepath.Join(m.Path, "after")
	f, err := os.Create(path)
	require.NoError(t, err)
	_, err = f.Write(make([]byte, 8<<20))
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	require.Error(t, err, "eight MiB cannot be stored on two servers")
	for _, p := range c.Chunks[:4] {
		p.Start()
		p.WaitFor("chunk server ready")
	}
	require.Eventually(t, func() bool { return writeFile(path, content(1)) }, startBound, 200*time.Millisecond, "saving works again by itself")
	check(t, filepath.Join(m.Path, "before"), seeds)
}

func TestThreeVotersSurviveTheLeader(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{Metas: 3})
	m := c.Mount("a")
	var acked []uint64
	for round := range 3 {
		stop := load(t, m.Path, 3)
		leader := c.leader(t, m)
		c.Metas[leader].Kill()
		fresh := stop()
		require.NotEmpty(t, save(t, m.Path, "round"+strings.Repeat("x", round+1), 3), "saving goes on with two of three")
		check(t, m.Path, fresh)
		acked = append(acked, fresh...)
		c.Metas[leader].Start()
	}
	check(t, c.Mount("b").Path, acked)
}

// leader asks the cluster who leads.
func (c *Cluster) leader(t *testing.T, m *MountProcess) int {
	t.Helper()
	leader := -1
	require.Eventually(t, func() bool {
		out, err := exec.CommandContext(t.Context(), c.Binary("ckptfs"), "status", m.Path).CombinedOutput()
		if err != nil {
			return false
		}
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) == 3 && f[2] == "leader" {
				leader = int(f[0][0] - '1')
			}
		}
		return leader >= 0
	}, startBound, 100*time.Millisecond)
	return leader
}

// TestTerminateIsClean ends every process by SIGTERM: each drains, says nothing
// of a failure and exits with 0.
func TestTerminateIsClean(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{Disks: 3, Layout: "rs-2-1"})
	m := c.Mount("a")
	seeds := save(t, m.Path, "kept", 3)
	for _, p := range append([]*Process{m.Process}, append(c.Chunks, c.Metas...)...) {
		state := p.Terminate()
		require.Zero(t, state.ExitCode(), "%s:\n%s", p.name, p.Log())
	}
	for _, p := range append(append([]*Process{}, c.Metas...), c.Chunks...) {
		p.Start()
	}
	c.fresh(t, "b", "kept", seeds)
}
