package chunknode

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/worker"
	"github.com/ckptfs/ckptfs/internal/control"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
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
		Control: &control.Control{
			Server: n.disks[0].id.ServerID, Boot: n.boot, Meta: n.meta, Own: b.meta,
			Announce: func(ctx context.Context) error { _, err := n.announce(ctx); return err },
		},
		Rebuild: b.blocks, Session: b.meta.Session, Disks: disks, Sched: n.sched, Log: n.log,
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
