package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/chunknode"
	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/metanode"
	"github.com/ckptfs/ckptfs/cmd/internal/version"
)

func versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of the protocols it speaks",
		Args:  cobra.NoArgs,
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		i := version.Get()
		return cli.Print(cmd.OutOrStdout(), *asJSON, i, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "ckptfs %s (%s, metadata protocol %d, data protocol %d)\n", i.Version, i.Go, i.Metadata, i.Data)
			return err
		})
	}
	return cmd
}

func manCommand(root *cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "man --dir DIR",
		Short: "Write the manual pages of all programs",
		Args:  cobra.NoArgs,
	}
	dir := cmd.Flags().String("dir", "", "`DIR` to write into")
	if err := cmd.MarkFlagRequired("dir"); err != nil {
		panic(err) // the flag is defined one line above
	}
	cmd.RunE = func(*cobra.Command, []string) error {
		return cli.Man(*dir, root, metanode.Command(), chunknode.Command())
	}
	return cmd
}
