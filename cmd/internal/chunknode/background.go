package chunknode

import (
	"context"
	"time"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// background is the server's life beside requests.
type background struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (n *Node) startBackground(ctx context.Context) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	b := &background{cancel: cancel, done: make(chan struct{})}
	n.work = b
	n.sched.Go("heartbeat", func() {
		defer close(b.done)
		var freed []api.ChunkAt
		for {
			freed = n.beat(ctx, freed)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
	return nil
}

func (n *Node) beat(ctx context.Context, freed []api.ChunkAt) []api.ChunkAt {
	req := api.Heartbeat{Server: n.disks[0].id.ServerID, Boot: n.boot, Freed: freed}
	for _, d := range n.disks {
		req.Disks = append(req.Disks, d.report())
		_ = d.store.Inventory().Maintain()
	}
	var o api.Orders
	if err := n.meta.Do(ctx, &req, &o); err != nil {
		return freed
	}
	if o.Unknown {
		_, _ = n.announce(ctx)
	}
	var out []api.ChunkAt
	for _, x := range o.Delete {
		for _, d := range n.disks {
			if d.id.DiskID == x.Disk && d.store.Delete([]ids.ChunkKey{x.Key}) == nil {
				out = append(out, x)
			}
		}
	}
	return out
}

func (b *background) close() {
	b.cancel()
	<-b.done
}
