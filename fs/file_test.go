package fs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

func pattern(n int) []byte {
	p := make([]byte, n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// TestUnlinkedOpenFile is S19.
func TestUnlinkedOpenFile(t *testing.T) { bothEngines(t, checkUnlinkedOpenFile) }

func checkUnlinkedOpenFile(t *testing.T, c *cluster) {
	m := c.mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("before")
	require.NoError(t, err)
	require.NoError(t, os.Remove(m.path("f")))
	fd := int(f.Fd())
	require.NoError(t, unix.Ftruncate(fd, 3))
	require.NoError(t, unix.Fchmod(fd, 0o600))
	require.NoError(t, unix.Futimes(fd, []unix.Timeval{{Sec: 1}, {Sec: 2}}))
	require.NoError(t, unix.Fsetxattr(fd, "user.x", []byte("v"), 0))
	_, err = f.WriteAt([]byte("after"), 3)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	got := make([]byte, 10)
	n, err := f.ReadAt(got, 0)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "befafter", string(got[:n]))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &st))
	require.EqualValues(t, 0, st.Nlink)
	require.EqualValues(t, 8, st.Size)
	require.EqualValues(t, unix.S_IFREG|0o600, st.Mode)
	_, err = os.Stat(m.path("f"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestDirectIO uses O_DIRECT at any offset, length and address, mixed with
// buffered reads of the same file (S31).
func TestDirectIO(t *testing.T) { bothEngines(t, checkDirectIO) }

func checkDirectIO(t *testing.T, c *cluster) {
	m := c.mount(t)
	want := pattern(1<<20 + 777)
	fd, err := unix.Open(m.path("f"), unix.O_CREAT|unix.O_RDWR|unix.O_DIRECT, 0o644)
	require.NoError(t, err)
	defer unix.Close(fd)
	mem := make([]byte, len(want)+1)
	copy(mem[1:], want)
	for off := 0; off < len(want); {
		n, err := unix.Pwrite(fd, mem[1+off:min(1+off+99_991, len(mem))], int64(off))
		require.NoError(t, err)
		off += n
	}
	cached, err := os.ReadFile(m.path("f"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, cached))
	copy(want[512:], "changed through the direct descriptor")
	_, err = unix.Pwrite(fd, want[512:1000], 512)
	require.NoError(t, err)
	buf := make([]byte, 4097)
	for _, off := range []int{0, 512, 513, 100_000, len(want) - 5} {
		n, err := unix.Pread(fd, buf, int64(off))
		require.NoError(t, err)
		require.Equal(t, min(len(buf), len(want)-off), n)
		require.True(t, bytes.Equal(want[off:off+n], buf[:n]), "at %d", off)
	}
	cached, err = os.ReadFile(m.path("f"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, cached), "a cached reader sees what was written past the cache")
	require.NoError(t, unix.Fsync(fd))
	far, err := os.ReadFile(c.mount(t, func(c *Config, _ *fuseconn.Options) { c.ReadMode = ReadDirect }).path("f"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, far))
}

func TestSharedWritableMap(t *testing.T) { bothEngines(t, checkSharedWritableMap) }

func checkSharedWritableMap(t *testing.T, c *cluster) {
	m := c.mount(t)
	runChild(t, "mmap", m.path("f"))
	got, err := os.ReadFile(m.path("f"))
	require.NoError(t, err)
	require.Len(t, got, 3*memPage+100)
	require.EqualValues(t, 99, got[memPage+5], "stored after the last close, before munmap")
	require.EqualValues(t, byte((memPage+6)*7%256), got[memPage+6])
}

func TestAppend(t *testing.T) { bothEngines(t, checkAppend) }

func checkAppend(t *testing.T, c *cluster) {
	m := c.mount(t)
	a, err := os.OpenFile(m.path("l"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	require.NoError(t, err)
	defer a.Close()
	b, err := os.OpenFile(m.path("l"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer b.Close()
	var want []byte
	for i := range 100 {
		line := fmt.Appendf(nil, "line %d\n", i)
		want = append(want, line...)
		_, err := []*os.File{a, b}[i%2].Write(line)
		require.NoError(t, err)
	}
	got, err := os.ReadFile(m.path("l"))
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestTruncateAtOpen(t *testing.T) { bothEngines(t, checkTruncateAtOpen) }

func checkTruncateAtOpen(t *testing.T, c *cluster) {
	m, other := c.mount(t), c.mount(t)
	for i := range 20 {
		text := fmt.Sprintf("step %d", i*i*i)
		require.NoError(t, os.WriteFile(m.path("latest"), []byte(text), 0o644))
		for _, mm := range []*mounted{m, other} {
			got, err := os.ReadFile(mm.path("latest"))
			require.NoError(t, err)
			require.Equal(t, text, string(got))
		}
	}
}

// TestCloseToOpen has one mount read what another wrote just before, through
// caches that hold the version before.
func TestCloseToOpen(t *testing.T) { bothEngines(t, checkCloseToOpen) }

func checkCloseToOpen(t *testing.T, c *cluster) {
	a, b := c.mount(t), c.mount(t)
	for i := range 50 {
		want := pattern(10_000 + i%3)
		want[0] = byte(i)
		require.NoError(t, os.WriteFile(a.path("f"), want, 0o644))
		require.EqualValues(t, len(want), stat(t, b.path("f")).Size)
		got, err := os.ReadFile(b.path("f"))
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "round %d", i)
		a, b = b, a
	}
}

// TestGrowthSeenByHolder keeps a file open while it grows elsewhere: the page at
// the old end, which the kernel has cached, must not be served with its zeros.
func TestGrowthSeenByHolder(t *testing.T) { bothEngines(t, checkGrowthSeenByHolder) }

func checkGrowthSeenByHolder(t *testing.T, c *cluster) {
	a, b := c.mount(t), c.mount(t)
	require.NoError(t, os.WriteFile(a.path("f"), []byte("first "), 0o644))
	f, err := os.Open(b.path("f"))
	require.NoError(t, err)
	defer f.Close()
	buf := make([]byte, 100)
	n, err := f.ReadAt(buf, 0)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "first ", string(buf[:n]))
	w, err := os.OpenFile(a.path("f"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = w.WriteString("second")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	st, err := f.Stat()
	require.NoError(t, err)
	require.EqualValues(t, 12, st.Size())
	n, _ = f.ReadAt(buf, 0)
	require.Equal(t, "first second", string(buf[:n]))
}

func TestSparse(t *testing.T) { bothEngines(t, checkSparse) }

func checkSparse(t *testing.T, c *cluster) {
	m := c.mount(t)
	fd, err := unix.Open(m.path("f"), unix.O_CREAT|unix.O_RDWR, 0o644)
	require.NoError(t, err)
	defer unix.Close(fd)
	const far = 1 << 40
	_, err = unix.Pwrite(fd, []byte("x"), far)
	require.NoError(t, err)
	off, err := unix.Seek(fd, 0, unix.SEEK_DATA)
	require.NoError(t, err)
	require.EqualValues(t, far, off)
	off, err = unix.Seek(fd, 0, unix.SEEK_HOLE)
	require.NoError(t, err)
	require.EqualValues(t, 0, off)
	_, err = unix.Seek(fd, far+1, unix.SEEK_DATA)
	require.ErrorIs(t, err, unix.ENXIO)
	blocks := stat(t, m.path("f")).Blocks
	require.Positive(t, blocks)
	require.LessOrEqual(t, blocks, int64(8), "holes take no room")
	for _, off := range []int64{1<<31 - 1, 1<<32 - 1, 1<<63 - 3} {
		_, err := unix.Pwrite(fd, []byte("ab"), off)
		require.NoError(t, err, "at %d", off)
	}
	require.NoError(t, unix.Ftruncate(fd, 1<<63-1))
	_, err = unix.Pwrite(fd, []byte("ab"), 1<<63-2)
	require.True(t, errors.Is(err, unix.EFBIG) || errors.Is(err, unix.EINVAL), "%v", err)
	_, err = unix.Pread(fd, make([]byte, 10), 1<<40)
	require.NoError(t, err, "the mount lives")
}

func TestFallocate(t *testing.T) { bothEngines(t, checkFallocate) }

func checkFallocate(t *testing.T, c *cluster) {
	m := c.mount(t)
	fd, err := unix.Open(m.path("f"), unix.O_CREAT|unix.O_WRONLY, 0o644)
	require.NoError(t, err)
	defer unix.Close(fd)
	data := pattern(3 * memPage)
	_, err = unix.Write(fd, data)
	require.NoError(t, err)
	size := func() int64 { return stat(t, m.path("f")).Size }
	require.NoError(t, unix.Fallocate(fd, 0, 0, 4*memPage))
	require.EqualValues(t, 4*memPage, size())
	require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, 9*memPage))
	require.EqualValues(t, 4*memPage, size())
	require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 10, memPage))
	require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, 4*memPage, memPage))
	require.EqualValues(t, 5*memPage, size())
	require.ErrorIs(t, unix.Fallocate(fd, unix.FALLOC_FL_COLLAPSE_RANGE, 0, memPage), unix.EOPNOTSUPP)
	clear(data[10 : 10+memPage])
	got, err := os.ReadFile(m.path("f"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(append(data, make([]byte, 2*memPage)...), got))
}

func TestCopyFileRange(t *testing.T) { bothEngines(t, checkCopyFileRange) }

func checkCopyFileRange(t *testing.T, c *cluster) {
	m := c.mount(t)
	want := pattern(3<<20 + 11)
	require.NoError(t, os.WriteFile(m.path("src"), want, 0o644))
	src, err := os.Open(m.path("src"))
	require.NoError(t, err)
	defer src.Close()
	dst, err := os.Create(m.path("dst"))
	require.NoError(t, err)
	defer dst.Close()
	for done := 0; done < len(want); {
		n, err := unix.CopyFileRange(int(src.Fd()), nil, int(dst.Fd()), nil, len(want), 0)
		require.NoError(t, err)
		require.NotZero(t, n)
		done += n
	}
	got, err := os.ReadFile(m.path("dst"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

// TestTimes sets times while bytes are not committed yet, as cp -p does.
func TestTimes(t *testing.T) { bothEngines(t, checkTimes) }

func checkTimes(t *testing.T, c *cluster) {
	m, other := c.mount(t), c.mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	_, err = f.WriteString("x")
	require.NoError(t, err)
	old := []unix.Timespec{{Sec: -7, Nsec: 5}, {Sec: 1_000_000_000, Nsec: 123_456_789}}
	require.NoError(t, unix.UtimesNanoAt(unix.AT_FDCWD, m.path("f"), old, 0))
	require.NoError(t, f.Close())
	for _, mm := range []*mounted{m, other} {
		st := stat(t, mm.path("f"))
		require.Equal(t, old[0], st.Atim)
		require.Equal(t, old[1], st.Mtim)
	}
	before := time.Now().Add(-time.Second).UnixNano()
	require.NoError(t, unix.UtimesNanoAt(unix.AT_FDCWD, m.path("f"), []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}, 0))
	st := stat(t, m.path("f"))
	require.Greater(t, st.Atim.Nano(), before)
	require.Equal(t, old[1], st.Mtim)
	var sx unix.Statx_t
	require.NoError(t, unix.Statx(unix.AT_FDCWD, m.path("f"), 0, unix.STATX_BTIME|unix.STATX_BASIC_STATS, &sx))
	require.NotZero(t, sx.Mask&unix.STATX_BTIME)
	require.Greater(t, sx.Btime.Sec*1e9, before-60e9)
	require.EqualValues(t, 1, sx.Size)
}

func atime(t *testing.T, path string) int64 {
	st := stat(t, path)
	return st.Atim.Nano()
}

func TestAtime(t *testing.T) {
	for _, tt := range []struct {
		policy fuseconn.Atime
		moves  bool
	}{{fuseconn.AtimeNone, false}, {fuseconn.AtimeRel, true}, {fuseconn.AtimeStrict, true}} {
		c := newCluster()
		m := c.mount(t, func(c *Config, _ *fuseconn.Options) { c.Atime = tt.policy })
		require.NoError(t, os.WriteFile(m.path("f"), []byte("x"), 0o644))
		was := atime(t, m.path("f"))
		_, err := os.ReadFile(m.path("f"))
		require.NoError(t, err)
		require.Equal(t, tt.moves, atime(t, m.path("f")) > was, "policy %d", tt.policy)
		other := c.mount(t)
		require.Eventually(t, func() bool {
			return tt.moves == (atime(t, other.path("f")) > was)
		}, testWait, testPoll, "policy %d, elsewhere", tt.policy)
	}
}

func TestSetIDIsCleared(t *testing.T) { bothEngines(t, checkSetIDIsCleared) }

func checkSetIDIsCleared(t *testing.T, c *cluster) {
	m := c.mount(t)
	for _, how := range []string{"write", "truncate", "fallocate"} {
		path := m.path("%s", how)
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh"), 0o666))
		require.NoError(t, unix.Chmod(path, 0o6777))
		runChild(t, "setid", "1234", path, how)
		require.EqualValues(t, 0o777, stat(t, path).Mode&0o7777, how)
	}
	require.NoError(t, os.WriteFile(m.path("root"), nil, 0o666))
	require.NoError(t, unix.Chmod(m.path("root"), 0o6777))
	runChild(t, "setid", "0", m.path("root"), "write")
	require.EqualValues(t, 0o6777, stat(t, m.path("root")).Mode&0o7777, "root may keep them")
	require.NoError(t, os.Chown(m.path("root"), 5, 5))
	require.EqualValues(t, 0o777, stat(t, m.path("root")).Mode&0o7777)
}

func TestWriteErrors(t *testing.T) {
	m := newCluster().mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	defer f.Close()
	m.engine.onWrite(func() error { return errkind.NoSpace.Wrap("no disk has room") })
	_, err = f.WriteString("x")
	require.ErrorIs(t, err, syscall.ENOSPC)
	m.engine.onWrite(func() error { return errkind.Quota.Wrap("over") })
	_, err = f.WriteString("x")
	require.ErrorIs(t, err, syscall.EDQUOT)
	m.engine.onWrite(func() error { return nil })
	_, err = f.WriteString("x")
	require.NoError(t, err)
	require.NoError(t, os.Remove(m.path("f")))
}

// TestSynchronousWrite wants an O_SYNC write to be committed when it returns.
func TestSynchronousWrite(t *testing.T) { bothEngines(t, checkSynchronousWrite) }

func checkSynchronousWrite(t *testing.T, c *cluster) {
	m := c.mount(t)
	fd, err := unix.Open(m.path("f"), unix.O_CREAT|unix.O_WRONLY|unix.O_SYNC, 0o644)
	require.NoError(t, err)
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("x"))
	require.NoError(t, err)
	require.Empty(t, m.f.cfg.Engine.DirtyInos())
}

func TestIoctlIsRefused(t *testing.T) {
	m := newCluster().mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	defer f.Close()
	_, err = unix.IoctlGetInt(int(f.Fd()), 0x5401)
	require.ErrorIs(t, err, unix.ENOTTY)
	src, err := os.Create(m.path("g"))
	require.NoError(t, err)
	defer src.Close()
	err = unix.IoctlFileClone(int(f.Fd()), int(src.Fd()))
	require.True(t, errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY), "%v", err)
}

func TestStatFS(t *testing.T) {
	m := newCluster().mount(t)
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(m.Dir(), &st))
	require.EqualValues(t, 4<<40, st.Blocks*uint64(st.Frsize), "6 TiB of disks at rs-4-2")
	require.EqualValues(t, 2<<40, st.Bavail*uint64(st.Bsize))
	require.EqualValues(t, 255, st.Namelen)
}

func TestBlockSize(t *testing.T) {
	m := newCluster().mount(t, func(c *Config, _ *fuseconn.Options) { c.BlockSize = 1 << 20 })
	require.NoError(t, os.WriteFile(m.path("f"), nil, 0o644))
	require.EqualValues(t, 1<<20, stat(t, m.path("f")).Blksize)
	require.EqualValues(t, 1<<20, stat(t, m.Dir()).Blksize)
}

// TestHandlesAreGivenBack opens many files, several times over (S49).
func TestHandlesAreGivenBack(t *testing.T) {
	m := newCluster().mount(t)
	for range 3 {
		var files []*os.File
		for i := range 500 {
			f, err := os.OpenFile(m.path("f%d", i), os.O_CREATE|os.O_RDWR, 0o644)
			require.NoError(t, err)
			files = append(files, f)
		}
		require.Equal(t, 500, m.engine.openCount())
		for _, f := range files {
			require.NoError(t, f.Close())
		}
		require.Eventually(t, func() bool { return m.engine.openCount() == 0 && m.f.files.len() == 0 }, testWait, testPoll)
	}
	require.NotZero(t, m.session.take(api.KindCreate))
}

func TestOpenMode(t *testing.T) {
	const direct, cached = fuseconn.OpenDirectIO, 0
	for _, c := range []struct {
		mode  ReadMode
		flags uint32
		size  uint64
		want  uint32
	}{
		{ReadAuto, unix.O_RDONLY, directFrom - 1, cached},
		{ReadAuto, unix.O_RDONLY, directFrom, direct},
		{ReadAuto, unix.O_RDWR, 0, direct},
		{ReadAuto, unix.O_RDONLY | unix.O_DIRECT, 0, direct},
		{ReadCached, unix.O_RDONLY, 1 << 40, cached},
		{ReadCached, unix.O_WRONLY, 1 << 40, direct},
		{ReadDirect, unix.O_RDONLY, 0, direct},
	} {
		f := New(Config{ReadMode: c.mode})
		require.EqualValues(t, c.want, f.openMode(c.flags, c.size, false), "%+v", c)
		require.EqualValues(t, c.want|fuseconn.OpenKeepCache, f.openMode(c.flags, c.size, true), "%+v", c)
	}
}
