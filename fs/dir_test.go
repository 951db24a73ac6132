package fs

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/meta/api"
)

// dirent is one entry of getdents(2).
type dirent struct {
	ino  uint64
	off  int64
	typ  byte
	name string
}

// getdents reads once, with a buffer of size bytes.
func getdents(t *testing.T, fd, size int) []dirent {
	t.Helper()
	buf := make([]byte, size)
	n, err := unix.Getdents(fd, buf)
	require.NoError(t, err)
	var all []dirent
	for p := buf[:n]; len(p) > 0; {
		length := binary.NativeEndian.Uint16(p[16:])
		name := p[19:length]
		for i, b := range name {
			if b == 0 {
				name = name[:i]
				break
			}
		}
		all = append(all, dirent{binary.NativeEndian.Uint64(p), int64(binary.NativeEndian.Uint64(p[8:])), p[18], string(name)})
		p = p[length:]
	}
	return all
}

func readAll(t *testing.T, fd, size int) []dirent {
	t.Helper()
	var all []dirent
	for {
		page := getdents(t, fd, size)
		if len(page) == 0 {
			return all
		}
		all = append(all, page...)
	}
}

func openDirectory(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func fillDir(t *testing.T, dir string, n int) {
	t.Helper()
	require.NoError(t, os.Mkdir(dir, 0o755))
	for i := range n {
		require.NoError(t, unix.Mknod(filepath.Join(dir, fmt.Sprintf("file-%d", i)), unix.S_IFREG|0o644, 0))
	}
}

func TestReadDir(t *testing.T) {
	m := newCluster().mount(t)
	fillDir(t, m.path("d"), 1000)
	fd := openDirectory(t, m.path("d"))
	for _, size := range []int{512, 4096, 32768} {
		_, err := unix.Seek(fd, 0, 0)
		require.NoError(t, err)
		names := make(map[string]int)
		for _, e := range readAll(t, fd, size) {
			names[e.name]++
			switch e.name {
			case ".":
				require.EqualValues(t, stat(t, m.path("d")).Ino, e.ino)
			case "..":
				require.EqualValues(t, 1, e.ino)
			default:
				require.EqualValues(t, unix.DT_REG, e.typ)
			}
		}
		require.Len(t, names, 1002, "with a buffer of %d", size)
		for name, n := range names {
			require.Equal(t, 1, n, name)
		}
	}
}

func TestSeekDir(t *testing.T) {
	m := newCluster().mount(t)
	fillDir(t, m.path("d"), 700)
	fd := openDirectory(t, m.path("d"))
	all := readAll(t, fd, 4096)
	require.Len(t, all, 702)
	for i := len(all) - 2; i >= 0; i -= 13 {
		_, err := unix.Seek(fd, all[i].off, 0)
		require.NoError(t, err)
		require.Equal(t, all[i+1], getdents(t, fd, 512)[0], "behind entry %d", i)
	}
	// A position stays right on another mount, and when names around it go.
	for i := 0; i < len(all); i += 2 {
		if all[i].typ == unix.DT_REG && i != 301 {
			require.NoError(t, os.Remove(m.path("d/%s", all[i].name)))
		}
	}
	_, err := unix.Seek(fd, all[300].off, 0)
	require.NoError(t, err)
	require.Equal(t, all[301].name, getdents(t, fd, 512)[0].name)
}

// TestUnlinkWhileReading is what rm -r does: one pass must empty it (S22).
func TestUnlinkWhileReading(t *testing.T) {
	m := newCluster().mount(t)
	fillDir(t, m.path("d"), 1200)
	fd := openDirectory(t, m.path("d"))
	seen := 0
	for {
		page := getdents(t, fd, 2048)
		if len(page) == 0 {
			break
		}
		for _, e := range page {
			if e.typ == unix.DT_REG {
				seen++
				require.NoError(t, unix.Unlinkat(fd, e.name, 0), e.name)
			}
		}
	}
	require.Equal(t, 1200, seen)
	require.NoError(t, os.Remove(m.path("d")))
}

func TestReadDirPlusSavesLookups(t *testing.T) {
	m := newCluster().mount(t)
	fillDir(t, m.path("d"), 1000)
	m.session.take(api.KindReadDir)
	list, err := os.ReadDir(m.path("d"))
	require.NoError(t, err)
	require.Len(t, list, 1000)
	require.Less(t, m.session.take(api.KindReadDir), 40, "pages must be large")
}

func TestRemovedDirectoryStaysOpen(t *testing.T) {
	m := newCluster().mount(t)
	require.NoError(t, os.Mkdir(m.path("d"), 0o755))
	fd := openDirectory(t, m.path("d"))
	require.NoError(t, os.Remove(m.path("d")))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &st))
	require.EqualValues(t, 0, st.Nlink)
	require.NoError(t, unix.Fchmod(fd, 0o700))
	require.NoError(t, unix.Fsetxattr(fd, "user.x", []byte("v"), 0))
	require.NoError(t, unix.Fstat(fd, &st))
	require.EqualValues(t, unix.S_IFDIR|0o700, st.Mode)
	_, err := unix.Openat(fd, "new", unix.O_CREAT|unix.O_RDWR, 0o644)
	require.ErrorIs(t, err, unix.ENOENT)
	require.Equal(t, 1, len(m.f.OpenInos()))
}

func TestOpenDirectoriesAreReleased(t *testing.T) {
	m := newCluster().mount(t)
	for i := range 50 {
		require.NoError(t, os.Mkdir(m.path("d%d", i), 0o755))
		_, err := os.ReadDir(m.path("d%d", i))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return len(m.f.OpenInos()) == 0 }, testWait, testPoll)
	require.Eventually(t, func() bool {
		m.session.counts.Lock()
		defer m.session.counts.Unlock()
		n := m.session.counts.all[api.KindRelease]
		return n > 0 && n < 10
	}, testWait, testPoll, "one call for many")
}

// TestHandlesOutliveTheMount opens by file handle what a mount never looked up.
func TestHandlesOutliveTheMount(t *testing.T) {
	c := newCluster()
	m := c.mount(t)
	require.NoError(t, os.MkdirAll(m.path("a/b"), 0o755))
	require.NoError(t, os.WriteFile(m.path("a/b/f"), []byte("content"), 0o644))
	file, _, err := unix.NameToHandleAt(unix.AT_FDCWD, m.path("a/b/f"), 0)
	require.NoError(t, err)
	dir, _, err := unix.NameToHandleAt(unix.AT_FDCWD, m.path("a/b"), 0)
	require.NoError(t, err)

	second := c.mount(t)
	root := openDirectory(t, second.Dir())
	fd, err := unix.OpenByHandleAt(root, file, unix.O_RDONLY)
	require.NoError(t, err)
	defer unix.Close(fd)
	buf := make([]byte, 16)
	n, err := unix.Read(fd, buf)
	require.NoError(t, err)
	require.Equal(t, "content", string(buf[:n]))
	dfd, err := unix.OpenByHandleAt(root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	require.NoError(t, err)
	defer unix.Close(dfd)
	require.Len(t, readAll(t, dfd, 4096), 3)
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dfd))
	require.NoError(t, err)
	require.Equal(t, second.path("a/b"), link)
}
