// Command ckptfs is the client and operator's side of ckptfs: mounts, the
// embedded cluster, and the state of a cluster.
package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/version"
)

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ckptfs",
		Short: "A distributed checkpoint store for model training",
		Long: `ckptfs is a distributed checkpoint store for model training, used through a
mount. ` + "`ckptfs up`" + ` brings up a whole cluster in one process; metaserver and
chunkserver are the programs of a real one.

Exit status: 0 done, 1 failed, 2 wrong command line or configuration.`,
		Version: version.Version,
	}
	cmd.AddCommand(upCommand(), mountCommand(), umountCommand(), statusCommand(), layoutCommand(),
		demoCommand(), versionCommand(), manCommand(cmd))
	return cmd
}

func main() {
	// mount(8) and umount(8) call us by these names.
	switch filepath.Base(os.Args[0]) {
	case "mount.fuse.ckptfs", "mount.ckptfs":
		cli.Main(mountHelper())
	case "umount.fuse.ckptfs", "umount.ckptfs":
		cli.Main(umountHelper())
	default:
		cli.Main(root())
	}
}
