package simcluster

import (
	"context"
	"time"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/worker"
	"github.com/ckptfs/ckptfs/internal/control"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// background is a chunk server's life beside requests: the worker, and what it
// needs to read other servers' chunks and to record what it rebuilt.
type background struct {
	meta   *metaclient.Client
	data   *dataNet
	blocks *client.Client
	worker *worker.Worker
}

// jobBound is how long background work waits for the metadata service.
const jobBound = 30 * time.Second

func (l *chunkLife) startBackground() error {
	c, addr, old := l.node.c, l.node.addr, l.node.secret
	l.node.secret = c.newUUID()
	b := &l.own
	var err error
	b.meta, err = metaclient.Dial(context.Background(), metaclient.Config{
		Addrs: c.metaAddrs(), Cluster: l.disks[0].id.Cluster, Name: addr, Host: addr,
		Secret: l.node.secret, Replaces: old, Sched: c.World, Log: c.log(addr), OpTimeout: jobBound,
		Transport: &streams{c, addr},
	})
	if err != nil {
		return err
	}
	b.data = newDataNet(c, addr)
	b.blocks = client.New(client.Config{Transport: b.data, Map: b.meta.Map, Sched: c.World, Log: c.log(addr)})
	disks := make([]worker.Disk, 0, len(l.disks))
	for _, d := range l.disks {
		disks = append(disks, worker.Disk{ID: d.id.DiskID, Store: d.store})
	}
	b.worker = worker.Start(worker.Config{
		Control: &control.Control{
			Server: l.disks[0].id.ServerID, Boot: l.boot, Meta: l.meta, Own: b.meta,
			Announce: func(context.Context) error { _, err := l.announce(); return err },
			Trace:    func(format string, args ...any) { c.World.Trace(addr+": "+format, args...) },
		},
		Rebuild: b.blocks, Session: b.meta.Session, Disks: disks, Sched: c.World, Log: c.log(addr),
	})
	return nil
}

func (b *background) close() error {
	if b.worker != nil {
		b.worker.Close()
	}
	if b.blocks != nil {
		b.blocks.Close()
	}
	var err error
	if b.meta != nil {
		err = b.meta.Close(context.Background())
	}
	if b.data != nil {
		b.data.close()
	}
	return err
}
