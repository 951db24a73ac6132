package fs

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// tryMount mounts where it is expected to fail.
func tryMount(t *testing.T, dir string) error {
	t.Helper()
	c := newCluster()
	s, err := c.meta.open()
	require.NoError(t, err)
	f := New(Config{Meta: s, Engine: newMemEngine(c.data, s), Sched: new(sched.Real), Log: testLog()})
	srv, err := Mount(t.Context(), dir, f, fuseconn.Options{Probe: time.Second})
	if err == nil {
		_ = srv.Kill()
	}
	return err
}

func TestBadMountPoints(t *testing.T) {
	m := newCluster().mount(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	for _, tt := range []struct {
		dir  string
		kind errkind.Kind
		text string
	}{
		{filepath.Join(dir, "missing"), errkind.NotFound, "create the directory first"},
		{file, errkind.NotDir, "is not a directory"},
		{m.Dir(), errkind.Busy, "already mounted"},
	} {
		err := tryMount(t, tt.dir)
		require.ErrorIs(t, err, tt.kind, tt.dir)
		require.ErrorContains(t, err, tt.text)
	}
	require.NoError(t, os.WriteFile(m.path("still"), nil, 0o644), "the live mount is untouched")
}

// TestStaleMount kills a daemon and mounts the same path again (S46).
func TestStaleMount(t *testing.T) {
	dir := t.TempDir()
	m := newCluster() // skips when mounting is not possible
	m.mount(t)
	daemon := command(t, "daemon", dir)
	out, err := daemon.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, daemon.Start())
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready", strings.TrimSpace(line))
	held, err := os.Create(filepath.Join(dir, "held"))
	require.NoError(t, err)
	defer held.Close()
	require.ErrorIs(t, tryMount(t, dir), errkind.Busy)

	defer func() { _ = daemon.Process.Kill() }() // before held is closed, which would wait for it
	require.NoError(t, daemon.Process.Signal(syscall.SIGSTOP))
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", daemon.Process.Pid))
		return err == nil && strings.Contains(string(text), "State:\tT")
	}, testWait, testPoll)
	err = tryMount(t, dir)
	require.ErrorIs(t, err, errkind.Busy)
	require.ErrorContains(t, err, "does not answer")
	require.NoError(t, daemon.Process.Kill())
	_ = daemon.Wait()
	_, err = os.Stat(filepath.Join(dir, "held"))
	require.ErrorIs(t, err, unix.ENOTCONN)

	again := m.mountAt(t, dir)
	require.NoError(t, os.WriteFile(again.path("f"), []byte("x"), 0o644))
	_, err = held.WriteString("x")
	require.ErrorIs(t, err, unix.ENOTCONN)
}

func TestMountOptions(t *testing.T) {
	m := newCluster().mount(t, func(c *Config, o *fuseconn.Options) {
		o.Source, o.Dev, o.NoExec = "meta1:7000,meta2:7000", false, true
		c.Atime, c.NoDirAtime = fuseconn.AtimeRel, true
	})
	text, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	i := strings.Index(string(text), m.Dir()+" fuse.ckptfs ")
	require.Positive(t, i)
	line, _, _ := strings.Cut(string(text)[i:], "\n")
	for _, want := range []string{"rw", "nodev", "noexec", "relatime", "nodiratime", "default_permissions", "allow_other"} {
		require.Contains(t, line, want)
	}
	require.NotContains(t, line, "nosuid")
	require.Contains(t, string(text), "meta1:7000,meta2:7000 "+m.Dir())
}

func TestUnmountCommits(t *testing.T) {
	c := newCluster()
	other := c.mount(t)
	m := c.mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	_, err = f.WriteString("x")
	require.NoError(t, err)
	require.ErrorIs(t, m.Unmount(t.Context()), errkind.Busy)
	require.NoError(t, os.WriteFile(m.path("g"), nil, 0o644), "a refused unmount changes nothing")
	// The engine has bytes that no flush has seen: their WRITE came after it.
	require.NoError(t, f.Close())
	ino := stat(t, m.path("f")).Ino
	m.engine.mu.Lock()
	m.engine.dirty[ids.Ino(ino)] = &change{size: 1000, mtime: 5}
	m.engine.mu.Unlock()
	require.NoError(t, m.Unmount(t.Context()))
	require.EqualValues(t, 1000, stat(t, other.path("f")).Size)
	require.NoError(t, m.Unmount(t.Context()), "once more is harmless")
}

