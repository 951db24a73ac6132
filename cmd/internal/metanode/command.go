package metanode

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/settings"
	"github.com/ckptfs/ckptfs/cmd/internal/version"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// stopBound is how long a stopping server may take to write its last flush.
const stopBound = 30 * time.Second

// Command is the program metaserver.
func Command() *cobra.Command {
	var cfg Config
	var d daemon.Config
	var layout string
	var peers []string
	cmd := &cobra.Command{
		Use:   "metaserver --dir DIR --listen ADDR",
		Short: "Run a metadata server of ckptfs",
		Long: `Run a metadata server: one voter alone, or one of a group that agrees by raft.

An empty DIR founds a new cluster; with --peers all members must be started
with the same list and the same --layout. Whatever was acknowledged is durable:
the server may be killed at any moment. SIGTERM stops it cleanly.`,
		Example: `  metaserver --dir /var/lib/ckptfs/meta --listen 10.0.0.1:7000
  metaserver --dir /srv/meta --listen 10.0.0.2:7000 --id 2 \
    --peers 1=10.0.0.1:7000,2=10.0.0.2:7000,3=10.0.0.3:7000`,
		Args:    cobra.NoArgs,
		Version: version.Version,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if cfg.Layout, err = ids.ParseLayout(layout); err != nil {
				return cli.Usage(fmt.Errorf("--layout: %w", err))
			}
			if cfg.Peers, err = ParsePeers(peers); err != nil {
				return cli.Usage(fmt.Errorf("--peers: %w", err))
			}
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
	f.StringVar(&cfg.Dir, "dir", "", "`DIR` of the log and the store; created when missing")
	f.StringVar(&cfg.Listen, "listen", "", "`ADDR` (HOST:PORT) for mounts, chunk servers and other members")
	f.Uint64Var(&cfg.ID, "id", 1, "this member's `ID` in the group")
	f.StringSliceVar(&peers, "peers", nil, "all members, this one included, as `ID=ADDR,…`; none: a single voter")
	f.StringVar(&layout, "layout", "rs-4-2", "`LAYOUT` of the root directory when the cluster is founded")
	d.AddFlags(f)
	settings.AddConfigFlag(cmd)
	return cmd
}

func run(ctx context.Context, cfg Config, d *daemon.Config) error {
	ctx, stop := daemon.Signals(ctx)
	defer stop()
	failed := make(chan error, 1)
	cfg.Log, cfg.Fatal = d.Logger(os.Stderr), func(err error) {
		select {
		case failed <- err:
		default: // the first one counts
		}
	}
	admin, err := daemon.StartAdmin(ctx, d.Admin, daemon.Registry(), cfg.Log)
	if err != nil {
		return err
	}
	defer admin.Close()
	n, err := Start(ctx, cfg)
	if err != nil {
		return err
	}
	cfg.Log.Info("metadata server ready", "addr", n.Addr(), "dir", cfg.Dir, "id", cfg.ID)
	daemon.Ready()
	select {
	case <-ctx.Done():
		daemon.Stopping()
	case err := <-failed:
		// The disk or the state cannot be trusted any more: nothing is flushed.
		return fmt.Errorf("metadata server: %w; what was acknowledged is in the log: repair the disk and start again", err)
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
	defer cancel()
	return n.Close(sctx)
}
