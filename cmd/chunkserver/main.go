// Command chunkserver is a chunk server of ckptfs.
package main

import (
	"github.com/ckptfs/ckptfs/cmd/internal/chunknode"
	"github.com/ckptfs/ckptfs/cmd/internal/cli"
)

func main() { cli.Main(chunknode.Command()) }
