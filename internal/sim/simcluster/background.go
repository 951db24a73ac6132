package simcluster

import (
	"context"
	"time"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/worker"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
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
		Control: control{l}, Rebuild: b.blocks, Session: b.meta.Session, Disks: disks, Sched: c.World, Log: c.log(addr),
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

// control is the metadata service as the worker sees it.
type control struct{ l *chunkLife }

// Heartbeat reports and takes orders.
func (c control) Heartbeat(ctx context.Context, r *worker.Report) (*worker.Orders, error) {
	req := api.Heartbeat{Server: c.l.disks[0].id.ServerID, Boot: c.l.boot, Room: uint32(r.Room)}
	for _, d := range r.Disks {
		req.Disks = append(req.Disks, diskReport(d.UUID, d.ID, d.Usage))
	}
	for _, f := range r.Freed {
		c.l.node.c.World.Trace("%s: freed chunk %s on disk %d", c.l.node.addr, f.Key, f.Disk)
		req.Freed = append(req.Freed, api.ChunkAt(f))
	}
	for _, d := range r.Done {
		res := api.JobResult{Job: d.Job}
		if d.Err != nil {
			res.Err, res.Text = uint16(errkind.Of(d.Err)), d.Err.Error()
		}
		c.l.node.c.World.Trace("%s: job %d: %v", c.l.node.addr, d.Job, d.Err)
		req.Done = append(req.Done, res)
	}
	var got api.Orders
	if err := c.l.meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	o := &worker.Orders{Unknown: got.Unknown}
	for _, d := range got.Delete {
		c.l.node.c.World.Trace("%s: is to delete chunk %s on disk %d", c.l.node.addr, d.Key, d.Disk)
		o.Delete = append(o.Delete, worker.At(d))
	}
	for i := range got.Jobs {
		j := &got.Jobs[i]
		o.Jobs = append(o.Jobs, worker.Job{
			ID: j.ID, Kind: worker.JobKind(j.Kind), Block: j.Block, Index: j.Index, Target: j.Target, Ino: j.Ino, Off: j.Off, End: j.End,
		})
	}
	return o, nil
}

// Verdicts asks what is to become of chunks.
func (c control) Verdicts(ctx context.Context, disk ids.DiskID, asks []worker.Ask) ([]worker.Verdict, error) {
	req := api.Verdicts{Disk: disk}
	for _, a := range asks {
		req.Chunks = append(req.Chunks, a.Key)
		req.Writers = append(req.Writers, a.Writer)
	}
	var got api.VerdictList
	if err := c.l.meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	if len(got.Verdicts) != len(asks) {
		return nil, errkind.Internal.Wrap("%d verdicts on %d chunks", len(got.Verdicts), len(asks))
	}
	out := make([]worker.Verdict, len(asks))
	for i, v := range got.Verdicts {
		c.l.node.c.World.Trace("%s: verdict %d on chunk %s on disk %d", c.l.node.addr, v, asks[i].Key, disk)
		switch v {
		case api.VerdictDelete:
			out[i] = worker.Delete
		case api.VerdictNotYet:
			out[i] = worker.NotYet
		default:
			out[i] = worker.Keep
		}
	}
	return out, nil
}

// Place records a rebuilt chunk, under the server's own session.
func (c control) Place(ctx context.Context, at worker.At, version uint64) error {
	return c.l.own.meta.Do(ctx, &api.PlaceChunk{Key: at.Key, Disk: at.Disk, Version: version}, &api.Empty{})
}

// Register makes the server known once more.
func (c control) Register(context.Context) error {
	_, err := c.l.announce()
	return err
}
