package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
	"github.com/ckptfs/ckptfs/cmd/internal/settings"
)

// readyEnv names the descriptor on which a daemon in the background tells its
// parent that the mount answers, or why it does not.
const readyEnv = "CKPTFS_READY_FD"

// dialBound is how long a mount looks for the metadata service.
const dialBound = 30 * time.Second

// mountFlags are the flags of mount and of up.
type mountFlags struct {
	options       []string
	bufferSize    string
	opTimeout     string
	kernelTimeout time.Duration
	readMode      string
}

func (m *mountFlags) add(f *pflag.FlagSet) {
	f.StringArrayVarP(&m.options, "options", "o", nil, "mount `OPTIONS`, comma-separated, as mount(8) has them; buffer_size=, op_timeout=, kernel_timeout=, read_mode= too")
	f.StringVar(&m.bufferSize, "buffer-size", "", "memory `BYTES` for data on its way, as 512MiB; default: 1GiB or an eighth of the RAM, the smaller")
	f.StringVar(&m.opTimeout, "op-timeout", "60s", "how long a call may wait for servers, as a `DURATION`; 0: for ever")
	f.DurationVar(&m.kernelTimeout, "kernel-timeout", mountnode.DefaultKernelTimeout, "longest `TIME` that the kernel keeps names and attributes under a lease")
	f.StringVar(&m.readMode, "read-mode", "auto", "how files opened for reading are read, as `MODE`: auto, direct or cached")
}

func (m *mountFlags) parse() (mountnode.Options, error) {
	o := mountnode.Options{KernelTimeout: m.kernelTimeout, ReadMode: m.readMode}
	if err := o.Set("op_timeout=" + m.opTimeout); err != nil {
		return o, fmt.Errorf("--op-timeout: %w", err)
	}
	if m.bufferSize != "" {
		if err := o.Set("buffer_size=" + m.bufferSize); err != nil {
			return o, fmt.Errorf("--buffer-size: %w", err)
		}
	}
	for _, list := range m.options {
		if err := o.Set(list); err != nil {
			return o, err
		}
	}
	return o, o.Validate()
}

func mountCommand() *cobra.Command {
	var m mountFlags
	var d daemon.Config
	cmd := &cobra.Command{
		Use:   "mount META[,META…] DIR",
		Short: "Mount a cluster's file system",
		Long: `Mount the file system of the cluster whose metadata servers listen at META on the
directory DIR. The command returns when the mount answers; the daemon goes on
in the background (-f keeps it in the foreground). A mount that a killed daemon
left on DIR is cleared first.`,
		Example: `  ckptfs mount 10.0.0.1:7000 /mnt/ckpt
  mount -t fuse.ckptfs -o noatime 10.0.0.1:7000,10.0.0.2:7000 /mnt/ckpt`,
		Args: usageArgs(cobra.ExactArgs(2)),
	}
	foreground := cmd.Flags().BoolP("foreground", "f", false, "stay in the foreground")
	logFile := cmd.Flags().String("log-file", "", "`FILE` that the daemon in the background logs to; default: one a mount under /var/log/ckptfs")
	m.add(cmd.Flags())
	d.AddFlags(cmd.Flags())
	settings.AddConfigFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := m.parse()
		if err == nil {
			err = d.Validate()
		}
		if err != nil {
			return cli.Usage(err)
		}
		cfg := mountnode.Config{Meta: strings.Split(args[0], ","), Dir: args[1], Options: o}
		if *foreground || os.Getenv(readyEnv) != "" {
			return serveMount(cmd.Context(), cfg, &d)
		}
		return background(cfg.Dir, *logFile)
	}
	return cmd
}

func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return cli.Usage(fmt.Errorf("%w; usage: %s", err, cmd.UseLine()))
		}
		return nil
	}
}

// serveMount mounts, says so, and serves until the mount is gone.
func serveMount(ctx context.Context, cfg mountnode.Config, d *daemon.Config) (err error) {
	ready := announcer()
	defer func() { ready(err) }()
	ctx, stop := daemon.Signals(ctx)
	defer stop()
	cfg.Log = d.Logger(os.Stderr)
	admin, err := daemon.StartAdmin(ctx, d.Admin, daemon.Registry(), cfg.Log)
	if err != nil {
		return err
	}
	defer admin.Close()
	dctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	m, err := mountnode.Start(dctx, cfg)
	if err != nil {
		return fmt.Errorf("mount %s: %w", cfg.Dir, err)
	}
	ready(nil)
	daemon.Ready()
	return serveUntilGone(ctx, m, cfg)
}

// serveUntilGone waits for the mount's end, or for a signal, which unmounts.
func serveUntilGone(ctx context.Context, m *mountnode.Mount, cfg mountnode.Config) error {
	// Every wait below is bounded by the operation time-out already.
	bound := context.WithoutCancel(ctx)
	select {
	case <-m.Done():
	case <-ctx.Done():
		daemon.Stopping()
		if err := m.Unmount(bound); err != nil {
			cfg.Log.Warn("files are in use: the mount is taken away all the same", "mount", cfg.Dir, "err", err)
			if err := m.Kill(); err != nil {
				return err
			}
		}
	}
	return m.Close(bound)
}

// announcer returns a function that tells the parent, once, how mounting went.
func announcer() func(error) {
	var fd int
	if _, err := fmt.Sscan(os.Getenv(readyEnv), &fd); err != nil {
		return func(error) {}
	}
	f := os.NewFile(uintptr(fd), "ready")
	_ = os.Unsetenv(readyEnv)
	return func(err error) {
		if f == nil {
			return
		}
		if err == nil {
			fmt.Fprintln(f, "ready")
		} else {
			fmt.Fprintln(f, err)
		}
		_ = f.Close()
		f = nil
	}
}

// background starts this program again, detached from the terminal and its
// log in a file, and returns when its mount answers or has failed. The daemon
// must not keep the caller's output open: whoever reads that would wait for
// the unmount.
func background(dir, logFile string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if logFile == "" {
		if logFile, err = mountnode.LogFile(dir); err != nil {
			return err
		}
	}
	out, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("log of the mount: %w", err)
	}
	defer out.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	child := exec.CommandContext(context.Background(), exe, os.Args[1:]...)
	child.Args[0] = os.Args[0]
	child.Env = append(os.Environ(), readyEnv+"=3")
	child.ExtraFiles = []*os.File{w}
	child.Stdout, child.Stderr = out, out
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start the mount's daemon: %w", err)
	}
	_ = w.Close()
	said, err := io.ReadAll(io.LimitReader(r, maxAnnounced))
	if err != nil {
		return err
	}
	if string(said) == "ready\n" {
		return child.Process.Release()
	}
	_ = child.Wait() // what it said, or its log, tells more than its status
	if len(said) > 0 {
		return errors.New(strings.TrimSuffix(string(said), "\n"))
	}
	return fmt.Errorf("the mount's daemon ended before the mount answered; see %s", logFile)
}

// maxAnnounced bounds what a daemon says of how mounting went, in bytes.
const maxAnnounced = 16 << 10
