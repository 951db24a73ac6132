package meta

import (
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// found makes the cluster and its root directory.
func (s *state) found(r *api.Found) (codec.Message, error) {
	if s.id.Epoch != 0 {
		if s.id.Cluster == r.Cluster {
			return &api.Empty{}, nil
		}
		return nil, errkind.Exists.Wrap("found cluster %s: this is cluster %s", r.Cluster, s.id.Cluster)
	}
	if r.Cluster.IsZero() {
		return nil, errkind.Invalid.Wrap("found a cluster without an id")
	}
	if err := r.Layout.Validate(); err != nil {
		return nil, errkind.Invalid.Wrap("found cluster %s: %v", r.Cluster, err)
	}
	s.id = identity{
		Cluster: r.Cluster, Incarnation: 1, Epoch: 1, Feature: 1, Layout: r.Layout, MapVersion: 1,
	}
	last := number(ids.RootIno.Counter())
	s.put(slotKey(ids.RootIno.Slot()), &last)
	s.setInode(&inode{Attr: api.Attr{
		Ino: ids.RootIno, Mode: api.ModeDir | 0o755, Nlink: 2, UID: r.UID, GID: r.GID, Layout: r.Layout,
		Atime: s.now, Mtime: s.now, Ctime: s.now, Btime: s.now, Change: 1, Parent: ids.RootIno,
	}})
	return &api.Empty{}, nil
}

// registerServer makes a chunk server and its disks known. UUIDs decide: the
// same server and disks always get the same numbers.
func (s *state) registerServer(r *api.RegisterServer) (codec.Message, error) {
	if !r.Cluster.IsZero() && r.Cluster != s.id.Cluster {
		return nil, errkind.WrongCluster.Wrap("server %s at %s belongs to cluster %s, this is %s: use other disks or the other cluster",
			r.UUID, r.Addr, r.Cluster, s.id.Cluster)
	}
	if r.UUID.IsZero() || r.Addr == "" || r.Host == "" {
		return nil, errkind.Invalid.Wrap("register server %s: uuid, address and host must be given", r.UUID)
	}
	var a alloc
	s.load(keyAlloc, &a)
	reply := &api.Registered{Cluster: s.id.Cluster, Incarnation: s.id.Incarnation}
	var known number
	fresh := !s.load(uuidKey(spaceMember, r.UUID), &known)
	if fresh {
		a.Server++
		known = number(a.Server)
		s.put(uuidKey(spaceMember, r.UUID), &known)
	}
	reply.Server = ids.ServerID(known)
	var was server
	now := server{UUID: r.UUID, Addr: r.Addr, Host: r.Host, Rack: r.Rack}
	s.load(idKey(spaceServer, uint32(known)), &was)
	if !fresh && was.UUID != r.UUID {
		return nil, errkind.Conflict.Wrap("register server %s: its uuid is that of a disk", r.UUID)
	}
	changed := was != now
	s.put(idKey(spaceServer, uint32(known)), &now)
	for i := range r.Disks {
		id, diskChanged, err := s.registerDisk(&a, reply.Server, r, &r.Disks[i])
		if err != nil {
			return nil, err
		}
		changed = changed || diskChanged
		reply.Disks = append(reply.Disks, id)
	}
	s.put(keyAlloc, &a)
	if was.Host != now.Host {
		s.moveHost(reply.Server, now.Host)
	}
	if changed {
		s.id.MapVersion++
	}
	return reply, nil
}

// registerDisk makes one disk known; true when the cluster map changes.
func (s *state) registerDisk(a *alloc, on ids.ServerID, r *api.RegisterServer, d *api.DiskReport) (ids.DiskID, bool, error) {
	if d.UUID.IsZero() || d.UUID == r.UUID {
		return 0, false, errkind.Invalid.Wrap("register server %s: a disk without a uuid of its own", r.UUID)
	}
	var known number
	key := uuidKey(spaceMember, d.UUID)
	var was disk
	if s.load(key, &known) {
		if !s.load(idKey(spaceDisk, uint32(known)), &was) || was.UUID != d.UUID {
			return 0, false, errkind.Conflict.Wrap("register disk %s: its uuid is that of a server", d.UUID)
		}
		if d.ID != 0 && d.ID != ids.DiskID(known) {
			return 0, false, errkind.Conflict.Wrap("register disk %s: it says that it is disk %d, but it is disk %d", d.UUID, d.ID, known)
		}
	} else {
		id := d.ID // known to the cluster before a restore of its metadata
		if id == 0 {
			id = a.Disk + 1
		} else if s.has(idKey(spaceDisk, uint32(id))) {
			return 0, false, errkind.Conflict.Wrap("register disk %s: disk %d is another one", d.UUID, id)
		}
		a.Disk = max(a.Disk, id)
		known = number(id)
		s.put(key, &known)
	}
	now := was
	now.UUID, now.Server, now.Host, now.Capacity, now.Free = d.UUID, on, r.Host, d.Capacity, d.Free
	switch {
	case d.ReadOnly && now.State == cluster.DiskActive:
		now.State = cluster.DiskReadOnly
	case !d.ReadOnly && now.State == cluster.DiskReadOnly:
		now.State = cluster.DiskActive
	}
	s.put(idKey(spaceDisk, uint32(known)), &now)
	changed := was.UUID != now.UUID || was.Server != now.Server || was.State != now.State
	return ids.DiskID(known), changed, nil
}

// moveHost writes a server's new host into its disks, and counts hosts anew.
func (s *state) moveHost(id ids.ServerID, host string) {
	var moved []cluster.Disk
	s.disks(func(d cluster.Disk, rec *disk) {
		if d.Server == id && rec.Host != host {
			moved = append(moved, d)
		}
	})
	for _, d := range moved {
		key := idKey(spaceDisk, uint32(d.ID))
		var rec disk
		s.load(key, &rec)
		rec.Host = host
		s.put(key, &rec)
	}
	m := cluster.Map{Servers: s.servers()}
	s.id.Hosts = uint32(m.Hosts())
}

// servers reads all servers, in order. Whether they are up is not in the state.
func (v *view) servers() []cluster.Server {
	var list []cluster.Server
	v.ascend([]byte{spaceServer}, []byte{spaceServer + 1}, func(key, value []byte) bool {
		var rec server
		if !v.decode(key, value, &rec) {
			return false
		}
		list = append(list, cluster.Server{ID: ids.ServerID(beUint32(key[1:])), Addr: rec.Addr, Host: rec.Host, Rack: rec.Rack})
		return true
	})
	return list
}

// disks calls fn for all disks, in order.
func (v *view) disks(fn func(cluster.Disk, *disk)) {
	v.ascend([]byte{spaceDisk}, []byte{spaceDisk + 1}, func(key, value []byte) bool {
		var rec disk
		if !v.decode(key, value, &rec) {
			return false
		}
		fn(cluster.Disk{
			ID: ids.DiskID(beUint32(key[1:])), UUID: rec.UUID, Server: rec.Server, State: rec.State,
			Capacity: rec.Capacity, Free: rec.Free,
		}, &rec)
		return true
	})
}

// updateDisks changes the recorded state of disks. Unknown ones are ignored.
func (s *state) updateDisks(r *api.UpdateDisks) (codec.Message, error) {
	for i := range r.Disks {
		d := &r.Disks[i]
		key := idKey(spaceDisk, uint32(d.ID))
		var rec disk
		if !s.load(key, &rec) {
			continue
		}
		if d.State > cluster.DiskRemoved {
			return nil, errkind.Invalid.Wrap("disk %d: state %d", d.ID, d.State)
		}
		if rec.State != d.State {
			s.id.MapVersion++
		}
		rec.State, rec.Capacity, rec.Free = d.State, d.Capacity, d.Free
		s.put(key, &rec)
	}
	return &api.Empty{}, nil
}

// setFeature raises the feature level.
func (s *state) setFeature(r *api.SetFeature) (codec.Message, error) {
	if r.Level > FeatureLevel {
		return nil, errkind.Unsupported.Wrap("feature level %d: this code knows %d", r.Level, FeatureLevel)
	}
	s.id.Feature = max(s.id.Feature, r.Level)
	return &api.Empty{}, nil
}
