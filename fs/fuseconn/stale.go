package fuseconn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

const (
	fusectl = "/sys/fs/fuse/connections"
	// maxStacked bounds how many dead mounts on one path are cleared.
	maxStacked = 16
)

// resolve makes dir absolute and free of symbolic links. It does not ask the
// file system on dir anything when something is mounted there: its daemon may
// be dead, or never answer.
func resolve(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("mount point %s: %w", dir, err)
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if errors.Is(err, os.ErrNotExist) {
		return "", errkind.NotFound.Wrap("mount point %s: %v; create the directory first", dir, err)
	}
	if err != nil {
		return "", fmt.Errorf("mount point %s: %w", dir, err)
	}
	path := filepath.Join(parent, filepath.Base(abs))
	if _, mounted, err := topMount(path); err != nil || mounted {
		return path, err
	}
	path, err = filepath.EvalSymlinks(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", errkind.NotFound.Wrap("mount point %s does not exist; create the directory first", dir)
	}
	if err != nil {
		return "", fmt.Errorf("mount point %s: %w", dir, err)
	}
	return path, nil
}

// clearStale takes away mounts of dead daemons from dir. A mount whose daemon
// lives is an error of kind Busy.
func clearStale(ctx context.Context, dir string, o *Options) error {
	for range maxStacked {
		m, found, err := topMount(dir)
		if err != nil {
			return err
		}
		if !found || !strings.HasPrefix(m.fsType, "fuse") || m.fsType == "fusectl" {
			return nil
		}
		answered, perr := probe(ctx, dir, o.Probe)
		// ECONNABORTED: it died while it was asked.
		dead := answered && (errors.Is(perr, unix.ENOTCONN) || errors.Is(perr, unix.ECONNABORTED))
		conn, err := m.conn()
		if err != nil {
			return err
		}
		if !answered {
			pid, known := owner(conn)
			dead = known && pid == 0
			if !dead {
				return errkind.Busy.Wrap("%s is mounted (%s, connection %d) and its daemon%s does not answer; end that daemon, or `umount -l %s`",
					dir, m.source, conn, pidText(pid), dir)
			}
		}
		if !dead {
			return errkind.Busy.Wrap("%s is already mounted (%s, type %s) by a daemon that is alive; unmount it first, or choose another mount point",
				dir, m.source, m.fsType)
		}
		if m.fsType != "fuse."+o.Subtype {
			return errkind.Busy.Wrap("%s holds a dead mount of another file system (%s, type %s); `umount -l %s` first",
				dir, m.source, m.fsType, dir)
		}
		o.Log.Warn("clearing the mount that a dead daemon left", "path", dir, "connection", conn)
		if err := Abort(conn); err != nil {
			o.Log.Warn("the dead daemon's connection could not be aborted", "connection", conn, "err", err)
		}
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount the stale mount on %s: %w", dir, err)
		}
	}
	return errkind.Busy.Wrap("more than %d dead mounts lie on %s; `umount -l` them", maxStacked, dir)
}

func pidText(pid int) string {
	if pid == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// probe asks the mount on dir for its space, which no kernel answers from a
// cache, as it does for attributes. When the mount does not answer in time, the
// asking goroutine stays until the connection is aborted.
func probe(ctx context.Context, dir string, limit time.Duration) (answered bool, err error) {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	got := make(chan error, 1)
	go func() {
		var st unix.Statfs_t
		got <- unix.Statfs(dir, &st)
	}()
	select {
	case err := <-got:
		return true, err
	case <-ctx.Done():
		return false, nil
	}
}

// owner finds the process that holds the connection's device and has not been
// killed. known is false when the kernel does not say whose a descriptor is.
func owner(conn int) (pid int, known bool) {
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, false
	}
	known = true
	for _, p := range procs {
		id, err := strconv.Atoi(filepath.Base(p))
		if err != nil || killed(p) {
			continue
		}
		fds, err := os.ReadDir(p + "/fd")
		if err != nil {
			continue // it has ended meanwhile
		}
		for _, fd := range fds {
			if dst, err := os.Readlink(p + "/fd/" + fd.Name()); err != nil || dst != "/dev/fuse" {
				continue
			}
			c, ok := fdConn(p + "/fdinfo/" + fd.Name())
			if !ok {
				known = false
			} else if c == conn {
				return id, true
			}
		}
	}
	return 0, known
}

// fdConn reads the connection number from a device descriptor's fdinfo.
func fdConn(path string) (int, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "fuse_connection:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(v))
			return n, err == nil
		}
	}
	return 0, false
}

// killed reports whether a process is a zombie, or has SIGKILL pending and is
// only kept by a request that nobody will answer.
func killed(proc string) bool {
	text, err := os.ReadFile(proc + "/status")
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(text)) {
		key, v, _ := strings.Cut(line, ":")
		v = strings.TrimSpace(v)
		switch key {
		case "State":
			if strings.HasPrefix(v, "Z") || strings.HasPrefix(v, "X") {
				return true
			}
		case "SigPnd", "ShdPnd":
			mask, err := strconv.ParseUint(v, 16, 64)
			if err == nil && mask&(1<<(uint(unix.SIGKILL)-1)) != 0 {
				return true
			}
		}
	}
	return false
}

// Abort ends a FUSE connection: every waiting and later request on it fails
// with ENOTCONN. Needs root.
func Abort(conn int) error {
	path := filepath.Join(fusectl, strconv.Itoa(conn), "abort")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		// The control file system may not be mounted yet.
		if err := unix.Mount("fusectl", fusectl, "fusectl", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", fusectl, err)
		}
	}
	if err := os.WriteFile(path, []byte("1"), 0o200); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("abort connection %d: %w", conn, err)
	}
	return nil
}
