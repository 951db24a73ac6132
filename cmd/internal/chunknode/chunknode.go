// Package chunknode joins the parts of one chunk server: its disks, the data
// protocol's endpoint, the registration with the metadata service and the
// background work.
package chunknode

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/store"
	"github.com/ckptfs/ckptfs/internal/control"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/api"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// Config is one chunk server.
type Config struct {
	Meta      []string // addresses of metadata servers
	Listen    string
	Advertise string // address that clients use; empty: where it listens
	Disks     []string
	Host      string // failure domain; empty: the machine's host name
	Rack      string
	Log       *slog.Logger
}

// drainBound is how long a stopping server finishes what it has accepted.
const drainBound = 10 * time.Second

// jobBound is how long background work waits for the metadata service.
const jobBound = 30 * time.Second

// Validate reports the first wrong field.
func (c *Config) Validate() error {
	switch {
	case len(c.Meta) == 0:
		return errors.New("--meta is missing: HOST:PORT of the metadata servers")
	case c.Listen == "":
		return errors.New("--listen is missing: HOST:PORT of the data protocol")
	case len(c.Disks) == 0:
		return errors.New("--disk is missing: a directory for each disk")
	}
	seen := make(map[string]bool, len(c.Disks))
	for _, d := range c.Disks {
		if seen[d] {
			return fmt.Errorf("--disk %s is there twice", d)
		}
		seen[d] = true
	}
	for _, a := range append([]string{c.Listen}, c.Meta...) {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return fmt.Errorf("address %q: want HOST:PORT: %w", a, err)
		}
	}
	return nil
}

// disk is one data directory.
type disk struct {
	dir   string
	fs    *vfs.OS
	id    store.Identity
	store *store.Store
}

func (d *disk) report() api.DiskReport {
	return control.DiskReport(d.id.Disk, d.id.DiskID, d.store.Inventory().Usage())
}

// Node is a running chunk server.
type Node struct {
	cfg    Config
	sched  *sched.Real
	disks  []*disk
	lis    net.Listener
	meta   *metaclient.Client
	server *server.Server
	shell  *server.Shell
	work   *background
	boot   uint64
	log    *slog.Logger
}

// Start brings the server up. It returns when the server is registered and
// serves; ctx bounds how long it waits for the metadata service.
func Start(ctx context.Context, cfg Config) (*Node, error) {
	n := &Node{cfg: cfg, sched: new(sched.Real), log: cfg.Log}
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("chunk server: %w", err), n.Close())
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) error {
	var boot [8]byte
	if _, err := rand.Read(boot[:]); err != nil {
		return err
	}
	n.boot = binary.LittleEndian.Uint64(boot[:])
	if err := n.openDisks(); err != nil {
		return err
	}
	var lc net.ListenConfig
	var err error
	if n.lis, err = lc.Listen(ctx, "tcp", n.cfg.Listen); err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if err := n.register(ctx); err != nil {
		return err
	}
	disks := make([]server.Disk, 0, len(n.disks))
	for _, d := range n.disks {
		disks = append(disks, server.Disk{ID: d.id.DiskID, Store: d.store})
	}
	n.server = server.New(server.Config{
		Cluster: n.disks[0].id.Cluster, Boot: n.boot, Disks: disks, Sched: n.sched, Log: n.log,
	})
	n.shell = server.Serve(n.server, n.lis, server.ShellConfig{Log: n.log})
	return n.startBackground(ctx)
}

// openDisks opens every directory, and gives new ones an identity.
func (n *Node) openDisks() error {
	var self ids.UUID
	var fresh []*disk
	for _, dir := range n.cfg.Disks {
		d, err := readDisk(dir)
		if err != nil {
			return fmt.Errorf("disk %s: %w", dir, err)
		}
		n.disks = append(n.disks, d)
		switch {
		case d.id.Disk.IsZero():
			fresh = append(fresh, d)
		case self.IsZero():
			self = d.id.Server
		case self != d.id.Server:
			return errkind.Invalid.Wrap("disk %s belongs to another chunk server (%s) than %s does (%s); give each server its own disks",
				dir, d.id.Server, n.disks[0].dir, self)
		}
	}
	if self.IsZero() {
		self = newUUID()
	}
	for _, d := range fresh {
		d.id = store.Identity{Disk: newUUID(), Server: self}
		if err := store.Format(d.fs, d.id); err != nil {
			return fmt.Errorf("disk %s: %w", d.dir, err)
		}
	}
	for _, d := range n.disks {
		if err := n.openDisk(d); err != nil {
			return fmt.Errorf("disk %s: %w", d.dir, err)
		}
	}
	return nil
}

