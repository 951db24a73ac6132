package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
)

// askBound is how long a command that only asks waits for an answer.
const askBound = 10 * time.Second

// ask runs fn with a connection to the metadata service.
func ask(ctx context.Context, meta []string, fn func(context.Context, *client.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	s := new(sched.Real)
	defer s.Wait()
	c, err := client.Dial(ctx, client.Config{
		Addrs: meta, Sched: s, Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		OpTimeout: askBound, NoSession: true,
	})
	if err != nil {
		return fmt.Errorf("reach the metadata service at %s: %w", strings.Join(meta, ","), err)
	}
	ferr := fn(ctx, c)
	if err := c.Close(ctx); ferr == nil {
		ferr = err
	}
	return ferr
}

// metaOf resolves META from a flag, or from the mount that holds the path.
func metaOf(flag []string, dir string) ([]string, error) {
	if len(flag) > 0 {
		return flag, nil
	}
	if dir == "" {
		return nil, cli.Usage(fmt.Errorf("name a mount point of this machine, or give --meta HOST:PORT of a metadata server"))
	}
	s, err := mountnode.ReadState(dir)
	if err != nil {
		return nil, err
	}
	if len(s.Meta) == 0 {
		return nil, fmt.Errorf("%s is not a ckptfs mount of this machine; give --meta", dir)
	}
	return s.Meta, nil
}

func statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status [MOUNT]",
		Short: "Show servers, disks, capacity and health of a cluster",
		Args:  usageArgs(cobra.MaximumNArgs(1)),
	}
	meta := cmd.Flags().StringSlice("meta", nil, "metadata servers, as `ADDR,…`; default: those of MOUNT")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		dir := ""
		if len(args) == 1 {
			dir = args[0]
		}
		addrs, err := metaOf(*meta, dir)
		if err != nil {
			return err
		}
		var s api.Status
		err = ask(cmd.Context(), addrs, func(ctx context.Context, c *client.Client) error {
			return c.Do(ctx, &api.GetStatus{}, &s)
		})
		if err != nil {
			return err
		}
		return cli.Print(cmd.OutOrStdout(), *asJSON, jsonStatus(&s), func(w io.Writer) error { return printStatus(w, &s) })
	}
	return cmd
}

// size prints bytes for people.
func size(n uint64) string { return humanize.IBytes(n) }

func printStatus(w io.Writer, s *api.Status) error {
	health := "ok"
	if len(s.Warnings) > 0 {
		health = "WARNING"
	}
	fmt.Fprintf(w, "cluster   %s   health %s\n", s.Map.Cluster, health)
	for _, one := range s.Warnings {
		fmt.Fprintf(w, "          %s\n", one)
	}
	fmt.Fprintf(w, "layout    %s (root)   incarnation %d   feature level %d\n", s.Totals.Layout, s.Map.Incarnation, s.FeatureLevel)
	fmt.Fprintf(w, "space     %s of %s free (raw)   %s live in %s inodes, %s blocks\n", size(s.Totals.Free), size(s.Totals.Capacity),
		size(s.Totals.Bytes), humanize.Comma(int64(s.Totals.Inodes)), humanize.Comma(int64(s.Blocks)))
	fmt.Fprintf(w, "work      %d to repair, %d chunks to delete, %d orphans, %d sessions\n\n", s.RepairQueue, s.DeadBlocks, s.Orphans, s.Sessions)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "META\tADDRESS\tROLE")
	for _, m := range s.Members {
		role := "follower"
		if m.Leader {
			role = "leader"
		}
		fmt.Fprintf(t, "%d\t%s\t%s\n", m.ID, m.Addr, role)
	}
	fmt.Fprintln(t, "\nDISK\tSERVER\tADDRESS\tHOST\tSTATE\tFREE\tSIZE")
	for _, d := range s.Map.Disks {
		v := s.Map.Server(d.Server)
		if v == nil {
			v = &cluster.Server{ID: d.Server}
		}
		fmt.Fprintf(t, "%d\t%d\t%s\t%s\t%s\t%s\t%s\n", d.ID, d.Server, v.Addr, v.Host, diskState(&d, v), size(d.Free), size(d.Capacity))
	}
	return t.Flush()
}

func diskState(d *cluster.Disk, s *cluster.Server) string {
	if !s.Up && d.State != cluster.DiskDead && d.State != cluster.DiskRemoved {
		return "down"
	}
	return d.State.String()
}
