// Package testcluster runs a real cluster of separate processes for tests: it
// builds the programs, starts them on loopback ports, mounts, and can kill,
// stop and restart each of them.
package testcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// startBound is how long a process may take to become ready.
const startBound = 60 * time.Second

// Config is the shape of a cluster. Zero values mean the defaults.
type Config struct {
	Disks  int    // chunk servers with one disk each, every one a host of its own; 6
	Layout string // rs-4-2
	Metas  int    // metadata servers; 1
}

// Cluster is a running cluster.
type Cluster struct {
	t      testing.TB
	Dir    string
	bin    string
	Metas  []*Process
	Chunks []*Process
	metas  []string
}

var build struct {
	sync.Once
	dir string
	err error
}

// programs builds the programs once for the test binary.
func programs(t testing.TB) string {
	build.Do(func() {
		build.dir, build.err = os.MkdirTemp("", "ckptfs-bin-")
		if build.err != nil {
			return
		}
		cmd := exec.CommandContext(context.Background(), "go", "build", "-o", build.dir+"/",
			"github.com/ckptfs/ckptfs/cmd/ckptfs", "github.com/ckptfs/ckptfs/cmd/metaserver", "github.com/ckptfs/ckptfs/cmd/chunkserver")
		out, err := cmd.CombinedOutput()
		if err != nil {
			build.err = fmt.Errorf("build the programs: %w\n%s", err, out)
		}
	})
	require.NoError(t, build.err)
	return build.dir
}

// RemovePrograms deletes what programs built; call it at the end of TestMain.
func RemovePrograms() {
	if build.dir != "" {
		_ = os.RemoveAll(build.dir)
	}
}

// NeedMount skips the test, loudly, where file systems cannot be mounted.
func NeedMount(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("SKIPPED: no /dev/fuse here")
	}
}

// New starts a cluster; it ends with the test.
func New(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	if cfg.Disks == 0 {
		cfg.Disks = 6
	}
	if cfg.Layout == "" {
		cfg.Layout = "rs-4-2"
	}
	cfg.Metas = max(cfg.Metas, 1)
	c := &Cluster{t: t, Dir: t.TempDir(), bin: programs(t)}
	for range cfg.Metas {
		c.metas = append(c.metas, FreeAddr(t))
	}
	for i := range cfg.Metas {
		c.Metas = append(c.Metas, c.newMeta(i, cfg))
	}
	for i := range cfg.Disks {
		c.Chunks = append(c.Chunks, c.process(fmt.Sprintf("chunk%d", i), "chunkserver", "--meta", c.MetaAddrs(), "--listen", FreeAddr(t),
			"--disk", filepath.Join(c.Dir, fmt.Sprintf("disk%d", i)), "--host", fmt.Sprintf("host%d", i)))
	}
	for _, p := range append(append([]*Process{}, c.Metas...), c.Chunks...) {
		p.Start()
	}
	for _, p := range c.Chunks {
		p.WaitFor("chunk server ready")
	}
	return c
}

func (c *Cluster) newMeta(i int, cfg Config) *Process {
	args := []string{"--dir", filepath.Join(c.Dir, fmt.Sprintf("meta%d", i)), "--listen", c.metas[i], "--layout", cfg.Layout}
	if cfg.Metas > 1 {
		var peers []string
		for j, a := range c.metas {
			peers = append(peers, fmt.Sprintf("%d=%s", j+1, a))
		}
		args = append(args, "--id", fmt.Sprint(i+1), "--peers", strings.Join(peers, ","))
	}
	return c.process(fmt.Sprintf("meta%d", i), "metaserver", args...)
}

// MetaAddrs is the META argument of a mount.
func (c *Cluster) MetaAddrs() string { return strings.Join(c.metas, ",") }

// Binary is the path of a program.
func (c *Cluster) Binary(name string) string { return filepath.Join(c.bin, name) }

// FreeAddr returns a loopback address that nothing listens on now.
func FreeAddr(t testing.TB) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// MountProcess is a mount's daemon, in the foreground, and its mount point.
type MountProcess struct {
	*Process
	Path string
}

