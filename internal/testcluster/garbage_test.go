package testcluster

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// status is the part of `ckptfs status --json` that tests look at.
type status struct {
	Blocks      uint64 `json:"blocks"`
	DeadChunks  uint64 `json:"chunks_to_delete"`
	Orphans     uint64 `json:"orphans"`
	RepairQueue uint64 `json:"repair_queue"`
	Live        uint64 `json:"live_bytes"`
}

func (c *Cluster) status(t *testing.T) status {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), c.Binary("ckptfs"), "status", "--json", "--meta", c.MetaAddrs()).Output()
	require.NoError(t, err)
	var s status
	require.NoError(t, json.Unmarshal(out, &s))
	return s
}

// TestGarbageGoes deletes, overwrites and kills writers, and expects that
// nothing of it stays: a dead block leaves the queue only when every server has
// durably deleted its chunks. (Chunks that no record names are the simulation's
// to find: internal/sim.)
func TestGarbageGoes(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{})
	m := c.Mount("a")
	keep := save(t, m.Path, "keep", 5)
	before := c.status(t)

	save(t, m.Path, "gone", 30)
	big := make([]byte, 20<<20)
	path := filepath.Join(m.Path, "again")
	for range 4 {
		require.NoError(t, os.WriteFile(path, big, 0o644))
	}
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.RemoveAll(filepath.Join(m.Path, "gone")))

	// Blocks that are never committed: the mount dies with them.
	f, err := os.Create(filepath.Join(m.Path, "half"))
	require.NoError(t, err)
	_, err = f.Write(big)
	require.NoError(t, err)
	m.Kill()
	_ = f.Close() // the mount is dead: whatever it says
	m.Up()
	require.NoError(t, os.Remove(filepath.Join(m.Path, "half")))

	require.Eventually(t, func() bool {
		s := c.status(t)
		return s.Blocks == before.Blocks && s.DeadChunks == 0 && s.Orphans == 0 && s.RepairQueue == 0
	}, 2*time.Minute, time.Second, "garbage stays: it was %+v before", before)
	require.Equal(t, before.Live, c.status(t).Live)
	check(t, filepath.Join(m.Path, "keep"), keep)
}
