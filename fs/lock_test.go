package fs

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const refused = "resource temporarily unavailable"

func open(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o644)
	require.NoError(t, err)
	return fd
}

func TestLocksBetweenMounts(t *testing.T) {
	c := newCluster()
	a, b := c.mount(t), c.mount(t)
	whole := unix.Flock_t{Type: unix.F_WRLCK}
	for _, kind := range []string{"posix", "ofd", "flock"} {
		fd := open(t, a.path("f"))
		take := func() error {
			lk := whole
			switch kind {
			case "posix":
				return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lk)
			case "ofd":
				return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk)
			}
			return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		}
		require.NoError(t, take(), kind)
		for _, m := range []*mounted{a, b} {
			require.Equal(t, refused, runChild(t, "lock", kind, m.path("f")), kind)
		}
		// The families that do not see each other.
		foreign := map[string]string{"posix": "flock", "ofd": "flock", "flock": "posix"}[kind]
		require.Equal(t, "taken", runChild(t, "lock", foreign, b.path("f")), "%s against %s", foreign, kind)
		unix.Close(fd)
		require.Eventually(t, func() bool { return runChild(t, "lock", kind, b.path("f")) == "taken" }, testWait, testPoll, kind)
	}
	require.Eventually(t, func() bool { return a.f.locks.len() == 0 }, testWait, testPoll)
}

// TestPosixLocksGoWithAnyClose: POSIX wants a process to lose its locks of a
// file when it closes any descriptor of it; OFD locks stay.
func TestPosixLocksGoWithAnyClose(t *testing.T) {
	m := newCluster().mount(t)
	one, two := open(t, m.path("f")), open(t, m.path("f"))
	defer unix.Close(one)
	lk := unix.Flock_t{Type: unix.F_WRLCK, Start: 0, Len: 100}
	require.NoError(t, unix.FcntlFlock(uintptr(one), unix.F_SETLK, &lk))
	require.Equal(t, refused, runChild(t, "lock", "posix", m.path("f")))
	unix.Close(two)
	require.Equal(t, "taken", runChild(t, "lock", "posix", m.path("f")))
	three := open(t, m.path("f"))
	require.NoError(t, unix.FcntlFlock(uintptr(one), unix.F_OFD_SETLK, &lk))
	unix.Close(three)
	require.Equal(t, refused, runChild(t, "lock", "ofd", m.path("f")))
}

func TestGetLock(t *testing.T) {
	c := newCluster()
	a := c.mount(t)
	var own atomic.Uint64
	b := c.mount(t, func(c *Config, _ *fuseconn.Options) {
		c.Session = func() ids.Session { return ids.Session(own.Load()) }
	})
	own.Store(uint64(b.session.id))
	fd := open(t, a.path("f"))
	defer unix.Close(fd)
	lk := unix.Flock_t{Type: unix.F_WRLCK, Start: 15, Len: 3}
	require.NoError(t, unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lk))
	require.Equal(t, []string{"1", "15", "3", strconv.Itoa(os.Getpid())}, strings.Fields(runChild(t, "lock", "get", a.path("f"))))
	require.Equal(t, []string{"1", "15", "3", "0"}, strings.Fields(runChild(t, "lock", "get", b.path("f"))),
		"a process of another mount has no number here")
	lk = unix.Flock_t{Type: unix.F_UNLCK}
	require.NoError(t, unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lk))
	require.Equal(t, "2", strings.Fields(runChild(t, "lock", "get", b.path("f")))[0])
}

func TestWaitForLock(t *testing.T) {
	c := newCluster()
	a, b := c.mount(t), c.mount(t)
	fd := open(t, a.path("f"))
	require.NoError(t, unix.Flock(fd, unix.LOCK_EX))
	other := open(t, b.path("f"))
	defer unix.Close(other)
	got := make(chan error, 1)
	go func() { got <- unix.Flock(other, unix.LOCK_EX) }()
	select {
	case err := <-got:
		t.Fatalf("two hold the lock: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	unix.Close(fd)
	require.NoError(t, <-got)
}

func TestCloseWithoutLocksAsksNothing(t *testing.T) {
	m := newCluster().mount(t)
	require.NoError(t, os.WriteFile(m.path("f"), []byte("x"), 0o644))
	require.Zero(t, m.session.take(api.KindLock))
}
