package fuseconn

import (
	"context"
	"log/slog"
	"strings"
)

// ClearStale takes away the mounts that dead ckptfs daemons left on dir; nil
// when there are none. A mount whose daemon lives is an error of kind Busy.
func ClearStale(ctx context.Context, dir string, log *slog.Logger) error {
	o := Options{Log: log}.withDefaults()
	dir, err := resolve(dir)
	if err != nil {
		return err
	}
	return clearStale(ctx, dir, &o)
}

// Mounted reports whether a FUSE file system, alive or dead, is mounted on dir.
func Mounted(dir string) (bool, error) {
	dir, err := resolve(dir)
	if err != nil {
		return false, err
	}
	m, found, err := topMount(dir)
	return found && strings.HasPrefix(m.fsType, "fuse."), err
}
