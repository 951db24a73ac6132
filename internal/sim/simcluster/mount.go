package simcluster

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// Mount is what lies under a mounted file system: a file engine and its client
// of the metadata service.
type Mount struct {
	Name   string
	Engine *file.Engine
	Meta   *metaclient.Client

	c      *Cluster
	blocks *client.Client
	data   *dataNet
	dead   bool
}

// Mount connects a mount of that name, which succeeds one that crashed. It waits.
func (c *Cluster) Mount(name string) (*Mount, error) {
	m := &Mount{Name: name, c: c}
	c.net.up[name] = true
	var err error
	m.Meta, err = metaclient.Dial(context.Background(), metaclient.Config{
		Addrs: c.metaAddrs(), Name: "/" + name, Host: name, Replaces: c.secrets[name],
		Sched: c.World, Log: c.log(name), OpTimeout: c.cfg.OpTimeout, Transport: &streams{c, name},
		OnLost: func(ids.Session) {
			if !m.dead {
				c.violate("mount %s lost its session", name)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", name, err)
	}
	c.secrets[name] = m.Meta.Secret()
	m.data = newDataNet(c, name)
	m.blocks = client.New(client.Config{
		Transport: m.data, Map: m.Meta.Map, Reporter: reporter{m}, Sched: c.World, Log: c.log(name),
	})
	m.Engine = file.New(file.Config{
		Meta: m.Meta, IDs: m.Meta, Blocks: m.blocks, Sched: c.World, Log: c.log(name),
		Budget: c.cfg.Budget, OpTimeout: c.cfg.OpTimeout,
	})
	m.Meta.SetFloor(m.Engine.Floor)
	c.mounts = append(c.mounts, m)
	return m, nil
}

// Close unmounts. It waits, and returns an error when something that was
// written could not be stored.
func (m *Mount) Close() error {
	ctx := context.Background()
	err := m.Engine.Close(ctx)
	m.blocks.Close()
	err = errors.Join(err, m.Meta.Close(ctx))
	m.data.close()
	m.c.forget(m)
	return err
}

// Crash ends the mount as the death of its process would.
func (m *Mount) Crash() {
	m.c.World.Trace("crash %s", m.Name)
	m.dead = true
	m.c.net.crash(m.Name)
	m.data.close()
	m.c.forget(m)
	m.c.World.Go("bury "+m.Name, func() {
		_ = m.Engine.Close(context.Background())
		m.blocks.Close()
		_ = m.Meta.Close(context.Background())
	})
}

// Dead reports that the mount has crashed.
func (m *Mount) Dead() bool { return m.dead }

// reporter passes what the block client finds on to the metadata service.
type reporter struct{ m *Mount }

// ChunkPlaced records a late chunk that is durable now.
func (r reporter) ChunkPlaced(key ids.ChunkKey, disk ids.DiskID, _ uint64) {
	var got api.Blocks
	if err := r.m.Meta.Do(context.Background(), &api.GetBlocks{IDs: []ids.BlockID{key.Block}}, &got); err != nil {
		return // repair will do it
	}
	if len(got.Blocks) == 1 {
		r.do(&api.PlaceChunk{Key: key, Disk: disk, Version: got.Blocks[0].Version})
	}
}

// ChunkDamaged queues a chunk for repair.
func (r reporter) ChunkDamaged(key ids.ChunkKey, disk ids.DiskID, why string) {
	r.m.c.World.Trace("%s: chunk %s on disk %d: %s", r.m.Name, key, disk, why)
	r.do(&api.QueueRepair{Chunks: []api.ChunkAt{{Key: key, Disk: disk}}, Damage: why})
}

func (r reporter) do(req api.Request) {
	err := r.m.Meta.Do(context.Background(), req, &api.Empty{})
	// The block may have been repaired or removed meanwhile.
	if err != nil && !errors.Is(err, errkind.Changed) && !errors.Is(err, errkind.NotFound) {
		r.m.c.log(r.m.Name).Warn("the metadata service could not be told of a chunk", "err", err)
	}
}
