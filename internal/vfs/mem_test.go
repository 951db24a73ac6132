package vfs_test

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/vfs"
)

func pages(fill byte, n int) []byte { return bytes.Repeat([]byte{fill}, n*vfs.PageSize) }

func readBack(t require.TestingT, m *vfs.Mem, name string) []byte {
	file, err := m.Open(name)
	require.NoError(t, err)
	return content(t, file)
}

func TestCrashLosesWhatIsNotSynced(t *testing.T) {
	m := vfs.NewMem()
	file := create(t, m, "a", pages(1, 3))
	require.NoError(t, file.Sync())
	require.NoError(t, m.SyncDir("."))
	_, err := file.WriteAt(pages(2, 3), vfs.PageSize)
	require.NoError(t, err)
	create(t, m, "b", pages(9, 1))

	c := m.CrashClone(nil)
	require.Equal(t, pages(1, 3), readBack(t, c, "a"))
	_, err = c.Open("b")
	require.ErrorIs(t, err, fs.ErrNotExist)
	// The original goes on as if nothing had happened.
	require.Len(t, content(t, file), 4*vfs.PageSize)

	m.Crash(nil)
	_, err = file.WriteAt([]byte{1}, 0)
	require.ErrorIs(t, err, fs.ErrClosed)
	require.Equal(t, pages(1, 3), readBack(t, m, "a"))
}

// TestCrashKeepsAnySubset checks that each page is old, new or a mix of their
// sectors, and that over many crashes every outcome is met.
func TestCrashKeepsAnySubset(t *testing.T) {
	m := vfs.NewMem()
	file := create(t, m, "a", pages(1, 4))
	require.NoError(t, file.Sync())
	require.NoError(t, m.SyncDir("."))
	_, err := file.WriteAt(pages(2, 4), 0)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	seen := map[string]bool{}
	for range 200 {
		got := readBack(t, m.CrashClone(rng), "a")
		require.Len(t, got, 4*vfs.PageSize)
		for p := range 4 {
			page := got[p*vfs.PageSize : (p+1)*vfs.PageSize]
			ones := bytes.Count(page, []byte{1})
			require.Equal(t, vfs.PageSize, ones+bytes.Count(page, []byte{2}))
			require.Zero(t, ones%512)
			switch ones {
			case 0:
				seen["kept"] = true
			case vfs.PageSize:
				seen["lost"] = true
			default:
				seen["torn"] = true
			}
		}
	}
	require.Equal(t, map[string]bool{"kept": true, "lost": true, "torn": true}, seen)
}

func TestCrashRenameIsAtomic(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	seen := map[string]bool{}
	for range 50 {
		m := vfs.NewMem()
		require.NoError(t, create(t, m, "a", []byte("old")).Sync())
		require.NoError(t, m.SyncDir("."))
		file := create(t, m, "tmp", []byte("new"))
		require.NoError(t, file.Sync())
		require.NoError(t, m.Rename("tmp", "a"))
		seen[string(readBack(t, m.CrashClone(rng), "a"))] = true
		require.NoError(t, m.SyncDir("."))
		require.Equal(t, "new", string(readBack(t, m.CrashClone(rng), "a")))
	}
	require.Equal(t, map[string]bool{"old": true, "new": true}, seen)
}

func TestFailedSyncIsNotRepeated(t *testing.T) {
	m := vfs.NewMem()
	file := create(t, m, "a", pages(1, 1))
	require.NoError(t, file.Sync())
	require.NoError(t, m.SyncDir("."))
	_, err := file.WriteAt(pages(2, 1), 0)
	require.NoError(t, err)
	m.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpSync {
			return syscall.EIO
		}
		return nil
	})
	require.ErrorIs(t, file.Sync(), syscall.EIO)
	m.SetHook(nil)
	require.NoError(t, file.Sync(), "the second sync hides the loss, as on Linux")
	require.Equal(t, pages(1, 1), readBack(t, m.CrashClone(rand.New(rand.NewPCG(5, 6))), "a"))
}

func TestCapacity(t *testing.T) {
	m := vfs.NewMem()
	m.SetCapacity(4 * vfs.PageSize)
	file := create(t, m, "a", pages(1, 2))
	require.NoError(t, file.Allocate(0, 4*vfs.PageSize))
	require.ErrorIs(t, file.Allocate(0, 5*vfs.PageSize), syscall.ENOSPC)
	_, err := file.WriteAt(pages(1, 1), 4*vfs.PageSize)
	require.ErrorIs(t, err, syscall.ENOSPC)
	_, err = file.WriteAt(pages(1, 1), 3*vfs.PageSize)
	require.NoError(t, err, "allocated space is there")
	require.NoError(t, file.Punch(0, 2*vfs.PageSize))
	_, free, err := m.Space()
	require.NoError(t, err)
	require.Equal(t, uint64(2*vfs.PageSize), free)
	require.NoError(t, m.Remove("a"))
	require.NoError(t, file.Close())
	_, free, err = m.Space()
	require.NoError(t, err)
	require.Equal(t, uint64(4*vfs.PageSize), free)
}

func TestReadOnlyAndHook(t *testing.T) {
	m := vfs.NewMem()
	file := create(t, m, "a", pages(1, 1))
	m.SetReadOnly(true)
	_, err := file.WriteAt([]byte{2}, 0)
	require.ErrorIs(t, err, syscall.EROFS)
	_, err = m.Create("b")
	require.ErrorIs(t, err, syscall.EROFS)
	require.ErrorIs(t, m.MkdirAll("d"), syscall.EROFS)
	require.Equal(t, pages(1, 1), readBack(t, m, "a"))
	m.SetReadOnly(false)

	broken := errors.New("bad sector")
	m.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpRead && c.Name == "a" && c.Off < 10 {
			return broken
		}
		return nil
	})
	_, err = file.ReadAt(make([]byte, 4), 0)
	require.ErrorIs(t, err, broken)
	_, err = file.ReadAt(make([]byte, 4), 10)
	require.NoError(t, err)
}

func TestFlip(t *testing.T) {
	m := vfs.NewMem()
	create(t, m, "a", pages(0, 1))
	require.True(t, m.Flip("a", 7, 3))
	require.False(t, m.Flip("a", 10*vfs.PageSize, 0))
	require.Equal(t, byte(8), readBack(t, m, "a")[7])
}

// TestSyncedSurvives is the one promise of Sync: what was there when it
// returned is there after any crash, unless it was overwritten since.
func TestSyncedSurvives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := vfs.NewMem()
		file := create(t, m, "f", nil)
		require.NoError(t, m.SyncDir("."))
		var synced []byte
		t.Repeat(map[string]func(*rapid.T){
			"writeAndSync": func(t *rapid.T) {
				p := pages(rapid.Byte().Draw(t, "b"), rapid.IntRange(1, 3).Draw(t, "n"))
				_, err := file.WriteAt(p, int64(rapid.IntRange(0, 5*vfs.PageSize).Draw(t, "off")))
				require.NoError(t, err)
				require.NoError(t, file.Sync())
				synced = content(t, file)
			},
			"append": func(t *rapid.T) {
				_, err := file.WriteAt([]byte{1}, int64(len(synced)/vfs.PageSize+1)*vfs.PageSize)
				require.NoError(t, err)
			},
			"crash": func(t *rapid.T) {
				m.Crash(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)))
				var err error
				file, err = m.Open("f")
				require.NoError(t, err)
				require.True(t, bytes.HasPrefix(content(t, file), synced))
			},
		})
	})
}
