package chunknode

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/settings"
	"github.com/ckptfs/ckptfs/cmd/internal/version"
)

// Command is the program chunkserver.
func Command() *cobra.Command {
	var cfg Config
	var d daemon.Config
	cmd := &cobra.Command{
		Use:   "chunkserver --meta ADDR[,ADDR…] --listen ADDR --disk DIR [--disk DIR…]",
		Short: "Run a chunk server of ckptfs",
		Long: `Run a chunk server: it keeps chunks in one directory a disk.

An empty directory becomes a new disk of the cluster that --meta leads to. The
server and its disks keep their identity over restarts; a disk of another
cluster is refused. The server may be killed at any moment: whatever was
acknowledged is durable. SIGTERM drains it.`,
		Example: `  chunkserver --meta 10.0.0.1:7000 --listen 10.0.0.5:7100 --disk /data/0 --disk /data/1`,
		Args:    cobra.NoArgs,
		Version: version.Version,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return cli.Usage(err)
			}
			if err := d.Validate(); err != nil {
				return cli.Usage(err)
			}
			return run(cmd.Context(), cfg, &d)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&cfg.Meta, "meta", nil, "metadata servers, as `ADDR,…`")
	f.StringVar(&cfg.Listen, "listen", "", "`ADDR` (HOST:PORT) of the data protocol")
	f.StringVar(&cfg.Advertise, "advertise", "", "`ADDR` that clients are told; default: the one it listens on")
	f.StringArrayVar(&cfg.Disks, "disk", nil, "`DIR` of a disk; repeat for each; created when missing")
	f.StringVar(&cfg.Host, "host", "", "`NAME` of the failure domain; default: the machine's host name")
	f.StringVar(&cfg.Rack, "rack", "", "`NAME` of the wider failure domain")
	d.AddFlags(f)
	settings.AddConfigFlag(cmd)
	return cmd
}

func run(ctx context.Context, cfg Config, d *daemon.Config) error {
	ctx, stop := daemon.Signals(ctx)
	defer stop()
	cfg.Log = d.Logger(os.Stderr)
	admin, err := daemon.StartAdmin(ctx, d.Admin, daemon.Registry(), cfg.Log)
	if err != nil {
		return err
	}
	defer admin.Close()
	n, err := Start(ctx, cfg)
	if err != nil {
		return err
	}
	cfg.Log.Info("chunk server ready", "addr", n.Addr(), "disks", cfg.Disks)
	daemon.Ready()
	<-ctx.Done()
	daemon.Stopping()
	return n.Close()
}
