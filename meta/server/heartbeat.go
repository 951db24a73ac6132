package server

import (
	"cmp"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// clusterState is the leader's picture of chunk servers and disks: the state's,
// with what heartbeats tell.
type clusterState struct {
	base    cluster.Map // as recorded
	layout  ids.Layout  // of the founding
	cmap    cluster.Map // as published; replaced, never changed
	changes uint64      // of cmap in this term
	servers map[ids.ServerID]*serverState
	disks   map[ids.DiskID]*diskState
	stale   bool          // base is older than the state
	writing bool          // an UpdateDisks is under way
	placed  time.Duration // when the sets were made
}

type serverState struct {
	heard time.Duration
	boot  uint64
	up    bool
	room  uint32
}

type diskState struct {
	heard   time.Duration // when a heartbeat named it, or the term began
	known   bool          // a heartbeat has named it in this term
	report  api.DiskReport
	logged  cluster.Disk // as recorded
	loggedA time.Duration
}

func newClusterState() clusterState {
	return clusterState{servers: make(map[ids.ServerID]*serverState), disks: make(map[ids.DiskID]*diskState)}
}

// load takes the recorded cluster over, keeping what is known from heartbeats.
func (c *clusterState) load(m *cluster.Map, layout ids.Layout, now time.Duration) {
	c.base, c.layout = *m, layout
	for i := range m.Servers {
		if c.servers[m.Servers[i].ID] == nil {
			c.servers[m.Servers[i].ID] = &serverState{heard: now}
		}
	}
	for i := range m.Disks {
		d := c.disks[m.Disks[i].ID]
		if d == nil {
			d = &diskState{heard: now, loggedA: now}
			c.disks[m.Disks[i].ID] = d
		}
		d.logged = m.Disks[i]
	}
}

// refreshCluster has the recorded cluster read anew; with mu held.
func (s *Server) refreshCluster(l *leader) {
	l.cluster.stale = true
	s.wake.Broadcast()
}

// current is the map as it is now: recorded state, and what heartbeats say.
func (c *clusterState) current() cluster.Map {
	m := c.base
	m.Servers, m.Disks, m.Sets = slices.Clone(m.Servers), slices.Clone(m.Disks), nil
	for i := range m.Servers {
		m.Servers[i].Up = c.servers[m.Servers[i].ID].up
	}
	for i := range m.Disks {
		d := &m.Disks[i]
		st := c.disks[d.ID]
		d.State = st.state(d.State)
		if st.known {
			d.Capacity, d.Free = st.report.Capacity, st.report.Free
		}
	}
	return m
}

// state is what a disk is by its last report. An operator's word, and death,
// stand until they are taken back in the record.
func (d *diskState) state(recorded cluster.DiskState) cluster.DiskState {
	if !d.known || recorded == cluster.DiskDraining || recorded == cluster.DiskRemoved || recorded == cluster.DiskDead {
		return recorded
	}
	if d.report.ReadOnly {
		return cluster.DiskReadOnly
	}
	return cluster.DiskActive
}

// weighEvery is how often changed free space alone moves the placement sets.
const weighEvery = 10 * time.Second

// publish makes a new version of the map if anything that counts has changed,
// and tells the clients; with mu held.
func (s *Server) publish(l *leader) {
	c := &l.cluster
	m, now := c.current(), s.cfg.Sched.Now()
	if c.changes > 0 && same(&m, &c.cmap, now-c.placed >= weighEvery) {
		return
	}
	c.changes++
	c.placed = now
	m.Version = l.term<<32 | c.changes
	m.Sets = makeSets(&m, c.layout.Width())
	c.cmap = m
	for _, n := range sortedKeys(s.mu.streams) {
		s.mu.streams[n].pushCluster(m.Version)
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// same reports whether clients may go on with the old map. Free space counts
// where it decides on a disk's use, or has moved by an eighth, and then only
// when weigh says that the time has come.
func same(m, old *cluster.Map, weigh bool) bool {
	if !slices.Equal(m.Servers, old.Servers) || m.DiskDomains != old.DiskDomains || len(m.Disks) != len(old.Disks) {
		return false
	}
	for i := range m.Disks {
		a, b := &m.Disks[i], &old.Disks[i]
		if a.ID != b.ID || a.Server != b.Server || a.State != b.State || usable(m, a) != usable(old, b) {
			return false
		}
		moved := max(a.Free, b.Free) - min(a.Free, b.Free)
		if weigh && (moved > b.Free/8 || a.Capacity != b.Capacity) {
			return false
		}
	}
	return true
}

// Bounds of the orders in one reply to a heartbeat.
const maxDelete = 1024 // a disk

// heartbeat takes a chunk server's report; with mu held. Orders are found when
// the leadership is confirmed.
func (s *Server) heartbeat(l *leader, q *read) error {
	m := new(api.Heartbeat)
	if err := codec.Decode(q.body, m); err != nil {
		return errkind.Invalid.Wrap("Heartbeat: %v", err)
	}
	now := s.cfg.Sched.Now()
	st := l.cluster.servers[m.Server]
	if st == nil {
		reply := api.EncodeReply(&api.Reply{}, &api.Orders{Unknown: true})
		q.answer = func(kv.Reader) ([]byte, error) { return reply, nil }
		return nil
	}
	if st.boot != m.Boot {
		l.jobs.serverRestarted(m.Server)
	}
	st.heard, st.boot, st.up, st.room = now, m.Boot, true, m.Room
	for i := range m.Disks {
		if d := l.cluster.disks[m.Disks[i].ID]; d != nil && d.logged.Server == m.Server {
			d.heard, d.known, d.report = now, true, m.Disks[i]
		}
	}
	l.frees.add(m.Freed)
	l.jobs.results(s.cfg.Log, m.Done, now)
	s.publish(l)
	q.answer = func(r kv.Reader) ([]byte, error) { return s.orders(l, r, m) }
	return nil
}

// orders makes the reply to a heartbeat.
func (s *Server) orders(l *leader, r kv.Reader, m *api.Heartbeat) ([]byte, error) {
	var o api.Orders
	before := s.cfg.Sched.Wall().Add(-deleteAfter).UnixNano()
	for i := range m.Disks {
		disk := m.Disks[i].ID
		dead, err := meta.ReadDead(r, disk, ids.ChunkKey{}, maxDelete)
		if err != nil {
			return nil, err
		}
		for _, d := range dead {
			if d.Since <= before {
				o.Delete = append(o.Delete, api.ChunkAt{Key: d.Key, Disk: disk})
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o.ClusterVersion = l.cluster.cmap.Version
	o.Jobs = l.jobs.handOut(m.Server, m.Room, s.cfg.Sched.Now())
	return api.EncodeReply(&api.Reply{}, &o), nil
}

// watchServers notices servers that fell silent; with mu held.
func (s *Server) watchServers(l *leader) {
	c, now := &l.cluster, s.cfg.Sched.Now()
	for _, id := range sortedKeys(c.servers) {
		if st := c.servers[id]; st.up && now-st.heard > downAfter {
			st.up = false
			s.cfg.Log.Warn("metadata: a chunk server is silent", "server", id)
			l.jobs.serverRestarted(id)
		}
	}
	s.publish(l)
}

// refresh reads the recorded cluster when it has changed; with mu held.
func (s *Server) refresh(l *leader) {
	c := &l.cluster
	if !c.stale {
		return
	}
	c.stale = false
	var m cluster.Map
	if err := s.view(func(r kv.Reader) (err error) { m, err = meta.ReadMap(r); return err }); err != nil {
		s.cfg.Log.Error("metadata: read the cluster map", "err", err)
		return
	}
	if s.mu.lead == l {
		c.load(&m, c.layout, s.cfg.Sched.Now())
		s.publish(l)
	}
}

// recordUsage logs what changed of the disks and matters: their state, their
// size, and now and then their free space; with mu held.
func (s *Server) recordUsage(l *leader) {
	c, now := &l.cluster, s.cfg.Sched.Now()
	if c.writing {
		return
	}
	var changed []cluster.Disk
	for i := range c.base.Disks {
		d := c.base.Disks[i]
		st := c.disks[d.ID]
		next := d
		switch {
		case d.State == cluster.DiskRemoved:
		case now-st.heard > deadAfter:
			next.State = cluster.DiskDead
		case st.known && d.State == cluster.DiskDead:
			next.State = cluster.DiskActive // it is back
		default:
			next.State = st.state(d.State)
		}
		if st.known {
			moved := max(d.Free, st.report.Free) - min(d.Free, st.report.Free)
			if d.Capacity != st.report.Capacity || now-st.loggedA >= usageEvery && moved > d.Capacity/64 {
				next.Capacity, next.Free = st.report.Capacity, st.report.Free
			}
		}
		if next != d && len(changed) < maxSessions {
			changed = append(changed, next)
		}
	}
	if len(changed) == 0 {
		return
	}
	c.writing = true
	s.own(&api.UpdateDisks{Disks: changed}, func(_ []byte, err error) {
		c.writing = false
		if err != nil || s.mu.lead != l {
			return
		}
		for _, d := range changed {
			c.disks[d.ID].loggedA = now
			if d.State == cluster.DiskDead {
				s.cfg.Log.Warn("metadata: a disk is past its grace period; its chunks are rebuilt", "disk", d.ID, "server", d.Server)
			}
		}
		s.refreshCluster(l)
	})
}

// clusterReply answers GetCluster.
func (s *Server) clusterReply(l *leader, body []byte) ([]byte, error) {
	var m api.GetCluster
	if err := codec.Decode(body, &m); err != nil {
		return nil, errkind.Invalid.Wrap("GetCluster: %v", err)
	}
	s.mu.Lock()
	now := l.cluster.cmap
	s.mu.Unlock()
	if m.Have == now.Version {
		now = cluster.Map{Version: now.Version}
	}
	return api.EncodeReply(&api.Reply{Epoch: l.epoch}, &now), nil
}
