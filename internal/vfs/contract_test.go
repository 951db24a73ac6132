package vfs_test

import (
	"bytes"
	"io"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// both runs a test over the machine's file system and over Mem.
func both(t *testing.T, test func(t *testing.T, f vfs.FS)) {
	t.Run("OS", func(t *testing.T) {
		o, err := vfs.NewOS(t.TempDir())
		require.NoError(t, err)
		test(t, o)
	})
	t.Run("Mem", func(t *testing.T) { test(t, vfs.NewMem()) })
}

func create(t require.TestingT, f vfs.FS, name string, data []byte) vfs.File {
	file, err := f.Create(name)
	require.NoError(t, err)
	_, err = file.WriteAt(data, 0)
	require.NoError(t, err)
	return file
}

func content(t require.TestingT, file vfs.File) []byte {
	size, err := file.Size()
	require.NoError(t, err)
	p := make([]byte, size)
	n, err := file.ReadAt(p, 0)
	if size > 0 {
		require.NoError(t, err)
	}
	require.Equal(t, int(size), n)
	return p
}

func TestNames(t *testing.T) {
	both(t, func(t *testing.T, f vfs.FS) {
		_, err := f.Open("none")
		require.ErrorIs(t, err, fs.ErrNotExist)
		_, err = f.Create("no/dir")
		require.ErrorIs(t, err, fs.ErrNotExist)
		_, err = f.List("none")
		require.ErrorIs(t, err, fs.ErrNotExist)
		require.ErrorIs(t, f.Remove("none"), fs.ErrNotExist)
		require.ErrorIs(t, f.Rename("none", "b"), fs.ErrNotExist)

		require.NoError(t, f.MkdirAll("a/b"))
		require.NoError(t, f.MkdirAll("a/b"))
		for _, name := range []string{"a/z", "a/c", "a/m"} {
			require.NoError(t, create(t, f, name, []byte(name)).Close())
		}
		_, err = f.Create("a/c")
		require.ErrorIs(t, err, fs.ErrExist)
		names, err := f.List("a")
		require.NoError(t, err)
		require.Equal(t, []string{"b", "c", "m", "z"}, names)

		require.NoError(t, f.Rename("a/z", "a/c"))
		require.NoError(t, f.Remove("a/m"))
		require.NoError(t, f.SyncDir("a"))
		require.Error(t, f.Remove("a"), "a directory that is not empty")
		names, err = f.List("a")
		require.NoError(t, err)
		require.Equal(t, []string{"b", "c"}, names)
		file, err := f.Open("a/c")
		require.NoError(t, err)
		require.Equal(t, "a/z", string(content(t, file)))
		require.NoError(t, file.Close())
	})
}

func TestRemovedFileStaysReadable(t *testing.T) {
	both(t, func(t *testing.T, f vfs.FS) {
		file := create(t, f, "a", []byte("still here"))
		require.NoError(t, f.Remove("a"))
		require.Equal(t, "still here", string(content(t, file)))
		require.NoError(t, file.Close())
		require.ErrorIs(t, file.Close(), fs.ErrClosed)
		_, err := file.ReadAt(make([]byte, 1), 0)
		require.ErrorIs(t, err, fs.ErrClosed)
	})
}

func TestReadAtEnd(t *testing.T) {
	both(t, func(t *testing.T, f vfs.FS) {
		file := create(t, f, "a", []byte("12345"))
		defer file.Close()
		p := make([]byte, 8)
		n, err := file.ReadAt(p, 2)
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, 3, n)
		n, err = file.ReadAt(p, 100)
		require.ErrorIs(t, err, io.EOF)
		require.Zero(t, n)
		_, err = file.ReadAt(p, -1)
		require.Error(t, err)
	})
}

// TestContent drives random writes, truncations, holes and allocations
// against a plain byte slice.
func TestContent(t *testing.T) {
	both(t, func(t *testing.T, f vfs.FS) {
		rapid.Check(t, func(t *rapid.T) {
			file := create(t, f, "f", nil)
			defer func() {
				require.NoError(t, file.Close())
				require.NoError(t, f.Remove("f"))
			}()
			var model []byte
			grow := func(n int) {
				if n > len(model) {
					model = append(model, make([]byte, n-len(model))...)
				}
			}
			t.Repeat(map[string]func(*rapid.T){
				"write": func(t *rapid.T) {
					off := rapid.IntRange(0, 20000).Draw(t, "off")
					p := bytes.Repeat([]byte{rapid.Byte().Draw(t, "b")}, rapid.IntRange(1, 9000).Draw(t, "n"))
					_, err := file.WriteAt(p, int64(off))
					require.NoError(t, err)
					grow(off + len(p))
					copy(model[off:], p)
				},
				"truncate": func(t *rapid.T) {
					n := rapid.IntRange(0, 25000).Draw(t, "n")
					require.NoError(t, file.Truncate(int64(n)))
					grow(n)
					model = model[:n]
				},
				"punch": func(t *rapid.T) {
					off, n := rapid.IntRange(0, 20000).Draw(t, "off"), rapid.IntRange(1, 12000).Draw(t, "n")
					require.NoError(t, file.Punch(int64(off), int64(n)))
					for i := off; i < min(off+n, len(model)); i++ {
						model[i] = 0
					}
				},
				"allocate": func(t *rapid.T) {
					off, n := rapid.IntRange(0, 20000).Draw(t, "off"), rapid.IntRange(1, 12000).Draw(t, "n")
					require.NoError(t, file.Allocate(int64(off), int64(n)))
					grow(off + n)
				},
				"sync": func(t *rapid.T) { require.NoError(t, file.Sync()) },
				"":     func(t *rapid.T) { require.True(t, bytes.Equal(model, content(t, file))) },
			})
		})
	})
}

func TestWriteDirect(t *testing.T) {
	o, err := vfs.NewOS(t.TempDir())
	require.NoError(t, err)
	file := create(t, o, "f", nil)
	d, ok := file.(interface {
		WriteDirect(p []byte, off int64) (int, error)
	})
	require.True(t, ok)
	want := make([]byte, 3<<20)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	// Aligned and unaligned in address, offset and length, longer than the copy buffer.
	for _, c := range []struct{ from, to int }{{0, 8192}, {8192, 3 << 20}, {100, 5000}, {1, 4097}} {
		n, err := d.WriteDirect(want[c.from:c.to], int64(c.from))
		require.NoError(t, err)
		require.Equal(t, c.to-c.from, n)
	}
	shifted := append(make([]byte, 1), want[:2<<20]...)[1:]
	_, err = d.WriteDirect(shifted, 0)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, content(t, file)))
	require.NoError(t, file.Close())
}

func TestLockIsExclusive(t *testing.T) {
	dir := t.TempDir()
	a, err := vfs.NewOS(dir)
	require.NoError(t, err)
	b, err := vfs.NewOS(dir)
	require.NoError(t, err)
	held, err := a.Lock()
	require.NoError(t, err)
	_, err = b.Lock()
	require.Error(t, err)
	require.NoError(t, held.Close())
	held, err = b.Lock()
	require.NoError(t, err)
	require.NoError(t, held.Close())
}

func TestOSSpace(t *testing.T) {
	o, err := vfs.NewOS(t.TempDir())
	require.NoError(t, err)
	size, free, err := o.Space()
	require.NoError(t, err)
	require.Positive(t, size)
	require.LessOrEqual(t, free, size)
	_, err = vfs.NewOS(o.Root() + "/none")
	require.ErrorIs(t, err, fs.ErrNotExist)
}
