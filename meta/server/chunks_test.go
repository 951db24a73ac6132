package server_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// chunkServer is a chunk server as the metadata service sees one.
type chunkServer struct {
	c       *fixture
	cl      *client.Client
	id      ids.ServerID
	disks   []ids.DiskID
	down    bool
	room    uint32
	free    uint64
	small   bool // a disk of 64 MiB
	deleted []api.ChunkAt
	freed   []api.ChunkAt
	jobs    []api.Job
}

type fixture struct {
	*simulated
	mount   *client.Client
	servers []*chunkServer
}

// chunkCluster simulates n chunk servers with one disk each, and a mount.
func chunkCluster(t *testing.T, n int, fn func(f *fixture)) {
	t.Helper()
	simulate(t, 2, func(c *simulated) {
		f := &fixture{simulated: c}
		for i := range n {
			s := &chunkServer{c: f, room: 4, free: 1 << 39}
			s.cl = c.dial(fmt.Sprintf("chunk%d", i))
			var r api.Registered
			require.NoError(t, s.cl.Do(bg, &api.RegisterServer{
				UUID: ids.UUID{1, byte(i)}, Addr: fmt.Sprintf("10.0.0.%d:1", i), Host: fmt.Sprintf("h%d", i),
				Disks: []api.DiskReport{{UUID: ids.UUID{2, byte(i)}, Capacity: 1 << 40, Free: 1 << 39}},
			}, &r))
			s.id, s.disks = r.Server, r.Disks
			f.servers = append(f.servers, s)
		}
		f.mount = c.dial("mount")
		stop := false
		c.Go("heartbeats", func() {
			for !stop {
				for _, s := range f.servers {
					s.beat()
				}
				c.Sleep(time.Second)
			}
		})
		c.Sleep(12 * time.Second)
		fn(f)
		stop = true
		c.Sleep(2 * time.Second)
		for _, s := range f.servers {
			require.NoError(t, s.cl.Close(bg))
		}
		require.NoError(t, f.mount.Close(bg))
	})
}

func (s *chunkServer) beat() {
	if s.down {
		return
	}
	m := &api.Heartbeat{Server: s.id, Boot: 1, Freed: s.freed, Room: s.room}
	for _, d := range s.disks {
		r := api.DiskReport{ID: d, Capacity: 1 << 40, Free: s.free}
		if s.small {
			r.Capacity, r.Free = 64<<20, 8<<20
		}
		m.Disks = append(m.Disks, r)
	}
	var o api.Orders
	if s.cl.Do(bg, m, &o) != nil {
		return
	}
	s.freed = o.Delete
	s.deleted = append(s.deleted, o.Delete...)
	s.jobs = append(s.jobs, o.Jobs...)
}

func (f *fixture) state(d ids.DiskID) cluster.DiskState { return f.mount.Map().Disk(d).State }

// commit writes a file of one block; missing tells which chunk is late.
func (f *fixture) commit(name string, missing int) (ids.Ino, ids.Block) {
	f.t.Helper()
	ino, err := create(f.mount, name, false)
	require.NoError(f.t, err)
	l := ids.RS(2, 2)
	b := ids.Block{ID: f.mount.NextBlockID(ino.Slot()), Layout: l, Length: 1 << 20, Logical: 1 << 20, Granule: 16, Digests: make([]uint64, 4)}
	for i := range 4 {
		b.Disks = append(b.Disks, f.servers[i].disks[0])
	}
	if missing >= 0 {
		b.Disks[missing] = 0
	}
	err = f.mount.Do(bg, &api.Commit{
		Ino: ino, Blocks: []ids.Block{b}, Mtime: 1, Floor: b.ID.Counter() + 1,
		Ops: []api.Op{{Kind: api.OpWrite, Len: 1 << 20, Block: b.ID}},
	}, nil)
	require.NoError(f.t, err)
	return ino, b
}

func (f *fixture) verdict(disk ids.DiskID, key ids.ChunkKey, writer ids.Session) api.Verdict {
	f.t.Helper()
	var v api.VerdictList
	req := &api.Verdicts{Disk: disk, Chunks: []ids.ChunkKey{key}}
	if writer != 0 {
		req.Writers = []ids.Session{writer}
	}
	require.NoError(f.t, f.servers[0].cl.Do(bg, req, &v))
	return v.Verdicts[0]
}