// Mount mounts the cluster; it is unmounted when the test ends.
func (c *Cluster) Mount(name string, args ...string) *MountProcess {
	c.t.Helper()
	path := filepath.Join(c.Dir, "mnt-"+name)
	require.NoError(c.t, os.MkdirAll(path, 0o755))
	p := c.process("mount-"+name, "ckptfs", append([]string{"mount", "-f", c.MetaAddrs(), path}, args...)...)
	m := &MountProcess{Process: p, Path: path}
	c.t.Cleanup(func() {
		p.Kill()
		_ = unix.Unmount(path, unix.MNT_DETACH) // fails when it is gone already
	})
	m.Up()
	return m
}

// Up starts the daemon and waits until the mount answers.
func (m *MountProcess) Up() {
	m.t.Helper()
	m.Start()
	require.Eventually(m.t, func() bool {
		if m.ended() {
			return true
		}
		var st unix.Statfs_t
		return unix.Statfs(m.Path, &st) == nil && st.Type == unix.FUSE_SUPER_MAGIC
	}, startBound, 20*time.Millisecond, "mount %s:\n%s", m.Path, m.Log())
	require.False(m.t, m.ended(), "the mount's daemon ended:\n%s", m.Log())
}

// Process is one program of the cluster. Its methods are not for concurrent use.
type Process struct {
	t    testing.TB
	name string
	path string
	args []string
	cmd  *exec.Cmd
	done chan struct{}
	log  logBuffer
}

func (c *Cluster) process(name, program string, args ...string) *Process {
	p := &Process{t: c.t, name: name, path: c.Binary(program), args: args}
	c.t.Cleanup(func() {
		p.Kill()
		if c.t.Failed() {
			c.t.Logf("log of %s:\n%s", name, p.Log())
		}
	})
	return p
}

// Start starts the process.
func (p *Process) Start() {
	p.t.Helper()
	p.log.mark()
	p.cmd = exec.CommandContext(context.Background(), p.path, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
	require.NoError(p.t, p.cmd.Start())
	done := make(chan struct{})
	p.done = done
	go func(cmd *exec.Cmd) {
		defer close(done)
		_ = cmd.Wait() // how it ended shows in its log
	}(p.cmd)
}

// WaitFor waits until this life of the process has logged text.
func (p *Process) WaitFor(text string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return p.ended() || p.log.since(text) }, startBound, 10*time.Millisecond, "%s:\n%s", p.name, p.Log())
	require.True(p.t, p.log.since(text), "%s ended:\n%s", p.name, p.Log())
}

func (p *Process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// PID of the running process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Kill ends the process by SIGKILL and waits.
func (p *Process) Kill() { p.end(syscall.SIGKILL) }

// Terminate ends it by SIGTERM, waits and returns how it ended.
func (p *Process) Terminate() *os.ProcessState {
	cmd := p.cmd
	p.end(syscall.SIGTERM)
	return cmd.ProcessState
}

func (p *Process) end(sig syscall.Signal) {
	if p.cmd == nil {
		return
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %s: %v", p.name, err)
	}
	<-p.done
	p.cmd = nil
}

// Signal sends a signal (SIGSTOP, SIGCONT).
func (p *Process) Signal(sig syscall.Signal) { require.NoError(p.t, p.cmd.Process.Signal(sig)) }

// Log is the end of what the process printed.
func (p *Process) Log() string { return p.log.tail() }

// logBuffer keeps a process's output.
type logBuffer struct {
	mu struct {
		sync.Mutex
		buf  bytes.Buffer
		from int // start of this life
	}
}

const logTail = 8 << 10

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.buf.Write(b)
}

func (l *logBuffer) mark() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.from = l.mu.buf.Len()
}

func (l *logBuffer) since(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.mu.buf.Bytes()[l.mu.from:], []byte(text))
}

func (l *logBuffer) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.mu.buf.Bytes()
	return string(b[max(0, len(b)-logTail):])
}
