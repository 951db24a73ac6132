package fuseconn

import (
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
)

const pagesLimit = "/proc/sys/fs/fuse/max_pages_limit"

func stack() string { return string(debug.Stack()) }

// raisePages raises the kernel's limit of pages in one request to at least n.
// It never lowers it. The limit belongs to the whole machine; it is only a
// bound on what a daemon may ask for.
func raisePages(n int) error {
	text, err := os.ReadFile(pagesLimit)
	if err != nil {
		return fmt.Errorf("read %s: %w", pagesLimit, err)
	}
	have, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("read %s: %w", pagesLimit, err)
	}
	if have >= n {
		return nil
	}
	if err := os.WriteFile(pagesLimit, []byte(strconv.Itoa(n)), 0o644); err != nil {
		return fmt.Errorf("raise %s from %d to %d: %w", pagesLimit, have, n, err)
	}
	return nil
}

// setReadAhead sets the read-ahead of the mount with device dev, in bytes.
func setReadAhead(dev string, n int) error {
	path := "/sys/class/bdi/" + dev + "/read_ahead_kb"
	if err := os.WriteFile(path, []byte(strconv.Itoa(n>>10)), 0o644); err != nil {
		return fmt.Errorf("set read-ahead of mount %s: %w", dev, err)
	}
	return nil
}