func TestServersGoDownAndDisksDie(t *testing.T) {
	chunkCluster(t, 4, func(f *fixture) {
		require.True(t, f.mount.Map().DiskDomains, "4 hosts for rs-4-2")
		require.Len(t, f.mount.Map().Servers, 4)
		require.NotEmpty(t, f.mount.Map().Sets)
		v := f.mount.Map().Version
		victim := f.servers[1]
		victim.down = true
		f.Sleep(8 * time.Second)
		require.Greater(t, f.mount.Map().Version, v)
		require.False(t, f.mount.Map().Server(victim.id).Up)
		for _, set := range f.mount.Map().Sets {
			require.NotContains(t, set.Disks, victim.disks[0])
		}
		var st api.Status
		require.NoError(t, f.mount.Do(bg, &api.GetStatus{}, &st))
		require.Contains(t, fmt.Sprint(st.Warnings), "1 of 4 disks are down")
		require.Equal(t, cluster.DiskActive, f.state(victim.disks[0]), "it has its grace period")
		f.Sleep(11 * time.Minute)
		require.Equal(t, cluster.DiskDead, f.state(victim.disks[0]))
		victim.down = false
		f.Sleep(5 * time.Second)
		require.Equal(t, cluster.DiskActive, f.state(victim.disks[0]))
		var totals api.Totals
		require.NoError(t, f.mount.Do(bg, &api.StatFS{}, &totals))
		require.Equal(t, uint64(4<<40), totals.Capacity)
		require.Equal(t, uint64(4<<39), totals.Free)
	})
}

func TestChunksOfARemovedFileAreDeleted(t *testing.T) {
	chunkCluster(t, 4, func(f *fixture) {
		_, b := f.commit("f", -1)
		removed := f.Now()
		require.NoError(t, unlink(f.mount, "f"))
		for len(f.servers[2].deleted) == 0 {
			require.Less(t, f.Now()-removed, 30*time.Second)
			f.Sleep(100 * time.Millisecond)
		}
		require.GreaterOrEqual(t, f.Now()-removed, 10*time.Second, "no sooner than 10 s after the last reference")
		require.Equal(t, api.ChunkAt{Key: ids.ChunkKey{Block: b.ID, Index: 2}, Disk: f.servers[2].disks[0]}, f.servers[2].deleted[0])
		f.Sleep(3 * time.Second)
		f.g.view(t, func(r kv.Reader) error {
			i, err := meta.ReadInfo(r)
			require.Zero(t, i.Counts.Dead)
			return err
		})
	})
}

func TestMissingChunkIsRepaired(t *testing.T) {
	chunkCluster(t, 6, func(f *fixture) {
		_, b := f.commit("f", 1)
		f.Sleep(2 * time.Second)
		for _, s := range f.servers {
			require.Empty(t, s.jobs, "the writer still has its cells and may finish it")
		}
		f.Sleep(5 * time.Second)
		var job *api.Job
		var by *chunkServer
		for _, s := range f.servers {
			for i := range s.jobs {
				require.Nil(t, job, "one chunk, one job")
				job, by = &s.jobs[i], s
			}
		}
		require.NotNil(t, job)
		require.Equal(t, api.JobRepair, job.Kind)
		require.Equal(t, b.ID, job.Block.ID)
		require.Equal(t, by.disks[0], job.Target, "its own disk")
		require.NotContains(t, b.Disks, job.Target)
		key := ids.ChunkKey{Block: b.ID, Index: 1}
		require.Equal(t, api.VerdictNotYet, f.verdict(job.Target, key, by.cl.Session()))
		place := &api.PlaceChunk{Key: key, Disk: job.Target, Version: job.Block.Version + 7}
		require.ErrorIs(t, by.cl.Do(bg, place, nil), errkind.Changed)
		place.Version = job.Block.Version
		require.NoError(t, by.cl.Do(bg, place, nil))
		require.Equal(t, api.VerdictKeep, f.verdict(job.Target, key, by.cl.Session()))
		f.Sleep(10 * time.Minute)
		for _, s := range f.servers {
			require.LessOrEqual(t, len(s.jobs), 1, "nothing is left to repair")
		}
	})
}

