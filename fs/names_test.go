package fs

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/meta/api"
)

func stat(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Lstat(path, &st), path)
	return st
}

func TestNames(t *testing.T) { bothEngines(t, checkNames) }

func checkNames(t *testing.T, c *cluster) {
	m := c.mount(t)
	for _, tt := range []struct {
		name string
		err  error
	}{
		{strings.Repeat("a", 255), nil},
		{strings.Repeat("あ", 85), nil},
		{strings.Repeat("a", 256), unix.ENAMETOOLONG},
		{strings.Repeat("あ", 85) + "a", unix.ENAMETOOLONG},
		{"not UTF-8: \xff\xfe", nil},
	} {
		fd, err := unix.Open(m.path("%s", tt.name), unix.O_CREAT|unix.O_RDWR, 0o644)
		require.ErrorIs(t, err, tt.err, "%q", tt.name)
		if err == nil {
			unix.Close(fd)
			require.NoError(t, unix.Rename(m.path("%s", tt.name), m.path("x")))
			require.NoError(t, unix.Rename(m.path("x"), m.path("%s", tt.name)))
			require.NoError(t, unix.Unlink(m.path("%s", tt.name)))
			continue
		}
		require.ErrorIs(t, unix.Mkdir(m.path("%s", tt.name), 0o755), tt.err)
		require.ErrorIs(t, unix.Unlink(m.path("%s", tt.name)), tt.err)
		require.ErrorIs(t, unix.Symlink("x", m.path("%s", tt.name)), tt.err)
		require.ErrorIs(t, unix.Access(m.path("%s", tt.name), 0), tt.err)
		require.NoError(t, os.WriteFile(m.path("f"), nil, 0o644))
		require.ErrorIs(t, unix.Rename(m.path("f"), m.path("%s", tt.name)), tt.err)
		require.ErrorIs(t, unix.Link(m.path("f"), m.path("%s", tt.name)), tt.err)
	}
}

func TestMknod(t *testing.T) {
	m := newCluster().mount(t)
	dev := int(unix.Mkdev(1, 3))
	for name, mode := range map[string]uint32{"fifo": unix.S_IFIFO, "sock": unix.S_IFSOCK, "null": unix.S_IFCHR, "blk": unix.S_IFBLK, "reg": unix.S_IFREG} {
		require.NoError(t, unix.Mknod(m.path("%s", name), mode|0o640, dev))
		st := stat(t, m.path("%s", name))
		require.Equal(t, mode|0o640, st.Mode, name)
		require.EqualValues(t, 1, st.Nlink)
	}
	require.EqualValues(t, dev, stat(t, m.path("null")).Rdev)
	f, err := os.OpenFile(m.path("null"), os.O_WRONLY, 0)
	require.NoError(t, err, "devices work on a mount with dev")
	_, err = f.WriteString("gone")
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func TestSymlink(t *testing.T) {
	m := newCluster().mount(t)
	long := strings.Repeat("t", api.MaxTarget)
	require.NoError(t, os.Symlink(long, m.path("l")))
	got, err := os.Readlink(m.path("l"))
	require.NoError(t, err)
	require.Equal(t, long, got)
	st := stat(t, m.path("l"))
	require.EqualValues(t, len(long), st.Size)
	require.EqualValues(t, unix.S_IFLNK|0o777, st.Mode)
}

func TestRenameFlags(t *testing.T) {
	m := newCluster().mount(t)
	require.NoError(t, os.WriteFile(m.path("a"), []byte("A"), 0o644))
	require.NoError(t, os.WriteFile(m.path("b"), []byte("B"), 0o644))
	require.NoError(t, os.Mkdir(m.path("d"), 0o755))
	require.NoError(t, os.WriteFile(m.path("d/f"), nil, 0o644))
	rename := func(from, to string, flags uint) error {
		return unix.Renameat2(unix.AT_FDCWD, m.path("%s", from), unix.AT_FDCWD, m.path("%s", to), flags)
	}
	require.ErrorIs(t, rename("a", "b", unix.RENAME_NOREPLACE), unix.EEXIST)
	require.NoError(t, rename("a", "c", unix.RENAME_NOREPLACE))
	require.NoError(t, rename("c", "b", unix.RENAME_EXCHANGE))
	for name, want := range map[string]string{"c": "B", "b": "A"} {
		got, err := os.ReadFile(m.path("%s", name))
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	require.NoError(t, rename("b", "d", unix.RENAME_EXCHANGE), "file and directory")
	require.EqualValues(t, unix.S_IFDIR, stat(t, m.path("b")).Mode&unix.S_IFMT)
	require.ErrorIs(t, rename("b", "missing", unix.RENAME_EXCHANGE), unix.ENOENT)
	require.ErrorIs(t, rename("b", "x", unix.RENAME_WHITEOUT), unix.EINVAL)
	require.ErrorIs(t, rename("b", "b/below", 0), unix.EINVAL)
	require.NoError(t, os.MkdirAll(m.path("e/full"), 0o755))
	require.ErrorIs(t, rename("b", "e", 0), unix.ENOTEMPTY)
}

// TestRenameFlushes keeps the order that programs without fsync rely on.
func TestRenameFlushes(t *testing.T) { bothEngines(t, checkRenameFlushes) }

func checkRenameFlushes(t *testing.T, c *cluster) {
	m, other := c.mount(t), c.mount(t)
	f, err := os.Create(m.path("tmp"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("all of it")
	require.NoError(t, err)
	require.NotEmpty(t, m.f.cfg.Engine.DirtyInos(), "the write is not committed yet")
	require.NoError(t, os.Rename(m.path("tmp"), m.path("final")))
	got, err := os.ReadFile(other.path("final"))
	require.NoError(t, err)
	require.Equal(t, "all of it", string(got))
}

func TestTmpfile(t *testing.T) { bothEngines(t, checkTmpfile) }

func checkTmpfile(t *testing.T, c *cluster) {
	m := c.mount(t)
	fd, err := unix.Open(m.Dir(), unix.O_TMPFILE|unix.O_RDWR, 0o600)
	require.NoError(t, err)
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("hello"))
	require.NoError(t, err)
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &st))
	require.EqualValues(t, 0, st.Nlink)
	require.NoError(t, unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB))
	require.NoError(t, unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, m.path("named"), unix.AT_SYMLINK_FOLLOW))
	got, err := os.ReadFile(c.mount(t).path("named"))
	require.NoError(t, err)
	require.Equal(t, "hello", string(got))
	require.EqualValues(t, 1, stat(t, m.path("named")).Nlink)
}