func readDisk(dir string) (*disk, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := vfs.NewOS(dir)
	if err != nil {
		return nil, err
	}
	id, err := store.ReadIdentity(f)
	if err != nil && !errors.Is(err, errkind.NotFound) {
		return nil, err
	}
	return &disk{dir: dir, fs: f, id: id}, nil
}

func (n *Node) openDisk(d *disk) error {
	s, err := store.Open(store.Config{FS: d.fs, Sched: n.sched, Log: n.log.With("disk", d.dir)})
	if err != nil {
		return err
	}
	d.store = s
	left, err := s.Inventory().AbandonOpen()
	if err == nil && left > 0 {
		n.log.Info("dropped chunks that an earlier life had not sealed", "disk", d.dir, "chunks", left)
	}
	return err
}

func newUUID() ids.UUID {
	var u ids.UUID
	_, _ = rand.Read(u[:]) // cannot fail: crypto/rand ends the process instead
	return u
}

// register makes the server known to the cluster and writes what it was told
// into the disks' identities.
func (n *Node) register(ctx context.Context) error {
	var err error
	n.meta, err = metaclient.Dial(ctx, metaclient.Config{
		Addrs: n.cfg.Meta, Cluster: n.disks[0].id.Cluster, Sched: n.sched, Log: n.log, NoSession: true,
	})
	if err != nil {
		return fmt.Errorf("reach the metadata service at %v: %w", n.cfg.Meta, err)
	}
	got, err := n.announce(ctx)
	if err != nil {
		return err
	}
	for i, d := range n.disks {
		if err := d.id.CheckCluster(got.Cluster); err != nil {
			return fmt.Errorf("disk %s: %w", d.dir, err)
		}
		want := d.id
		want.Cluster, want.DiskID, want.ServerID = got.Cluster, got.Disks[i], got.Server
		if want != d.id {
			d.id = want
			if err := store.WriteIdentity(d.fs, d.id); err != nil {
				return fmt.Errorf("disk %s: %w", d.dir, err)
			}
		}
	}
	n.log.Info("registered", "server", got.Server, "cluster", got.Cluster.String(), "disks", got.Disks)
	return nil
}

// announce sends the registration.
func (n *Node) announce(ctx context.Context) (api.Registered, error) {
	host := n.cfg.Host
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			return api.Registered{}, fmt.Errorf("host name: %w; give --host", err)
		}
	}
	req := api.RegisterServer{
		UUID: n.disks[0].id.Server, Cluster: n.disks[0].id.Cluster, Addr: n.Addr(), Host: host, Rack: n.cfg.Rack,
	}
	for _, d := range n.disks {
		req.Disks = append(req.Disks, d.report())
	}
	var got api.Registered
	if err := n.meta.Do(ctx, &req, &got); err != nil {
		return got, fmt.Errorf("register with the metadata service: %w", err)
	}
	if len(got.Disks) != len(n.disks) {
		return got, errkind.Internal.Wrap("register: %d disk ids for %d disks", len(got.Disks), len(n.disks))
	}
	return got, nil
}

// Addr is the address that clients are told.
func (n *Node) Addr() string {
	if n.cfg.Advertise != "" {
		return n.cfg.Advertise
	}
	return n.lis.Addr().String()
}

// Close drains and stops. What was acknowledged is durable without it.
func (n *Node) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), drainBound)
	defer cancel()
	var errs []error
	if n.work != nil {
		errs = append(errs, n.work.close(ctx))
	}
	switch {
	case n.shell != nil:
		errs = append(errs, n.shell.Close(drainBound))
	case n.lis != nil:
		errs = append(errs, n.lis.Close())
	}
	if n.server != nil {
		errs = append(errs, n.server.Close(drainBound))
	}
	if n.meta != nil {
		errs = append(errs, n.meta.Close(ctx))
	}
	for _, d := range n.disks {
		if d.store != nil {
			errs = append(errs, d.store.Inventory().Close())
		}
	}
	n.sched.Wait()
	return errors.Join(errs...)
}