// TestRepairAvoidsADiskWithoutRoom fills every disk that a missing chunk could
// go to: the chunk waits, and is repaired when one of them has room.
func TestRepairAvoidsADiskWithoutRoom(t *testing.T) {
	chunkCluster(t, 6, func(f *fixture) {
		// The block will lie on servers 0, 2 and 3.
		for _, i := range []int{1, 4, 5} {
			f.servers[i].small = true
		}
		f.Sleep(time.Minute)
		f.commit("f", 1)
		spare := f.servers[4]
		f.Sleep(30 * time.Second)
		for _, s := range f.servers {
			require.Empty(t, s.jobs, "no room anywhere")
		}
		spare.small = false
		f.Sleep(2 * time.Minute)
		require.NotEmpty(t, spare.jobs)
		require.Equal(t, spare.disks[0], spare.jobs[0].Target)
	})
}

func TestJobOfALostServerIsGivenToAnother(t *testing.T) {
	chunkCluster(t, 6, func(f *fixture) {
		f.commit("f", 1)
		f.Sleep(5 * time.Second)
		for _, s := range f.servers {
			s.down = len(s.jobs) > 0
		}
		f.Sleep(15 * time.Second)
		n := 0
		for _, s := range f.servers {
			n += len(s.jobs)
		}
		require.Equal(t, 2, n)
	})
}

func TestChunksOfADeadDiskAreRebuilt(t *testing.T) {
	chunkCluster(t, 6, func(f *fixture) {
		for i := range 10 {
			f.commit(fmt.Sprint(i), -1)
		}
		f.servers[0].down = true
		f.Sleep(11 * time.Minute)
		seen := map[ids.BlockID]bool{}
		for _, s := range f.servers {
			for _, j := range s.jobs {
				seen[j.Block.ID] = true
			}
		}
		require.Len(t, seen, 10)
	})
}

func TestVerdicts(t *testing.T) {
	chunkCluster(t, 5, func(f *fixture) {
		_, kept := f.commit("kept", 2)
		mount, repairer := f.mount.Session(), f.servers[1].cl.Session()
		inc := f.mount.Incarnation()
		id := func(s ids.Session, n uint64) ids.BlockID { return ids.MakeBlockID(0, inc, s, n) }
		ended := f.dial("gone")
		gone := ended.Session()
		require.NoError(t, ended.Close(bg))
		f.Sleep(12 * time.Minute) // behind the guard of a new leader
		d := func(n int) ids.DiskID { return f.servers[n].disks[0] }
		floor := kept.ID.Counter() + 1
		for _, tc := range []struct {
			name   string
			disk   ids.DiskID
			block  ids.BlockID
			index  uint8
			writer ids.Session
			want   api.Verdict
		}{
			{"recorded", d(0), kept.ID, 0, 0, api.VerdictKeep},
			{"recorded elsewhere, writer past it", d(4), kept.ID, 0, 0, api.VerdictDelete},
			{"late chunk of a living writer", d(4), kept.ID, 2, 0, api.VerdictNotYet},
			{"a repair job's, its session lives", d(4), kept.ID, 1, repairer, api.VerdictNotYet},
			{"never committed, at the floor", d(0), id(mount, floor), 0, 0, api.VerdictNotYet},
			{"never committed, below the floor", d(0), id(mount, floor-1), 1, 0, api.VerdictDelete},
			{"writer ended", d(0), id(gone, 1), 0, 0, api.VerdictDelete},
			{"writer unknown", d(0), id(1<<30, 1), 0, 0, api.VerdictKeep},
			{"higher incarnation", d(0), ids.MakeBlockID(0, inc+1, gone, 1), 0, 0, api.VerdictKeep},
			{"lower incarnation, writer ended", d(0), ids.MakeBlockID(0, inc-1, gone, 1), 0, 0, api.VerdictDelete},
		} {
			got := f.verdict(tc.disk, ids.ChunkKey{Block: tc.block, Index: tc.index}, tc.writer)
			require.Equal(t, tc.want, got, tc.name)
		}
	})
}

func TestFloorOfARenewalCounts(t *testing.T) {
	chunkCluster(t, 4, func(f *fixture) {
		key := ids.ChunkKey{Block: f.mount.NextBlockID(0)}
		require.Equal(t, api.VerdictNotYet, f.verdict(f.servers[0].disks[0], key, 0))
		f.mount.SetFloor(func() uint64 { return key.Block.Counter() })
		f.Sleep(5 * time.Second)
		require.Equal(t, api.VerdictNotYet, f.verdict(f.servers[0].disks[0], key, 0))
		f.mount.SetFloor(func() uint64 { return key.Block.Counter() + 1 })
		f.Sleep(5 * time.Second)
		require.Equal(t, api.VerdictDelete, f.verdict(f.servers[0].disks[0], key, 0))
	})
}
