package simcluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/store"
	"github.com/ckptfs/ckptfs/internal/control"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/api"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// chunkNode is one chunk server: its disks outlive its process.
type chunkNode struct {
	c     *Cluster
	addr  string
	disks []*vfs.Mem
	life  *chunkLife // nil while down
	// secret is that of the server's last session, which the next one replaces.
	secret ids.UUID
}

// chunkLife is one process of a chunk server.
type chunkLife struct {
	node   *chunkNode
	disks  []*chunkDisk
	meta   *metaclient.Client
	server *server.Server
	own    background
	boot   uint64
	dead   bool
}

// chunkDisk is an open disk.
type chunkDisk struct {
	fs    *vfs.Mem
	id    store.Identity
	store *store.Store
}

func (d *chunkDisk) report() api.DiskReport {
	return control.DiskReport(d.id.Disk, d.id.DiskID, d.store.Inventory().Usage())
}

// start brings the server up; it waits for the metadata service.
func (n *chunkNode) start() error {
	life := &chunkLife{node: n, boot: n.c.World.Uint64() | 1}
	n.life = life
	n.c.net.up[n.addr] = true
	if err := life.start(); err != nil {
		return fmt.Errorf("start chunk server %s: %w", n.addr, err)
	}
	return nil
}

func (l *chunkLife) start() error {
	if err := l.openDisks(); err != nil {
		return err
	}
	if err := l.register(); err != nil {
		return err
	}
	disks := make([]server.Disk, 0, len(l.disks))
	for _, d := range l.disks {
		disks = append(disks, server.Disk{ID: d.id.DiskID, Store: d.store})
	}
	l.server = server.New(server.Config{
		Cluster: l.disks[0].id.Cluster, Boot: l.boot, Disks: disks, Sched: l.node.c.World, Log: l.node.c.log(l.node.addr),
	})
	return l.startBackground()
}

func (l *chunkLife) openDisks() error {
	c := l.node.c
	var self ids.UUID
	for _, f := range l.node.disks {
		f.SetHook(l.node.work)
		id, err := store.ReadIdentity(f)
		if errors.Is(err, errkind.NotFound) {
			if self.IsZero() {
				self = c.newUUID()
			}
			id = store.Identity{Disk: c.newUUID(), Server: self}
			err = store.Format(f, id)
		}
		if err != nil {
			return err
		}
		self = id.Server
		s, err := store.Open(store.Config{FS: f, Sched: c.World, Log: c.log(l.node.addr), SegmentSize: 32 << 20})
		if err != nil {
			return err
		}
		if _, err := s.Inventory().AbandonOpen(); err != nil {
			return err
		}
		l.disks = append(l.disks, &chunkDisk{fs: f, id: id, store: s})
	}
	return nil
}

// work makes the operations of a disk take time, syncs above all.
func (n *chunkNode) work(c vfs.Call) error {
	w := n.c.World
	switch c.Op {
	case vfs.OpSync, vfs.OpSyncDir:
		w.Sleep(50*time.Microsecond + time.Duration(w.Rand().IntN(2_000_000)) + n.c.net.slow[n.addr])
	case vfs.OpRead, vfs.OpWrite:
		w.Sleep(time.Duration(w.Rand().IntN(50_000)))
	}
	return nil
}

func (l *chunkLife) register() error {
	c := l.node.c
	var err error
	l.meta, err = metaclient.Dial(context.Background(), metaclient.Config{
		Addrs: c.metaAddrs(), Cluster: l.disks[0].id.Cluster, Sched: c.World, Log: c.log(l.node.addr),
		NoSession: true, Transport: &streams{c, l.node.addr},
	})
	if err != nil {
		return err
	}
	got, err := l.announce()
	if err != nil {
		return err
	}
	for i, d := range l.disks {
		if err := d.id.CheckCluster(got.Cluster); err != nil {
			return err
		}
		want := d.id
		want.Cluster, want.DiskID, want.ServerID = got.Cluster, got.Disks[i], got.Server
		if want != d.id {
			d.id = want
			if err := store.WriteIdentity(d.fs, d.id); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *chunkLife) announce() (api.Registered, error) {
	req := api.RegisterServer{
		UUID: l.disks[0].id.Server, Cluster: l.disks[0].id.Cluster, Addr: l.node.addr, Host: l.node.addr,
	}
	for _, d := range l.disks {
		req.Disks = append(req.Disks, d.report())
	}
	var got api.Registered
	if err := l.meta.Do(context.Background(), &req, &got); err != nil {
		return got, fmt.Errorf("register: %w", err)
	}
	if len(got.Disks) != len(l.disks) {
		return got, errkind.Internal.Wrap("register: %d disk ids for %d disks", len(got.Disks), len(l.disks))
	}
	return got, nil
}

// closeBound is how long what a server has accepted may take to finish.
const closeBound = 10 * time.Minute

// crash ends the process at once: the disks lose what was not synced. What is
// left of it goes on, unheard, on disks of its own until it has ended.
func (n *chunkNode) crash() {
	life := n.life
	n.life = nil
	life.dead = true
	n.c.net.crash(n.addr)
	for i, f := range n.disks {
		n.disks[i] = f.CrashClone(n.c.World)
	}
	n.c.World.Go("bury "+n.addr, func() { _ = life.close() })
}

// close ends what a process consists of.
func (l *chunkLife) close() error {
	errs := []error{l.own.close()}
	if l.server != nil {
		errs = append(errs, l.server.Close(closeBound))
	}
	if l.meta != nil {
		errs = append(errs, l.meta.Close(context.Background()))
	}
	return errors.Join(errs...)
}
