// Package embedded is a whole cluster in one process: one metadata server and
// a chunk server for each disk, all on the loopback interface.
package embedded

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/ckptfs/ckptfs/cmd/internal/chunknode"
	"github.com/ckptfs/ckptfs/cmd/internal/metanode"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Config is an embedded cluster.
type Config struct {
	Dir    string
	Listen string // of the metadata service; empty: a free port, the same at the next start
	Disks  int    // 0: as many as there are, or DefaultDisks
	Layout ids.Layout
	Log    *slog.Logger
	Fatal  func(error)
}

// DefaultDisks is the number of disks of a new cluster.
const DefaultDisks = 6

const maxDisks = 64

// Validate reports the first wrong field.
func (c *Config) Validate() error {
	if c.Dir == "" {
		return errors.New("--dir is missing: where the cluster keeps everything")
	}
	if c.Disks < 0 || c.Disks > maxDisks {
		return fmt.Errorf("--disks %d: want 1 to %d", c.Disks, maxDisks)
	}
	return c.Layout.Validate()
}

// addresses are kept, so that mounts elsewhere find the cluster again.
type addresses struct {
	Meta  string   `json:"meta"`
	Disks []string `json:"disks"`
}

func addressFile(dir string) string { return filepath.Join(dir, "addresses.json") }

func readAddresses(dir string) (addresses, error) {
	var a addresses
	text, err := os.ReadFile(addressFile(dir))
	if errors.Is(err, os.ErrNotExist) {
		return a, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &a)
	}
	if err != nil {
		return addresses{}, fmt.Errorf("addresses of the cluster: %w", err)
	}
	return a, nil
}

func (a addresses) write(dir string) error {
	text, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		return err
	}
	tmp := addressFile(dir) + ".new"
	if err := os.WriteFile(tmp, append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, addressFile(dir))
}

// Cluster is a running embedded cluster.
type Cluster struct {
	cfg   Config
	addrs addresses
	meta  *metanode.Node
	disks []*chunknode.Node
}

// Start brings the cluster up, or back.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	c := &Cluster{cfg: cfg}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	return c, nil
}

const anyPort = "127.0.0.1:0"

func (c *Cluster) start(ctx context.Context) error {
	if err := os.MkdirAll(c.cfg.Dir, 0o700); err != nil {
		return err
	}
	var err error
	if c.addrs, err = readAddresses(c.cfg.Dir); err != nil {
		return err
	}
	n := max(c.cfg.Disks, len(c.addrs.Disks))
	if n == 0 {
		n = DefaultDisks
	}
	listen := c.cfg.Listen
	if listen == "" {
		listen = c.addrs.Meta
	}
	c.meta, err = metanode.Start(ctx, metanode.Config{
		Dir: filepath.Join(c.cfg.Dir, "meta"), Listen: orAny(listen), ID: 1, Layout: c.cfg.Layout,
		Log: c.cfg.Log, Fatal: c.cfg.Fatal,
	})
	if err != nil {
		return err
	}
	c.addrs.Meta = c.meta.Addr()
	for i := range n {
		if i == len(c.addrs.Disks) {
			c.addrs.Disks = append(c.addrs.Disks, "")
		}
		node, err := c.startDisk(ctx, i)
		if err != nil {
			return err
		}
		c.disks = append(c.disks, node)
		c.addrs.Disks[i] = node.Addr()
	}
	return c.addrs.write(c.cfg.Dir)
}

func orAny(addr string) string {
	if addr == "" {
		return anyPort
	}
	return addr
}

func (c *Cluster) startDisk(ctx context.Context, i int) (*chunknode.Node, error) {
	return chunknode.Start(ctx, chunknode.Config{
		Meta: []string{c.meta.Addr()}, Listen: orAny(c.addrs.Disks[i]),
		Disks: []string{filepath.Join(c.cfg.Dir, fmt.Sprintf("disk%d", i))}, Log: c.cfg.Log,
	})
}

// Meta is the address of the metadata service.
func (c *Cluster) Meta() string { return c.meta.Addr() }

// Disks is the number of disks.
func (c *Cluster) Disks() int { return len(c.disks) }

// StopDisk takes a disk's server down, as if it had died.
func (c *Cluster) StopDisk(i int) error {
	n := c.disks[i]
	c.disks[i] = nil
	return n.Close()
}

// Close stops everything. What was acknowledged is durable without it.
func (c *Cluster) Close(ctx context.Context) error {
	var errs []error
	for _, n := range c.disks {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	if c.meta != nil {
		errs = append(errs, c.meta.Close(ctx))
	}
	return errors.Join(errs...)
}
