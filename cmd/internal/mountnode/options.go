package mountnode

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
)

// Options are what -o and the flags of a mount can say.
type Options struct {
	// Kernel are mount flags and FUSE options that go to the kernel as they are.
	Kernel []string
	// BufferSize is the memory budget in bytes; 0 means the default: 1 GiB or
	// an eighth of the RAM, the smaller.
	BufferSize int64
	// OpTimeout bounds every call; 0 waits for ever.
	OpTimeout time.Duration
	// KernelTimeout caps how long the kernel may keep names and attributes.
	KernelTimeout time.Duration
	// ReadMode is auto, direct or cached: how files opened for reading are read.
	ReadMode string
}

// Defaults of a mount.
const (
	DefaultOpTimeout     = 60 * time.Second
	DefaultKernelTimeout = 200 * time.Millisecond
)

// kernelOptions are passed on; the others of mount(8) that mean something to
// mount(8) alone are dropped.
var (
	kernelOptions = []string{
		"ro", "rw", "dev", "nodev", "suid", "nosuid", "exec", "noexec", "atime", "noatime",
		"diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime",
		"sync", "async", "dirsync", "allow_other", "default_permissions",
	}
	ignoredOptions = []string{"defaults", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "group", "owner"}
)

// Set applies one comma-separated -o list.
func (o *Options) Set(list string) error {
	for _, one := range strings.Split(list, ",") {
		if err := o.setOne(one); err != nil {
			return err
		}
	}
	return nil
}

func (o *Options) setOne(one string) error {
	name, value, hasValue := strings.Cut(one, "=")
	switch {
	case name == "" || slices.Contains(ignoredOptions, name) || strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "comment"):
		return nil
	case slices.Contains(kernelOptions, name) && !hasValue:
		o.Kernel = append(o.Kernel, name)
		return nil
	}
	bad := func(err error) error { return fmt.Errorf("mount option %q: %w", one, err) }
	switch name {
	case "buffer_size":
		n, err := ParseSize(value)
		if err != nil {
			return bad(err)
		}
		o.BufferSize = n
	case "op_timeout":
		return setDuration(&o.OpTimeout, value, bad)
	case "kernel_timeout":
		return setDuration(&o.KernelTimeout, value, bad)
	case "read_mode":
		o.ReadMode = value
	default:
		return bad(fmt.Errorf("unknown; known are %s, buffer_size=, op_timeout=, kernel_timeout=, read_mode=", strings.Join(kernelOptions, ", ")))
	}
	return nil
}

func setDuration(d *time.Duration, value string, bad func(error) error) error {
	if value == "0" {
		*d = 0
		return nil
	}
	v, err := time.ParseDuration(value)
	if err != nil || v < 0 {
		return bad(fmt.Errorf("want a duration, as 60s, or 0 for no bound"))
	}
	*d = v
	return nil
}

// ParseSize reads a number of bytes with an optional unit: 1GiB, 512M (powers
// of 1024 for K, M, G and KiB, MiB, GiB).
func ParseSize(s string) (int64, error) {
	t := strings.TrimSuffix(strings.TrimSuffix(s, "iB"), "B")
	if t != "" && !strings.ContainsAny(t[len(t)-1:], "0123456789") {
		t += "iB"
	}
	n, err := humanize.ParseBytes(t)
	if err != nil || n > 1<<62 || strings.HasPrefix(s, "-") {
		return 0, fmt.Errorf("size %q: want a number with an optional K, M, G or KiB, MiB, GiB", s)
	}
	return int64(n), nil
}

// Validate reports the first wrong option.
func (o *Options) Validate() error {
	if o.BufferSize != 0 && o.BufferSize < MinBuffer {
		return fmt.Errorf("buffer size %s: want at least %s", humanize.IBytes(uint64(o.BufferSize)), humanize.IBytes(MinBuffer))
	}
	switch o.ReadMode {
	case "", "auto", "direct", "cached":
		return nil
	}
	return fmt.Errorf("read mode %q: want auto, direct or cached", o.ReadMode)
}

// MinBuffer is the smallest memory budget of a mount, in bytes.
const MinBuffer = 64 << 20
