package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/bench/ranks"
	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/embedded"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// demo is one run of the demonstration.
type demo struct {
	ranks int
	job   ranks.Job
	base  string // temporary directory
	mnt   string
	log   *slog.Logger
	out   io.Writer
	c     *embedded.Cluster
	mount *mountnode.Mount
	rows  []demoRow
}

type demoRow struct {
	what string
	t    ranks.Total
}

func demoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Save a checkpoint, load it, kill a disk and load it again",
		Long: `Bring up an embedded cluster (6 disks, rs-4-2) in a temporary directory, mount it,
save a checkpoint from several ranks, load it back cold and verified, kill a disk,
load it again, print a table and clean up.`,
		Args: usageArgs(cobra.NoArgs),
	}
	d := demo{}
	f := cmd.Flags()
	f.IntVar(&d.ranks, "ranks", 8, "`NUMBER` of rank processes")
	shard := f.String("shard", "64MiB", "`BYTES` of each rank's shard, a multiple of 1MiB")
	dir := f.String("dir", "", "`DIR` for the temporary cluster; default: the system's temporary directory")
	// One rank is this program again.
	one := f.Int("rank", -1, "be one rank")
	work := f.String("work", "", "what the rank does")
	where := f.String("where", "", "where the rank works")
	for _, hidden := range []string{"rank", "work", "where"} {
		if err := f.MarkHidden(hidden); err != nil {
			panic(err) // the flag is defined above
		}
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		n, err := mountnode.ParseSize(*shard)
		if err != nil || n < 1<<20 || n%(1<<20) != 0 || d.ranks < 1 {
			return cli.Usage(errors.Join(fmt.Errorf("--shard %s, --ranks %d: want at least one rank and whole MiB", *shard, d.ranks), err))
		}
		d.job = ranks.Job{Dir: *where, Size: n, Block: 1 << 20, Fsync: true}
		if *one >= 0 {
			return demoRank(d.job, *work, *one)
		}
		d.out = cmd.OutOrStdout()
		return d.run(cmd.Context(), *dir)
	}
	return cmd
}

func demoRank(j ranks.Job, work string, rank int) error {
	fn := ranks.Load
	if work == "save" {
		fn = ranks.Save
	}
	return ranks.Rank(func() (ranks.Result, error) { return fn(j, rank) }, os.Stdin, os.Stdout)
}

func (d *demo) run(ctx context.Context, dir string) (err error) {
	ctx, stop := daemon.Signals(ctx)
	defer stop()
	if d.base, err = os.MkdirTemp(dir, "ckptfs-demo-"); err != nil {
		return err
	}
	d.mnt = filepath.Join(d.base, "mnt")
	d.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	defer func() { err = errors.Join(err, d.cleanUp(ctx)) }()
	if err := os.Mkdir(d.mnt, 0o755); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "bringing up a cluster in %s: 1 metadata server, %d disks, rs-4-2\n", d.base, embedded.DefaultDisks)
	d.c, err = embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(d.base, "cluster"), Layout: ids.RS(4, 2), Log: d.log,
		Fatal: func(err error) { d.log.Error("the metadata server failed", "err", err) },
	})
	if err != nil {
		return err
	}
	if err := d.steps(ctx); err != nil {
		return err
	}
	return d.table()
}

func (d *demo) steps(ctx context.Context) error {
	if err := d.remount(ctx); err != nil {
		return err
	}
	step := filepath.Join(d.mnt, "step_100")
	if err := os.Mkdir(step+".tmp", 0o755); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "saving a checkpoint from %d ranks, then renaming it to its final name\n", d.ranks)
	if err := d.measure(ctx, "save", "save", step+".tmp"); err != nil {
		return err
	}
	if err := os.Rename(step+".tmp", step); err != nil {
		return err
	}
	fmt.Fprintln(d.out, "loading it back cold, every byte checked")
	if err := d.remount(ctx); err != nil {
		return err
	}
	if err := d.measure(ctx, "load", "load", step); err != nil {
		return err
	}
	fmt.Fprintln(d.out, "killing a disk and loading it again")
	if err := d.remount(ctx); err != nil {
		return err
	}
	if err := d.c.StopDisk(1); err != nil {
		return err
	}
	return d.measure(ctx, "load", "load, 1 disk dead", step)
}

// remount mounts, or mounts anew so that no cache is warm.
func (d *demo) remount(ctx context.Context) error {
	if d.mount != nil {
		if err := d.mount.Unmount(ctx); err != nil {
			return err
		}
		if err := d.mount.Close(ctx); err != nil {
			return err
		}
		d.mount = nil
	}
	if os.Geteuid() == 0 {
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
			d.log.Warn("the kernel's caches stay warm", "err", err)
		}
	}
	var err error
	d.mount, err = mountnode.Start(ctx, mountnode.Config{
		Meta: []string{d.c.Meta()}, Dir: d.mnt, Log: d.log,
		Options: mountnode.Options{OpTimeout: mountnode.DefaultOpTimeout, KernelTimeout: mountnode.DefaultKernelTimeout},
	})
	return err
}

func (d *demo) measure(ctx context.Context, work, what, where string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	size := strconv.FormatInt(d.job.Size>>20, 10) + "MiB"
	t, err := ranks.Processes(ctx, d.ranks, []string{self, "demo", "--shard", size, "--work", work, "--where", where, "--rank"})
	if err != nil {
		return err
	}
	d.rows = append(d.rows, demoRow{what, t})
	return nil
}

func (d *demo) table() error {
	w := tabwriter.NewWriter(d.out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\n\tMiB/s\tseconds\tslowest rank\tits seconds\tlongest call\tCPU-s/GB\t")
	for _, r := range d.rows {
		fmt.Fprintf(w, "%s\t%.0f\t%.2f\t%d\t%.2f\t%s %.0f ms\t%.1f\t\n", r.what, r.t.MiBs(), r.t.Seconds, r.t.Slowest.Rank,
			r.t.Slowest.Seconds, r.t.Longest.LongestCall, r.t.Longest.Longest*1000, r.t.CPUPerGB())
	}
	return w.Flush()
}

func (d *demo) cleanUp(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	if d.mount != nil {
		if err := d.mount.Unmount(ctx); err != nil {
			errs = append(errs, err, d.mount.Kill())
		}
		errs = append(errs, d.mount.Close(ctx))
	}
	if d.c != nil {
		errs = append(errs, d.c.Close(ctx))
	}
	return errors.Join(append(errs, os.RemoveAll(d.base))...)
}
