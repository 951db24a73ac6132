// Package control is the metadata service as a chunk server's worker sees it:
// the one place where the worker's reports and orders meet the messages of the
// service, in production and in the simulation.
package control

import (
	"context"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/worker"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Meta sends requests to the metadata service. Safe for concurrent use.
type Meta interface {
	Do(ctx context.Context, req api.Request, reply codec.Message) error
}

// Control implements worker.Control for one chunk server.
type Control struct {
	Server   ids.ServerID
	Boot     uint64
	Meta     Meta                             // for reports and questions
	Own      Meta                             // under the server's own session
	Announce func(ctx context.Context) error  // registers the server once more
	Trace    func(format string, args ...any) // hears what is done; may be nil
}

var _ worker.Control = (*Control)(nil)

func (c *Control) trace(format string, args ...any) {
	if c.Trace != nil {
		c.Trace(format, args...)
	}
}

// DiskReport is a disk's report as the service takes it.
func DiskReport(uuid ids.UUID, id ids.DiskID, u chunk.Usage) api.DiskReport {
	return api.DiskReport{
		UUID: uuid, ID: id, Capacity: u.Capacity, Free: u.Free, Chunks: u.Chunks, ReadOnly: u.ReadOnly, Reason: u.Reason,
	}
}

// Heartbeat reports and takes orders.
func (c *Control) Heartbeat(ctx context.Context, r *worker.Report) (*worker.Orders, error) {
	req := api.Heartbeat{Server: c.Server, Boot: c.Boot, Room: uint32(r.Room)}
	for _, d := range r.Disks {
		req.Disks = append(req.Disks, DiskReport(d.UUID, d.ID, d.Usage))
	}
	for _, f := range r.Freed {
		c.trace("freed chunk %s on disk %d", f.Key, f.Disk)
		req.Freed = append(req.Freed, api.ChunkAt(f))
	}
	for _, d := range r.Done {
		res := api.JobResult{Job: d.Job}
		if d.Err != nil {
			res.Err, res.Text = uint16(errkind.Of(d.Err)), d.Err.Error()
		}
		c.trace("job %d: %v", d.Job, d.Err)
		req.Done = append(req.Done, res)
	}
	var got api.Orders
	if err := c.Meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	o := &worker.Orders{Unknown: got.Unknown}
	for _, d := range got.Delete {
		c.trace("is to delete chunk %s on disk %d", d.Key, d.Disk)
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
func (c *Control) Verdicts(ctx context.Context, disk ids.DiskID, asks []worker.Ask) ([]worker.Verdict, error) {
	req := api.Verdicts{Disk: disk}
	for _, a := range asks {
		req.Chunks = append(req.Chunks, a.Key)
		req.Writers = append(req.Writers, a.Writer)
	}
	var got api.VerdictList
	if err := c.Meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	if len(got.Verdicts) != len(asks) {
		return nil, errkind.Internal.Wrap("%d verdicts on %d chunks", len(got.Verdicts), len(asks))
	}
	out := make([]worker.Verdict, len(asks))
	for i, v := range got.Verdicts {
		c.trace("verdict %d on chunk %s on disk %d", v, asks[i].Key, disk)
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
func (c *Control) Place(ctx context.Context, at worker.At, version uint64) error {
	return c.Own.Do(ctx, &api.PlaceChunk{Key: at.Key, Disk: at.Disk, Version: version}, &api.Empty{})
}

// Register makes the server known once more.
func (c *Control) Register(ctx context.Context) error { return c.Announce(ctx) }
