package fuseconn

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// mountEntry is one line of /proc/self/mountinfo.
type mountEntry struct {
	dev    string // MAJOR:MINOR
	point  string
	fsType string
	source string
}

// conn is the number of the FUSE connection behind the mount: the minor device
// number, since FUSE mounts have anonymous devices.
func (m mountEntry) conn() (int, error) {
	_, minor, _ := strings.Cut(m.dev, ":")
	n, err := strconv.Atoi(minor)
	if err != nil {
		return 0, fmt.Errorf("device number %q of mount %s: %w", m.dev, m.point, err)
	}
	return n, nil
}

// parseMountinfo reads lines in the format of proc_pid_mountinfo(5). Lines that
// it does not understand are left out.
func parseMountinfo(r io.Reader) ([]mountEntry, error) {
	var all []mountEntry
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		left, right, ok := strings.Cut(s.Text(), " - ")
		a, b := strings.Fields(left), strings.Fields(right)
		if !ok || len(a) < 6 || len(b) < 2 {
			continue
		}
		all = append(all, mountEntry{dev: a[2], point: unescape(a[4]), fsType: b[0], source: unescape(b[1])})
	}
	return all, s.Err()
}

// unescape undoes the kernel's \ooo for blanks and backslashes in paths.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// topMount is what is mounted at exactly dir, the last when several are.
func topMount(dir string) (mountEntry, bool, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return mountEntry{}, false, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	all, err := parseMountinfo(f)
	if err != nil {
		return mountEntry{}, false, fmt.Errorf("list mounts: %w", err)
	}
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].point == dir {
			return all[i], true, nil
		}
	}
	return mountEntry{}, false, nil
}
