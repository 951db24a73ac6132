package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/embedded"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
	"github.com/ckptfs/ckptfs/cmd/internal/settings"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// stopBound is how long a stopping cluster may take to write its last flush.
const stopBound = 30 * time.Second

func upCommand() *cobra.Command {
	var cfg embedded.Config
	var m mountFlags
	var d daemon.Config
	cmd := &cobra.Command{
		Use:   "up --dir DIR [--mount MNT]",
		Short: "Run a whole cluster in this process",
		Long: `Run an embedded cluster in the foreground: one metadata server and a chunk server
for each disk, on the loopback interface, with everything under DIR. Starting it
again on the same DIR brings everything back. Ctrl-C unmounts and stops.`,
		Example: `  ckptfs up --dir /var/tmp/ckpt --mount /mnt/ckpt`,
		Args:    usageArgs(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "`DIR` that holds the cluster; created when missing")
	f.StringVar(&cfg.Listen, "listen", "", "`ADDR` of the metadata service; default: a free loopback port, kept for the next start")
	f.IntVar(&cfg.Disks, "disks", 0, "`NUMBER` of disks; default: as many as DIR has, or 6")
	layout := f.String("layout", "rs-4-2", "`LAYOUT` of the root directory of a new cluster")
	mnt := f.String("mount", "", "`DIR` to mount on; created when missing")
	m.add(f)
	d.AddFlags(f)
	settings.AddConfigFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := m.parse()
		if err == nil {
			cfg.Layout, err = ids.ParseLayout(*layout)
		}
		if err == nil {
			err = errors.Join(cfg.Validate(), d.Validate())
		}
		if err != nil {
			return cli.Usage(err)
		}
		return up(cmd, cfg, mountnode.Config{Dir: *mnt, Options: o}, &d)
	}
	return cmd
}

func up(cmd *cobra.Command, cfg embedded.Config, mc mountnode.Config, d *daemon.Config) (err error) {
	ctx, stop := daemon.Signals(cmd.Context())
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	cfg.Log, cfg.Fatal = d.Logger(os.Stderr), func(err error) { fail(err) }
	admin, err := daemon.StartAdmin(ctx, d.Admin, daemon.Registry(), cfg.Log)
	if err != nil {
		return err
	}
	defer admin.Close()
	c, err := embedded.Start(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() {
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
		defer cancel()
		err = errors.Join(err, c.Close(sctx))
	}()
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "cluster in %s: metadata at %s, %d disks\n", cfg.Dir, c.Meta(), c.Disks())
	if mc.Dir == "" {
		fmt.Fprintf(out, "mount it with: ckptfs mount %s DIR\n", c.Meta())
		daemon.Ready()
		<-ctx.Done()
		daemon.Stopping()
		return endCause(ctx)
	}
	if err := os.MkdirAll(mc.Dir, 0o755); err != nil {
		return err
	}
	mc.Meta, mc.Log = []string{c.Meta()}, cfg.Log
	mount, err := mountnode.Start(ctx, mc)
	if err != nil {
		return fmt.Errorf("mount %s: %w", mc.Dir, err)
	}
	fmt.Fprintf(out, "mounted on %s; mount it elsewhere with: ckptfs mount %s DIR\nCtrl-C unmounts and stops\n", mount.Dir(), c.Meta())
	daemon.Ready()
	if err := serveUntilGone(ctx, mount, mc); err != nil {
		return err
	}
	return endCause(ctx)
}

// endCause is the failure that ended ctx, nil when it was a signal or nothing.
func endCause(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil && ctx.Err() != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
