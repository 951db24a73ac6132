package mountnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// State is what a mount leaves under /run for `ckptfs umount`, and for its
// successor: the secret lets that end the session of a daemon that was killed.
type State struct {
	PID    int      `json:"pid"`
	Secret ids.UUID `json:"secret"`
	Meta   []string `json:"meta"`
}

// statePath is the file for the mount on dir.
func statePath(dir string) (string, error) {
	run := "/run/ckptfs"
	if os.Geteuid() != 0 {
		run = filepath.Join(os.TempDir(), fmt.Sprintf("ckptfs-%d", os.Geteuid()))
	}
	if err := os.MkdirAll(run, 0o700); err != nil {
		return "", fmt.Errorf("directory for the state of mounts: %w", err)
	}
	name, err := fileName(dir)
	return filepath.Join(run, name+".json"), err
}

// fileName turns a mount point into the name of a file that is its own.
func fileName(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	// The parent may be a link; the mount point itself may be dead.
	if parent, err := filepath.EvalSymlinks(filepath.Dir(abs)); err == nil {
		abs = filepath.Join(parent, filepath.Base(abs))
	}
	return url.PathEscape(abs), nil
}

// LogFile is where the daemon of the mount on dir logs by default.
func LogFile(dir string) (string, error) {
	logs := "/var/log/ckptfs"
	if os.Geteuid() != 0 {
		logs = filepath.Join(os.TempDir(), fmt.Sprintf("ckptfs-%d", os.Geteuid()))
	}
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return "", fmt.Errorf("directory for the logs of mounts: %w", err)
	}
	name, err := fileName(dir)
	return filepath.Join(logs, name+".log"), err
}

// ReadState returns what the last mount on dir left; the zero State when there
// is nothing.
func ReadState(dir string) (State, error) {
	var s State
	path, err := statePath(dir)
	if err != nil {
		return s, err
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return State{}, fmt.Errorf("state of the mount on %s: %w", dir, err)
	}
	return s, nil
}

// Live reports whether the daemon that wrote the state still runs.
func (s State) Live() bool {
	if s.PID == 0 || s.PID == os.Getpid() {
		return false
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.PID))
	if err != nil || unix.Kill(s.PID, 0) != nil {
		return false
	}
	self, err := os.Executable()
	return err == nil && filepath.Base(exe) == filepath.Base(self) && !zombie(s.PID)
}

func zombie(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// The state follows the command, which is in parentheses and may hold any.
	for i := len(text) - 1; i > 1; i-- {
		if text[i] == ')' && i+2 < len(text) {
			return text[i+2] == 'Z' || text[i+2] == 'X'
		}
	}
	return true
}

func (m *Mount) saveState() {
	path, err := statePath(m.cfg.Dir)
	if err == nil {
		var text []byte
		text, err = json.Marshal(State{PID: os.Getpid(), Secret: m.meta.Secret(), Meta: m.cfg.Meta})
		if err == nil {
			err = os.WriteFile(path+".new", text, 0o600)
		}
		if err == nil {
			err = os.Rename(path+".new", path)
		}
	}
	if err != nil {
		m.log.Warn("the state of the mount could not be written: after a kill its session ends by time", "err", err)
	}
}

func removeState(dir string) error {
	path, err := statePath(dir)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
