// Package simcluster runs a whole cluster in one process in a simulated world:
// metadata servers on a simulated log and store, chunk servers on simulated
// disks, mounts with their file engines, all joined by a network that delays,
// reorders, stalls and cuts. The parts are those of the programs, wired in the
// same way; only sockets, bbolt, the machine's disks and FUSE are replaced.
//
// Everything runs as tasks of one sim.World, one at a time: the package needs
// no lock. Methods that may wait say so, and must be called from a task, most
// simply from the function that Run gets.
package simcluster

import (
	"log/slog"
	"time"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// Config is the shape of a cluster. Zero values take the default.
type Config struct {
	Metas   int        // metadata servers: 1 (default) or 3
	Servers int        // chunk servers, each a host of its own; default 6
	Disks   int        // disks of each; default 1
	Layout  ids.Layout // of the root; default rs-4-2 with cells of 64 KiB

	DiskSize  int64         // bytes; default 1 GiB
	Budget    int64         // buffers of a mount's engine, bytes; default 4 MiB
	OpTimeout time.Duration // of a mount; default 1 min
	MaxDelay  time.Duration // of a message on the network, usually; default 1 ms
	Log       *slog.Logger
}

func (c *Config) setDefaults() {
	def(&c.Metas, 1)
	def(&c.Servers, 6)
	def(&c.Disks, 1)
	def(&c.Layout, ids.Layout{Kind: ids.LayoutRS, K: 4, M: 2, CellLog: ids.MinCellLog})
	def(&c.DiskSize, 1<<30)
	def(&c.Budget, 4<<20)
	def(&c.OpTimeout, time.Minute)
	def(&c.MaxDelay, time.Millisecond)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
