package fs

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// child runs one verb in a process of its own: what must not share a process
// with the daemon (page faults, locks by process), or must be killed.
func child(verb string, args []string) int {
	verbs := map[string]func([]string) error{
		"daemon": childDaemon, "mmap": childMmap, "lock": childLock, "setid": childSetID,
		"getxattr": func(args []string) error { _, err := getXattr(args[0], "user.x"); return err },
	}
	if err := verbs[verb](args); err != nil {
		fmt.Println("error:", err)
		return 1
	}
	return 0
}

// command prepares a child.
func command(t *testing.T, verb string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(stop)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), childVerb+"="+verb)
	return cmd
}

// runChild runs a child to its end and returns what it printed.
func runChild(t *testing.T, verb string, args ...string) string {
	t.Helper()
	out, err := command(t, verb, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return strings.TrimSpace(string(out))
}

// childDaemon serves a mount until it is killed.
func childDaemon(args []string) error {
	c := newCluster()
	s, err := c.meta.open()
	if err != nil {
		return err
	}
	c.blocks = &memBlocks{all: make(map[ids.BlockID][]byte)}
	var f *FS
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	e := newRealEngine(c, s, log, func(ino ids.Ino, off uint64, err error) { f.Invalidate(ino, off, err) })
	f = New(Config{Meta: s, Engine: FileEngine(e), Sched: new(sched.Real), Log: log})
	srv, err := Mount(context.Background(), args[0], f, fuseconn.Options{AllowOther: true})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return srv.Wait()
}

// childMmap stores through a shared map of a new file, and checks what another
// descriptor reads, before and after it is unmapped.
func childMmap(args []string) error {
	const size = 3*memPage + 100
	fd, err := unix.Open(args[0], unix.O_RDWR|unix.O_CREAT, 0o644)
	if err != nil {
		return err
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	m, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	for i := range m {
		m[i] = byte(i * 7)
	}
	// As fastsafetensors does: no msync, only fsync of the descriptor.
	if err := unix.Fsync(fd); err != nil {
		return fmt.Errorf("fsync: %w", err)
	}
	got, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	for i := range got {
		if len(got) != size || got[i] != byte(i*7) {
			return fmt.Errorf("after fsync: byte %d of %d is %d", i, len(got), got[i])
		}
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	m[memPage+5] = 99 // after the last flush, before munmap
	if err := unix.Munmap(m); err != nil {
		return fmt.Errorf("munmap: %w", err)
	}
	return nil
}

// childLock takes a lock and tells what happened: KIND is posix, ofd or flock.
func childLock(args []string) error {
	fd, err := unix.Open(args[1], unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	lk := unix.Flock_t{Type: unix.F_WRLCK, Whence: 0, Start: 10, Len: 10}
	switch args[0] {
	case "posix":
		err = unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &lk)
	case "ofd":
		err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk)
	case "flock":
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	case "get":
		if err = unix.FcntlFlock(uintptr(fd), unix.F_GETLK, &lk); err == nil {
			fmt.Println(lk.Type, lk.Start, lk.Len, lk.Pid)
			return nil
		}
	}
	if err != nil {
		fmt.Println(err)
		return nil
	}
	fmt.Println("taken")
	return nil
}

// childSetID does something to a file as another user.
func childSetID(args []string) error {
	uid, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	fd, err := unix.Open(args[1], unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := unix.Setuid(uid); err != nil {
		return err
	}
	switch args[2] {
	case "write":
		_, err = unix.Write(fd, []byte("x"))
	case "truncate":
		err = unix.Ftruncate(fd, 1)
	case "fallocate":
		err = unix.Fallocate(fd, 0, 0, 4096)
	}
	return err
}
