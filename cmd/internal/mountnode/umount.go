package mountnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Unmount takes the mount on dir away and returns when its daemon has committed
// everything and ended, or after timeout (0: no bound). With lazy it goes
// out of the tree although files are in use. A dead daemon's mount is cleared.
func Unmount(dir string, timeout time.Duration, lazy bool) error {
	s, err := ReadState(dir)
	if err != nil {
		return err
	}
	alive := s.Live()
	var fd int
	if alive {
		if fd, err = unix.PidfdOpen(s.PID, 0); err != nil {
			return fmt.Errorf("daemon %d of %s: %w", s.PID, dir, err)
		}
		defer func() { _ = unix.Close(fd) }()
	}
	if err := detach(dir, lazy, alive); err != nil {
		return err
	}
	if !alive {
		return removeState(dir)
	}
	return waitFor(fd, s.PID, dir, timeout)
}

func detach(dir string, lazy, alive bool) error {
	if !alive {
		mounted, err := fuseconn.Mounted(dir)
		if err != nil {
			return err
		}
		if !mounted {
			return errkind.NotFound.Wrap("%s is not mounted", dir)
		}
		return fuseconn.ClearStale(context.Background(), dir, slog.New(slog.DiscardHandler))
	}
	flags := 0
	if lazy {
		flags = unix.MNT_DETACH
	}
	switch err := unix.Unmount(dir, flags); {
	case err == nil:
		return nil
	case errors.Is(err, unix.EBUSY):
		return errkind.Busy.Wrap("%s is in use; close what is open below it (`fuser -vm %s` shows), or use --lazy", dir, dir)
	case errors.Is(err, unix.EINVAL):
		return errkind.NotFound.Wrap("%s is not mounted", dir)
	default:
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
}

// waitFor waits for a process to end.
func waitFor(pidfd, pid int, dir string, timeout time.Duration) error {
	ms := -1
	if timeout > 0 {
		ms = int(timeout.Milliseconds())
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, ms)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for daemon %d: %w", pid, err)
		}
		if n == 0 {
			return errkind.Timeout.Wrap("%s is unmounted, but its daemon %d has not ended after %s: files of it are still open, or what was written is still being stored",
				dir, pid, timeout)
		}
		return nil
	}
}
