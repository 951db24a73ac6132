package simcluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Cluster is a cluster in a world of its own.
type Cluster struct {
	World *sim.World

	cfg     Config
	id      ids.UUID
	net     *network
	metas   []*metaNode
	chunks  []*chunkNode
	mounts  []*Mount
	secrets map[string]ids.UUID // of the last session of each mount
	broken  error
}

// New makes a cluster whose whole run follows from seed. Nothing is up yet.
func New(seed uint64, cfg Config) *Cluster {
	cfg.setDefaults()
	c := &Cluster{World: sim.NewWorld(seed), cfg: cfg, secrets: map[string]ids.UUID{}}
	c.id = c.newUUID()
	c.net = newNetwork(c.World, cfg.MaxDelay)
	for i := range cfg.Metas {
		c.metas = append(c.metas, &metaNode{
			c: c, id: uint64(i + 1), addr: fmt.Sprintf("meta%d", i+1), disk: vfs.NewMem(), store: kv.NewMem(),
		})
	}
	for i := range cfg.Servers {
		n := &chunkNode{c: c, addr: fmt.Sprintf("chunk%d", i+1)}
		for range cfg.Disks {
			n.disks = append(n.disks, c.newDisk())
		}
		c.chunks = append(c.chunks, n)
	}
	return c
}

// Run runs fn as a task until it returns, for at most limit of virtual time.
// It returns fn's error, or what made the run impossible; the first broken
// promise of a part that the cluster itself noticed goes before both.
func (c *Cluster) Run(limit time.Duration, fn func() error) error {
	var err error
	done := false
	c.World.Go("run", func() {
		err = fn()
		done = true
	})
	stuck := c.World.Run(limit, func() bool { return done || c.broken != nil })
	switch {
	case c.broken != nil:
		return c.broken
	case stuck != nil:
		return stuck
	}
	return err
}

// Close unwinds all tasks. The cluster cannot be used afterwards.
func (c *Cluster) Close() { c.World.Close() }

// Boot starts every server. It waits.
func (c *Cluster) Boot() error {
	for i := range c.metas {
		if err := c.RestartMeta(i); err != nil {
			return err
		}
	}
	for i := range c.chunks {
		if err := c.RestartChunk(i); err != nil {
			return err
		}
	}
	return nil
}

// Stop unmounts and stops everything in good order. It waits.
func (c *Cluster) Stop() error {
	var errs []error
	for _, m := range slices.Clone(c.mounts) {
		errs = append(errs, m.Close())
	}
	for _, n := range c.chunks {
		if n.life != nil {
			errs = append(errs, n.life.close())
			n.life = nil
		}
	}
	for _, m := range c.metas {
		if m.life != nil {
			m.life.server.Close()
			errs = append(errs, m.life.replica.Close(context.Background()))
			m.life = nil
		}
	}
	return errors.Join(errs...)
}

// CrashChunk kills chunk server i: its disks lose what was not synced.
func (c *Cluster) CrashChunk(i int) {
	c.World.Trace("crash %s", c.chunks[i].addr)
	c.chunks[i].crash()
}

// RestartChunk starts chunk server i. It waits for the metadata service.
func (c *Cluster) RestartChunk(i int) error {
	c.World.Trace("start %s", c.chunks[i].addr)
	return c.chunks[i].start()
}

// LoseDisks replaces the disks of chunk server i, which must be down, by empty
// ones.
func (c *Cluster) LoseDisks(i int) {
	c.World.Trace("%s loses its disks", c.chunks[i].addr)
	for j := range c.chunks[i].disks {
		c.chunks[i].disks[j] = c.newDisk()
	}
}

func (c *Cluster) newDisk() *vfs.Mem {
	f := vfs.NewMem()
	f.SetCapacity(c.cfg.DiskSize)
	return f
}

// ChunkUp reports whether chunk server i runs.
func (c *Cluster) ChunkUp(i int) bool { return c.chunks[i].life != nil }

// CrashMeta kills metadata server i: its disk loses what was not synced.
func (c *Cluster) CrashMeta(i int) {
	c.World.Trace("crash %s", c.metas[i].addr)
	c.metas[i].crash()
}

// RestartMeta starts metadata server i.
func (c *Cluster) RestartMeta(i int) error {
	c.World.Trace("start %s", c.metas[i].addr)
	return c.metas[i].start()
}

// MetaUp reports whether metadata server i runs.
func (c *Cluster) MetaUp(i int) bool { return c.metas[i].life != nil }

// MetaName, ChunkName are the names of servers as Partition wants them.
func (c *Cluster) MetaName(i int) string { return c.metas[i].addr }

// ChunkName is the name of chunk server i.
func (c *Cluster) ChunkName(i int) string { return c.chunks[i].addr }

// Partition keeps all messages between two nodes from arriving until Heal.
func (c *Cluster) Partition(a, b string) {
	c.World.Trace("partition %s %s", a, b)
	c.net.cut[pair(a, b)] = true
}

// Heal ends a partition.
func (c *Cluster) Heal(a, b string) {
	c.World.Trace("heal %s %s", a, b)
	delete(c.net.cut, pair(a, b))
}

// Drop ends the connections between two nodes.
func (c *Cluster) Drop(a, b string) {
	c.World.Trace("drop %s %s", a, b)
	c.net.drop(a, b)
}

// Slow adds d to every message and disk sync of a node; zero ends it.
func (c *Cluster) Slow(node string, d time.Duration) {
	c.World.Trace("slow %s %s", node, d)
	c.net.slow[node] = d
}

func (c *Cluster) metaAt(addr string) *metaNode {
	for _, m := range c.metas {
		if m.addr == addr && m.life != nil {
			return m
		}
	}
	return nil
}

func (c *Cluster) chunkAt(addr string) *chunkNode {
	for _, n := range c.chunks {
		if n.addr == addr {
			return n
		}
	}
	return nil
}

func (c *Cluster) metaAddrs() []string {
	var out []string
	for _, m := range c.metas {
		out = append(out, m.addr)
	}
	return out
}

func (c *Cluster) forget(m *Mount) {
	c.mounts = slices.DeleteFunc(c.mounts, func(x *Mount) bool { return x == m })
}

// violate notes that a part broke a promise; the run ends with the first.
func (c *Cluster) violate(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	c.World.Trace("violation: %v", err)
	if c.broken == nil {
		c.broken = err
	}
}

func (c *Cluster) newUUID() ids.UUID {
	var u ids.UUID
	for i := range u {
		u[i] = byte(c.World.Uint64())
	}
	return u
}

// log is the logger of a node.
func (c *Cluster) log(node string) *slog.Logger { return c.cfg.Log.With("node", node) }
