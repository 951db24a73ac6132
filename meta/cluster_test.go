package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func TestRegisterServer(t *testing.T) {
	r := newRig(t)
	reg := &api.RegisterServer{
		UUID: ids.UUID{9, 100}, Addr: "new:1", Host: "new",
		Disks: []api.DiskReport{{UUID: ids.UUID{8, 100}}, {UUID: ids.UUID{8, 101}, ReadOnly: true}},
	}
	version := func() uint64 {
		m, err := ReadMap(r.kv)
		require.NoError(t, err)
		return m.Version
	}
	v0 := version()
	got := r.must(reg).(*api.Registered)
	require.Equal(t, []ids.DiskID{7, 8}, got.Disks)
	require.Equal(t, testCluster, got.Cluster)
	v1 := version()
	require.Greater(t, v1, v0)
	require.Equal(t, got, r.must(reg), "repeating it is harmless")
	require.Equal(t, v1, version())
	m, err := ReadMap(r.kv)
	require.NoError(t, err)
	require.Equal(t, cluster.DiskReadOnly, m.Disk(8).State)

	reg.Host, reg.Addr = "h0", "moved:1" // the server moved to a host with another one
	reg.Disks[0].ID, reg.Cluster = 7, testCluster
	require.Equal(t, got, r.must(reg))
	r.check()
	reg.Disks[0].ID = 3
	r.refused(errkind.Conflict, reg)
	reg.Disks[0].ID, reg.Cluster = 7, ids.UUID{66}
	r.refused(errkind.WrongCluster, reg)
	r.refused(errkind.Invalid, &api.RegisterServer{UUID: ids.UUID{9, 101}, Host: "x", Addr: "x:1", Disks: []api.DiskReport{{}}})
	r.refused(errkind.Conflict, &api.RegisterServer{UUID: ids.UUID{8, 100}, Host: "x", Addr: "x:1"})

	back := r.must(&api.RegisterServer{
		UUID: ids.UUID{9, 102}, Addr: "back:1", Host: "back", Cluster: testCluster,
		Disks: []api.DiskReport{{UUID: ids.UUID{8, 120}, ID: 20}, {UUID: ids.UUID{8, 121}}},
	}).(*api.Registered)
	require.Equal(t, []ids.DiskID{20, 21}, back.Disks, "numbers that disks bring along are never given again")
	r.must(&api.UpdateDisks{Disks: []cluster.Disk{{ID: 20, State: cluster.DiskDead}, {ID: 999}}})
	m, err = ReadMap(r.kv)
	require.NoError(t, err)
	require.Equal(t, cluster.DiskDead, m.Disk(20).State)
	r.check()
}

