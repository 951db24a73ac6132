package testcluster

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// leaseTime is longer than it takes until a mount that only reads is granted a
// lease after another's change, so that its kernel caches too.
const leaseTime = 2500 * time.Millisecond

// TestOtherMountSeesAtOnce changes things on one mount while the other has
// cached them, and asks the other as soon as the change has returned.
func TestOtherMountSeesAtOnce(t *testing.T) {
	NeedMount(t)
	c := New(t, Config{})
	a, b := c.Mount("a").Path, c.Mount("b").Path
	for round := range 40 {
		if round%8 == 0 {
			warm(t, b)
		}
		changes(t, a, b, round)
		a, b = b, a
	}
}

// warm looks at everything on a mount until it may cache it.
func warm(t *testing.T, dir string) {
	t.Helper()
	for end := time.Now().Add(leaseTime); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		list, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range list {
			_, err := os.Stat(filepath.Join(dir, e.Name()))
			require.NoError(t, err)
		}
	}
}

func changes(t *testing.T, a, b string, round int) {
	t.Helper()
	name := fmt.Sprintf("f%d", round%3)
	onA, onB := filepath.Join(a, name), filepath.Join(b, name)
	look := func() os.FileInfo {
		t.Helper()
		st, err := os.Stat(onB)
		require.NoError(t, err)
		return st
	}
	require.NoError(t, os.WriteFile(onA, []byte(fmt.Sprint(round)), 0o644))
	got, err := os.ReadFile(onB)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(round), string(got))
	look()
	require.NoError(t, os.Chmod(onA, 0o600))
	require.Equal(t, os.FileMode(0o600), look().Mode().Perm())
	require.NoError(t, os.Truncate(onA, 12345))
	require.EqualValues(t, 12345, look().Size())
	require.NoError(t, os.Rename(onA, onA+".moved"))
	_, err = os.Stat(onB)
	require.ErrorIs(t, err, os.ErrNotExist)
	onA, onB = onA+".moved", onB+".moved"
	look()
	require.NoError(t, os.Link(onA, onA+".link"))
	_, err = os.Stat(onB + ".link")
	require.NoError(t, err)
	require.NoError(t, os.Remove(onA))
	_, err = os.Stat(onB)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.Remove(onB+".link"))
	_, err = os.Stat(onA + ".link")
	require.ErrorIs(t, err, os.ErrNotExist, "the mount that made it must not remember it")
}
