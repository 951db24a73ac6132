package chunknode

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/worker"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// background is the server's life beside requests: the worker, and what it
// needs to read other servers' chunks and to record what it rebuilt.
type background struct {
	meta      *metaclient.Client
	transport *transport.Transport
	blocks    *client.Client
	worker    *worker.Worker
}

// sessionFile keeps the secret of the server's session on its first disk, so
// that a restart ends the session of the life before.
const sessionFile = "session"

// jobMemory bounds the bytes of chunks that are being rebuilt.
const jobMemory = 32 << 20

func (n *Node) startBackground(ctx context.Context) error {
	path := filepath.Join(n.disks[0].dir, sessionFile)
	var old ids.UUID
	if text, err := os.ReadFile(path); err == nil {
		// What cannot be read is of no use: the old session ends by time.
		_ = old.UnmarshalText(text)
	}
	secret := sched.NewUUID(n.sched)
	if err := os.WriteFile(path, []byte(secret.String()), 0o600); err != nil {
		n.log.Warn("the session's secret cannot be kept: after a kill the session ends by time", "err", err)
	}
	b := &background{}
	n.work = b
	var err error
	b.meta, err = metaclient.Dial(ctx, metaclient.Config{
		Addrs: n.cfg.Meta, Cluster: n.disks[0].id.Cluster, Name: fmt.Sprintf("chunk server %d", n.disks[0].id.ServerID),
		Host: n.cfg.Host, Secret: secret, Replaces: old, Sched: n.sched, Log: n.log, OpTimeout: jobBound,
	})
	if err != nil {
		return fmt.Errorf("open the server's own session: %w", err)
	}
	b.transport = transport.New(transport.Config{Cluster: n.disks[0].id.Cluster, Sched: n.sched, Log: n.log})
	b.blocks = client.New(client.Config{
		Transport: b.transport, Map: b.meta.Map, Sched: n.sched, Log: n.log,
		LateBudget: jobMemory, ReadBudget: jobMemory,
	})
	disks := make([]worker.Disk, 0, len(n.disks))
	for _, d := range n.disks {
		disks = append(disks, worker.Disk{ID: d.id.DiskID, Store: d.store})
	}
	b.worker = worker.Start(worker.Config{
		Control: control{n}, Rebuild: b.blocks, Session: b.meta.Session, Disks: disks, Sched: n.sched, Log: n.log,
	})
	return nil
}

func (b *background) close(ctx context.Context) error {
	if b.worker != nil {
		b.worker.Close()
	}
	if b.blocks != nil {
		b.blocks.Close()
	}
	var err error
	if b.meta != nil {
		err = b.meta.Close(ctx)
	}
	if b.transport != nil {
		b.transport.Close()
	}
	return err
}

// control is the metadata service as the worker sees it.
type control struct{ n *Node }

// Heartbeat reports and takes orders.
func (c control) Heartbeat(ctx context.Context, r *worker.Report) (*worker.Orders, error) {
	req := api.Heartbeat{Server: c.n.disks[0].id.ServerID, Boot: c.n.boot, Room: uint32(r.Room)}
	for _, d := range r.Disks {
		req.Disks = append(req.Disks, diskReport(d.UUID, d.ID, d.Usage))
	}
	for _, f := range r.Freed {
		req.Freed = append(req.Freed, api.ChunkAt(f))
	}
	for _, d := range r.Done {
		res := api.JobResult{Job: d.Job}
		if d.Err != nil {
			res.Err, res.Text = uint16(errkind.Of(d.Err)), d.Err.Error()
		}
		req.Done = append(req.Done, res)
	}
	var got api.Orders
	if err := c.n.meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	o := &worker.Orders{Unknown: got.Unknown}
	for _, d := range got.Delete {
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
	if err := c.n.meta.Do(ctx, &req, &got); err != nil {
		return nil, err
	}
	if len(got.Verdicts) != len(asks) {
		return nil, errkind.Internal.Wrap("%d verdicts on %d chunks", len(got.Verdicts), len(asks))
	}
	out := make([]worker.Verdict, len(asks))
	for i, v := range got.Verdicts {
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
	return c.n.work.meta.Do(ctx, &api.PlaceChunk{Key: at.Key, Disk: at.Disk, Version: version}, &api.Empty{})
}

// Register makes the server known once more.
func (c control) Register(ctx context.Context) error {
	_, err := c.n.announce(ctx)
	return err
}