func TestMissingAndMisplacedChunksAreQueued(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	b := r.newBlock(f, 1<<20)
	b.Disks[5] = 0
	b.Disks[3] = b.Disks[2]
	r.do(&api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
	list, err := ReadRepairs(r.kv, ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.EqualValues(t, 3, list[0].Key.Index)
	require.EqualValues(t, 5, list[1].Key.Index)
	require.Zero(t, list[1].Disk)
	r.check()

	place := &api.PlaceChunk{Key: list[1].Key, Disk: 6}
	r.do(place)
	r.refused(errkind.Changed, place)
	rec, ok, err := ReadBlock(r.kv, b.ID)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, ids.DiskID(6), rec.Disks[5])
	require.Equal(t, []ids.Ino{f}, rec.Holders)
	r.refused(errkind.Invalid, &api.PlaceChunk{Key: list[0].Key, Disk: 6, Version: rec.Version}) // holds another chunk
	r.do(&api.PlaceChunk{Key: list[0].Key, Disk: 4, Version: rec.Version})
	require.Zero(t, r.counts().Repairs)
	dead, err := ReadDead(r.kv, 3, ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Equal(t, []ids.ChunkKey{list[0].Key}, []ids.ChunkKey{dead[0].Key}, "the chunk at its old place goes")
	r.refused(errkind.Busy, &api.PlaceChunk{Key: list[0].Key, Disk: 3, Version: rec.Version + 1})
	r.check()

	r.do(&api.Unlink{Parent: 1, Name: []byte("f")})
	r.reapAll()
	r.refused(errkind.NotFound, &api.PlaceChunk{Key: list[0].Key, Disk: 3, Version: rec.Version + 1})
}

func TestQueueRepair(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	b := r.write(f, 0, 1<<20)
	at := func(i uint8, d ids.DiskID) api.ChunkAt {
		return api.ChunkAt{Key: ids.ChunkKey{Block: b.ID, Index: i}, Disk: d}
	}
	unknown := api.ChunkAt{Key: ids.ChunkKey{Block: ids.BlockID{Lo: 5}}, Disk: 1}
	r.do(&api.QueueRepair{Chunks: []api.ChunkAt{at(0, 1), at(0, 1), at(1, 5), at(2, 0), at(9, 1), unknown}, Damage: "digest"})
	list, err := ReadRepairs(r.kv, ids.ChunkKey{}, 10)
	require.NoError(t, err)
	require.Len(t, list, 1, "what is fine, unknown or already queued is ignored")
	require.Equal(t, "digest", list[0].Reason)
	r.do(&api.Unlink{Parent: 1, Name: []byte("f")})
	r.reapAll()
	require.Zero(t, r.counts().Repairs, "a dead block needs no repair")
	require.EqualValues(t, 6, r.counts().Dead)
	r.check()
	again := b
	g := r.file(1, "g")
	again.ID = b.ID
	r.refused(errkind.Conflict, &api.Commit{Ino: g, Ops: []api.Op{writeOp(0, &again)}, Blocks: []ids.Block{again}})
}

func TestFewHostsShareByCount(t *testing.T) {
	r := &rig{t: t, m: New(), kv: &memory{}}
	r.must(&api.Found{Cluster: testCluster, Layout: ids.RS(4, 2)})
	disks := make([]api.DiskReport, 6)
	for i := range disks {
		disks[i].UUID = ids.UUID{8, byte(i)}
	}
	r.must(&api.RegisterServer{UUID: ids.UUID{9}, Addr: "h:1", Host: "h", Disks: disks})
	r.session = r.open(1)
	m, err := ReadMap(r.kv)
	require.NoError(t, err)
	require.True(t, m.DiskDomains)
	r.write(r.file(1, "f"), 0, 1<<20)
	require.Zero(t, r.counts().Repairs, "one host, six disks: a domain is a disk")
	r.check()
}

func TestVerdicts(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	b := r.write(f, 0, 1<<20)
	r.blockNo = 10
	open := r.newBlock(f, 1)
	ask := func(disk ids.DiskID, id ids.BlockID, writer ids.Session, floor uint64) api.Verdict {
		v, err := Verdict(r.kv, disk, ids.ChunkKey{Block: id, Index: 0}, writer, floor)
		require.NoError(t, err)
		return v
	}
	other := r.open(77)
	require.Equal(t, api.VerdictKeep, ask(1, b.ID, 0, 99))
	require.Equal(t, api.VerdictNotYet, ask(2, b.ID, 0, 0), "another disk: perhaps on its way there")
	require.Equal(t, api.VerdictDelete, ask(2, b.ID, 0, 99))
	require.Equal(t, api.VerdictNotYet, ask(2, b.ID, other, 99), "a job of a live session writes it")
	require.Equal(t, api.VerdictNotYet, ask(1, open.ID, 0, 11))
	require.Equal(t, api.VerdictDelete, ask(1, open.ID, 0, 12))
	require.Equal(t, api.VerdictKeep, ask(1, ids.MakeBlockID(0, 1, 999, 1), 0, 0), "unknown session")
	require.Equal(t, api.VerdictKeep, ask(1, ids.MakeBlockID(0, 2, r.session, 1), 0, 99), "higher incarnation")
	r.must(&api.SuspectSessions{Sessions: []ids.Session{r.session}})
	require.Equal(t, api.VerdictNotYet, ask(1, open.ID, 0, 0), "a suspect may resume")
	r.must(&api.EndSessions{Sessions: []ids.Session{r.session, other}})
	require.Equal(t, api.VerdictDelete, ask(1, open.ID, 0, 0))
	require.Equal(t, api.VerdictKeep, ask(1, b.ID, 0, 0))
	r.drain()
	require.Equal(t, api.VerdictDelete, ask(1, open.ID, 0, 0))
	r.kv.fail = errkind.Corrupt
	v, err := Verdict(r.kv, 1, ids.ChunkKey{Block: open.ID}, 0, 0)
	require.ErrorIs(t, err, errkind.Corrupt)
	require.Equal(t, api.VerdictKeep, v)
}

func TestReadBlocksOfADisk(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	for i := range 10 {
		b := r.newBlock(f, 4096)
		if i%2 == 0 {
			b.Disks[5] = 0
		}
		r.do(&api.Commit{Ino: f, Ops: []api.Op{writeOp(uint64(i)*4096, &b)}, Blocks: []ids.Block{b}})
	}
	var got []BlockInfo
	for after, first := (ids.BlockID{}), true; first || !after.IsZero(); first = false {
		list, next, err := ReadBlocks(r.kv, 6, after, 3)
		require.NoError(t, err)
		got = append(got, list...)
		after = next
	}
	require.Len(t, got, 5)
	require.EqualValues(t, 4096, got[0].Live)
}

func TestFeatureLevel(t *testing.T) {
	r := newRig(t)
	r.must(&api.SetFeature{Level: FeatureLevel})
	r.must(&api.SetFeature{Level: 0})
	i, err := ReadInfo(r.kv)
	require.NoError(t, err)
	require.EqualValues(t, FeatureLevel, i.Feature)
	r.refused(errkind.Unsupported, &api.SetFeature{Level: FeatureLevel + 1})
}
