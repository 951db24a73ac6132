package simcluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica"
	"github.com/ckptfs/ckptfs/meta/server"
)

// metaNode is one metadata server: what outlives its process, and its life.
type metaNode struct {
	c     *Cluster
	id    uint64
	addr  string
	disk  *vfs.Mem
	store *kv.Mem
	life  *metaLife // nil while down
	peers map[uint64]*conn
}

// metaLife is one process of a metadata server.
type metaLife struct {
	replica *replica.Replica
	server  *server.Server
	dead    bool
}

func (m *metaNode) start() error {
	life := &metaLife{}
	cfg := replica.Config{
		ID: m.id, FS: m.disk, Store: m.store, Machine: meta.New(), Sched: m.c.World, Log: m.c.log(m.addr),
		SegmentSize: 256 << 10, RetainLog: 1 << 20,
		Fatal: func(err error) {
			if !life.dead {
				m.c.violate("metadata server %s ends: %v", m.addr, err)
			}
		},
		OnLeader: func(leading bool, term uint64) {
			m.c.World.Trace("%s leads: %v, term %d", m.addr, leading, term)
			if life.server != nil {
				life.server.OnLeader(leading, term)
			}
		},
	}
	if len(m.c.metas) > 1 {
		cfg.Peers, cfg.Transport = map[uint64]string{}, m
		for _, p := range m.c.metas {
			cfg.Peers[p.id] = p.addr
		}
	}
	var err error
	if life.replica, err = replica.Open(cfg); err != nil {
		return fmt.Errorf("start metadata server %s: %w", m.addr, err)
	}
	// No task runs before this one waits, so OnLeader finds the server.
	life.server = server.New(server.Config{
		Replica: life.replica, Sched: m.c.World, Log: m.c.log(m.addr), Layout: m.c.cfg.Layout, Cluster: m.c.id,
	})
	m.life = life
	m.peers = map[uint64]*conn{}
	m.c.net.up[m.addr] = true
	return nil
}

// crash ends the process at once: the disk loses what was not synced.
func (m *metaNode) crash() {
	life := m.life
	m.life = nil
	life.dead = true
	m.c.net.crash(m.addr)
	life.replica.Kill()
	m.disk = m.disk.CrashClone(m.c.World)
	m.store = m.store.Crash()
	m.c.World.Go("bury "+m.addr, life.server.Close)
}

// peer is the connection to another metadata server.
func (m *metaNode) peer(to uint64) *conn {
	p := m.c.metas[to-1]
	c := m.peers[to]
	if c != nil && !c.over || p.life == nil || m.life == nil {
		return c
	}
	c = &conn{net: m.c.net, nodes: [2]string{m.addr, p.addr}}
	m.c.net.conns = append(m.c.net.conns, c)
	m.peers[to] = c
	return c
}

// Send is replica.Transport's.
func (m *metaNode) Send(to uint64, msgs [][]byte) {
	c, p := m.peer(to), m.c.metas[to-1]
	if c == nil || c.over {
		return
	}
	for _, data := range msgs {
		c.deliver(0, func() {
			if p.life == nil {
				return
			}
			if err := p.life.replica.StepMessage(m.id, data); err != nil {
				m.c.violate("message from %s to %s: %v", m.addr, p.addr, err)
			}
		})
	}
}

// SendSnapshot is replica.Transport's.
func (m *metaNode) SendSnapshot(to uint64, produce func(send func([]byte) error) error) {
	p, from := m.c.metas[to-1], m.life
	m.c.World.Go("copy to "+p.addr, func() {
		var in *replica.Receiver
		at := p.life
		err := produce(func(chunk []byte) error {
			m.c.World.Sleep(m.c.net.delay(m.addr, p.addr))
			if at == nil || p.life != at || m.life != from || m.c.net.partitioned(m.addr, p.addr) {
				return errkind.Unavailable.Wrap("no way from %s to %s", m.addr, p.addr)
			}
			if in == nil {
				var err error
				if in, err = at.replica.ReceiveSnapshot(m.id); err != nil {
					return err
				}
			}
			return in.Chunk(append([]byte(nil), chunk...))
		})
		switch {
		case in == nil:
		case err != nil:
			in.Abort()
		default:
			if err := in.Finish(); err != nil {
				m.c.log(p.addr).Warn("copy", "err", err)
			}
		}
	})
}

// leader is the metadata server that leads, nil when none does.
func (c *Cluster) leader() *metaNode {
	for _, m := range c.metas {
		if m.life != nil && m.life.replica.Status().Leading {
			return m
		}
	}
	return nil
}

// View calls fn with the leader's state, waiting for a leader to be elected.
func (c *Cluster) View(fn func(kv.Reader) error) error {
	for range 600 {
		if m := c.leader(); m != nil {
			return m.life.replica.View(fn)
		}
		c.World.Sleep(100 * time.Millisecond)
	}
	return errors.New("no metadata server leads")
}
