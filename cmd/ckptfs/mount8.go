package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/daemon"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
)

// mountHelper is what mount(8) calls: SOURCE DIR [-sfnv] [-N ns] [-o opts] [-t type].
func mountHelper() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mount.fuse.ckptfs META[,META…] DIR [-o OPTIONS]",
		Short: "Mount ckptfs for mount(8)",
		Args:  usageArgs(cobra.ExactArgs(2)),
	}
	var lists []string
	f := cmd.Flags()
	f.StringArrayVarP(&lists, "options", "o", nil, "mount `OPTIONS`")
	fake := f.BoolP("fake", "f", false, "do all but mount")
	f.BoolP("sloppy", "s", false, "accepted and ignored")
	f.BoolP("no-mtab", "n", false, "accepted and ignored")
	f.BoolP("verbose", "v", false, "accepted and ignored")
	f.StringP("namespace", "N", "", "accepted and ignored")
	f.StringP("type", "t", "", "accepted and ignored")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o := mountnode.Options{OpTimeout: mountnode.DefaultOpTimeout, KernelTimeout: mountnode.DefaultKernelTimeout}
		for _, l := range lists {
			if err := o.Set(l); err != nil {
				return cli.Usage(err)
			}
		}
		if err := o.Validate(); err != nil {
			return cli.Usage(err)
		}
		if *fake {
			return nil
		}
		if os.Getenv(readyEnv) == "" {
			return background(args[1], "")
		}
		d := daemon.Config{LogLevel: "info", LogFormat: "text"}
		cfg := mountnode.Config{Meta: strings.Split(args[0], ","), Dir: args[1], Options: o}
		return serveMount(cmd.Context(), cfg, &d)
	}
	return cmd
}

// umountHelper is what umount(8) calls: DIR [-flnrv] [-N ns] [-t type].
func umountHelper() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "umount.fuse.ckptfs DIR",
		Short: "Unmount ckptfs for umount(8)",
		Args:  usageArgs(cobra.ExactArgs(1)),
	}
	f := cmd.Flags()
	lazy := f.BoolP("lazy", "l", false, "take the mount away although files are in use")
	force := f.BoolP("force", "f", false, "as --lazy")
	f.BoolP("no-mtab", "n", false, "accepted and ignored")
	f.BoolP("read-only", "r", false, "accepted and ignored")
	f.BoolP("verbose", "v", false, "accepted and ignored")
	f.StringP("namespace", "N", "", "accepted and ignored")
	f.StringP("type", "t", "", "accepted and ignored")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		return mountnode.Unmount(args[0], mountnode.DefaultOpTimeout, *lazy || *force)
	}
	return cmd
}

func umountCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "umount DIR",
		Short: "Unmount, and wait until everything is stored",
		Long: `Unmount DIR and return when the mount's daemon has committed everything and
ended, or after --op-timeout. The mount of a killed daemon is cleared.`,
		Args: usageArgs(cobra.ExactArgs(1)),
	}
	timeout := cmd.Flags().Duration("op-timeout", mountnode.DefaultOpTimeout, "how long to wait for the daemon, as a `DURATION`; 0: for ever")
	lazy := cmd.Flags().BoolP("lazy", "l", false, "take the mount away although files are in use")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		return mountnode.Unmount(args[0], *timeout, *lazy)
	}
	return cmd
}
