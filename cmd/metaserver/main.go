// Command metaserver is a metadata server of ckptfs.
package main

import (
	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/metanode"
)

func main() { cli.Main(metanode.Command()) }