func TestForgetGivesBack(t *testing.T) {
	m := newCluster().mount(t)
	fillDir(t, m.path("d"), 600)
	_, err := os.ReadDir(m.path("d"))
	require.NoError(t, err)
	for i := range 600 {
		require.NoError(t, os.Remove(m.path("d/file-%d", i)))
	}
	require.Eventually(t, func() bool { return m.f.nodes.len() < 100 }, testWait, testPoll)
}

// TestTimersCauseNoErrors writes while a signal comes every millisecond (S44).
func TestTimersCauseNoErrors(t *testing.T) {
	m := newCluster().mount(t)
	m.engine.onWrite(func() error {
		time.Sleep(5 * time.Millisecond)
		return nil
	})
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGUSR1)
	defer signal.Stop(sig)
	stop := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				_ = unix.Kill(os.Getpid(), unix.SIGUSR1)
			}
		}
	}()
	fd := open(t, m.path("f"))
	p := pattern(10_000)
	for i := range 40 {
		n, err := unix.Pwrite(fd, p, int64(i*len(p)))
		require.NoError(t, err)
		require.Equal(t, len(p), n)
	}
	require.NoError(t, unix.Fsync(fd))
	require.NoError(t, unix.Close(fd))
	close(stop)
	<-finished
}

// TestInterrupt stops the service and kills a process that waits for it: it
// must be gone after the grace, and the mount must go on.
func TestInterrupt(t *testing.T) {
	m := newCluster().mount(t, func(c *Config, _ *fuseconn.Options) { c.Grace = 50 * time.Millisecond })
	require.NoError(t, os.WriteFile(m.path("f"), nil, 0o644))
	stuck := make(chan struct{}, 100)
	m.session.hold(func(ctx context.Context, req api.Request) error {
		if req.Kind() != api.KindGetXattr {
			return nil
		}
		stuck <- struct{}{}
		<-ctx.Done()
		return errkind.Interrupted.Wrap("%s: %v", req.Kind(), ctx.Err())
	})
	cmd := command(t, "getxattr", m.path("f"))
	require.NoError(t, cmd.Start())
	<-stuck
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.NoError(t, os.WriteFile(m.path("g"), nil, 0o644))
}

// TestOpTimeout: a service that is gone costs an error, not a hang.
func TestOpTimeout(t *testing.T) {
	m := newCluster().mount(t, func(c *Config, _ *fuseconn.Options) { c.OpTimeout = 100 * time.Millisecond })
	m.session.hold(func(ctx context.Context, req api.Request) error {
		if req.Kind() != api.KindCreate {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
	require.ErrorIs(t, os.Mkdir(m.path("d"), 0o755), unix.ETIMEDOUT)
	require.ErrorIs(t, unix.Access(m.path("d"), 0), unix.ENOENT)
}

// TestKill takes a mount away while a program uses it.
func TestKill(t *testing.T) {
	m := newCluster().mount(t)
	f, err := os.Create(m.path("f"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, m.Kill())
	_, err = f.WriteString("x")
	require.ErrorIs(t, err, unix.ENOTCONN)
}

func TestInvalidate(t *testing.T) {
	m := newCluster().mount(t)
	require.NoError(t, os.WriteFile(m.path("f"), []byte("old"), 0o644))
	f, err := os.Open(m.path("f"))
	require.NoError(t, err)
	defer f.Close()
	read := func() string {
		buf := make([]byte, 10)
		n, _ := f.ReadAt(buf, 0)
		return string(buf[:n])
	}
	require.Equal(t, "old", read())
	ino := ids.Ino(stat(t, m.path("f")).Ino)
	m.engine.store.each(ino, 0, 3, true, func(p []byte, _ int64) { copy(p, "new") })
	require.Equal(t, "old", read(), "from the kernel's page")
	m.f.Invalidate(ino, 0, nil)
	require.Eventually(t, func() bool { return read() == "new" }, testWait, testPoll)
	m.f.Invalidate(123456, 0, errkind.NoSpace) // unknown to the kernel: harmless
	require.NoError(t, m.Conn().InvalAttr(uint64(ino)))
	require.NoError(t, m.Conn().InvalAttr(999))
}
