package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
)

func layoutCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "layout",
		Short: "Show or set how files below a directory are protected",
		Long: `A layout says how the blocks of a file are protected: rs-K-M splits each block
into K data chunks and adds M parity chunks, any M of which may be lost;
copies-N keeps N whole copies. A file takes, when it is created, the layout of
the nearest directory above it that has one. Existing files keep theirs.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.Usage(fmt.Errorf("say what to do: %s get PATH, or %s set PATH LAYOUT", cmd.CommandPath(), cmd.CommandPath()))
		},
	}
	cmd.AddCommand(layoutGet(), layoutSet())
	return cmd
}

// target finds the metadata servers and the inode of a path below a mount. The
// kernel's inode number is the file system's own.
func target(path string) (meta []string, ino ids.Ino, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, 0, err
	}
	st, err := os.Stat(abs)
	if err != nil {
		return nil, 0, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, 0, fmt.Errorf("stat %s: no inode number", path)
	}
	for dir := abs; ; dir = filepath.Dir(dir) {
		s, err := mountnode.ReadState(dir)
		if err != nil {
			return nil, 0, err
		}
		if len(s.Meta) > 0 && s.Live() {
			return s.Meta, ids.Ino(sys.Ino), nil
		}
		if dir == filepath.Dir(dir) {
			return nil, 0, fmt.Errorf("%s is not below a ckptfs mount of this machine", path)
		}
	}
}

func layoutGet() *cobra.Command {
	cmd := &cobra.Command{Use: "get PATH", Short: "Show the layout of a file or directory", Args: usageArgs(cobra.ExactArgs(1))}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		meta, ino, err := target(args[0])
		if err != nil {
			return err
		}
		var got api.LayoutOf
		err = ask(cmd.Context(), meta, func(ctx context.Context, c *client.Client) error {
			return c.Do(ctx, &api.GetLayout{Ino: ino}, &got)
		})
		if err != nil {
			return fmt.Errorf("layout of %s: %w", args[0], err)
		}
		out := struct {
			Layout    string `json:"layout"`
			Inherited bool   `json:"inherited"`
		}{got.Effective.String(), got.Own.IsZero()}
		return cli.Print(cmd.OutOrStdout(), *asJSON, out, func(w io.Writer) error {
			from := ""
			if out.Inherited {
				from = " (inherited)"
			}
			_, err := fmt.Fprintf(w, "%s%s\n", out.Layout, from)
			return err
		})
	}
	return cmd
}

func layoutSet() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "set PATH LAYOUT",
		Short: "Set a directory's layout for files created below it from now on",
		Long:  "Set the layout of the directory PATH: rs-K-M, copies-N, or none to inherit again.",
		Args:  usageArgs(cobra.ExactArgs(2)),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var l ids.Layout
		var err error
		if args[1] != "none" {
			if l, err = ids.ParseLayout(args[1]); err != nil {
				return cli.Usage(err)
			}
		}
		meta, ino, err := target(args[0])
		if err != nil {
			return err
		}
		var got api.Entry
		err = ask(cmd.Context(), meta, func(ctx context.Context, c *client.Client) error {
			return c.Do(ctx, &api.SetLayout{Ino: ino, Layout: l}, &got)
		})
		if err != nil {
			return fmt.Errorf("set the layout of %s: %w", args[0], err)
		}
		return cli.Print(cmd.OutOrStdout(), *asJSON, map[string]string{"layout": l.String()}, func(io.Writer) error { return nil })
	}
	return cmd
}