func TestUmask(t *testing.T) {
	m := newCluster().mount(t)
	old := unix.Umask(0o027)
	defer unix.Umask(old)
	require.NoError(t, os.WriteFile(m.path("f"), nil, 0o666))
	require.NoError(t, os.Mkdir(m.path("d"), 0o777))
	require.NoError(t, unix.Mknod(m.path("p"), unix.S_IFIFO|0o666, 0))
	require.EqualValues(t, 0o640, stat(t, m.path("f")).Mode&0o7777)
	require.EqualValues(t, 0o750, stat(t, m.path("d")).Mode&0o7777)
	require.EqualValues(t, 0o640, stat(t, m.path("p")).Mode&0o7777)
}

func TestSetgidDirectory(t *testing.T) {
	m := newCluster().mount(t)
	require.NoError(t, os.Mkdir(m.path("d"), 0o755))
	require.NoError(t, os.Chown(m.path("d"), 0, 4242))
	require.NoError(t, unix.Chmod(m.path("d"), 0o2775))
	require.NoError(t, os.WriteFile(m.path("d/f"), nil, 0o644))
	require.NoError(t, os.Mkdir(m.path("d/sub"), 0o755))
	require.EqualValues(t, 4242, stat(t, m.path("d/f")).Gid)
	require.EqualValues(t, 4242, stat(t, m.path("d/sub")).Gid)
	require.NotZero(t, stat(t, m.path("d/sub")).Mode&unix.S_ISGID)
}

// TestCreateRace makes two mounts create the same names at once: each open
// must succeed, and O_EXCL exactly once.
func TestCreateRace(t *testing.T) {
	c := newCluster()
	mounts := []*mounted{c.mount(t), c.mount(t)}
	const rounds = 200
	var won atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 4*rounds)
	for _, m := range mounts {
		for _, flags := range []int{0, unix.O_EXCL} {
			wg.Go(func() {
				for i := range rounds {
					fd, err := unix.Open(m.path("f%d-%d", flags, i), unix.O_CREAT|unix.O_RDWR|flags, 0o644)
					switch {
					case err == nil:
						unix.Close(fd)
						if flags != 0 {
							won.Add(1)
						}
					case flags == 0 || !errors.Is(err, syscall.EEXIST):
						errs <- err
					}
				}
			})
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.EqualValues(t, rounds, won.Load())
}

// TestRenameRace lets both mounts publish a directory under one name: one
// wins, and nothing is merged (S4).
func TestRenameRace(t *testing.T) {
	c := newCluster()
	mounts := []*mounted{c.mount(t), c.mount(t)}
	var won atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		m := mounts[i%2]
		require.NoError(t, os.Mkdir(m.path("t%d", i), 0o755))
		require.NoError(t, os.WriteFile(m.path("t%d/f%d", i, i), nil, 0o644))
	}
	bad := make(chan error, 8)
	for i := range 8 {
		m := mounts[i%2]
		wg.Go(func() {
			switch err := unix.Rename(m.path("t%d", i), m.path("ck")); {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST):
				bad <- err
			}
		})
	}
	wg.Wait()
	close(bad)
	for err := range bad {
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, won.Load())
	list, err := os.ReadDir(mounts[1].path("ck"))
	require.NoError(t, err)
	require.Len(t, list, 1)
}
