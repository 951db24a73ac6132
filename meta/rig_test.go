package meta

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tidwall/btree"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// memory is an ordered key-value view in memory.
type memory struct {
	m       btree.Map[string, []byte]
	fail    error // what every read returns, when set
	touched int   // keys set or deleted
}

func (m *memory) Get(key []byte) ([]byte, error) {
	v, _ := m.m.Get(string(key))
	return v, m.fail
}

func (m *memory) Ascend(lo, hi []byte, fn func(key, value []byte) bool) error {
	m.m.Ascend(string(lo), func(k string, v []byte) bool {
		return (hi == nil || k < string(hi)) && fn([]byte(k), v)
	})
	return m.fail
}

func (m *memory) Descend(hi, lo []byte, fn func(key, value []byte) bool) error {
	m.m.Descend(string(hi), func(k string, v []byte) bool {
		return k >= string(lo) && fn([]byte(k), v)
	})
	return m.fail
}

func (m *memory) Set(key, value []byte) { m.touched++; m.m.Set(string(key), value) }
func (m *memory) Delete(key []byte)     { m.touched++; m.m.Delete(string(key)) }

func (m *memory) dump() map[string]string {
	d := map[string]string{}
	m.m.Scan(func(k string, v []byte) bool {
		d[k] = string(v)
		return true
	})
	return d
}

type tester interface {
	require.TestingT
	Helper()
}

// rig drives a machine as a leader would.
type rig struct {
	t       tester
	m       *Machine
	kv      *memory
	index   uint64
	clock   int64
	seq     uint64
	session ids.Session
	log     [][]byte
	blockNo uint64
}

var testCluster = ids.UUID{1, 2, 3}

// newRig founds a cluster of six hosts with a disk each, and a session.
func newRig(t tester) *rig {
	r := &rig{t: t, m: New(), kv: &memory{}, clock: 1_700_000_000_000_000_000}
	r.must(&api.Found{Cluster: testCluster, Layout: ids.RS(4, 2)})
	for i := range 6 {
		r.must(&api.RegisterServer{
			UUID: ids.UUID{9, byte(i)}, Addr: fmt.Sprintf("h%d:1", i), Host: fmt.Sprintf("h%d", i),
			Disks: []api.DiskReport{{UUID: ids.UUID{8, byte(i)}, Capacity: 1000, Free: 900}},
		})
	}
	r.session = r.open(1)
	return r
}

func (r *rig) open(secret byte) ids.Session {
	return r.as(0, &api.CreateSession{Name: "/mnt", Secret: ids.UUID{7, secret}}).(*api.SessionOpened).Session
}

func (r *rig) encode(s ids.Session, req api.Request) []byte {
	r.clock += 1000
	h := &api.Header{Time: r.clock, Session: s}
	if s != 0 {
		r.seq++
		h.Place, h.Seq = uint8(r.seq%api.Places), r.seq
	}
	return api.EncodeRequest(h, req)
}

func (r *rig) applyRaw(cmd []byte) []byte {
	r.t.Helper()
	r.index++
	r.log = append(r.log, cmd)
	reply, err := r.m.Apply(r.kv, r.index, cmd)
	require.NoError(r.t, err)
	return reply
}

// try runs a command of a session and returns what it answers.
func (r *rig) try(s ids.Session, req api.Request) (codec.Message, error) {
	r.t.Helper()
	reply, body, err := api.DecodeReply(req.Kind(), r.applyRaw(r.encode(s, req)))
	require.NoError(r.t, err)
	return body, reply.Failure()
}

func (r *rig) as(s ids.Session, req api.Request) codec.Message {
	r.t.Helper()
	body, err := r.try(s, req)
	require.NoError(r.t, err, "%T %+v", req, req)
	return body
}

// must runs a command of the leader.
func (r *rig) must(req api.Request) codec.Message { r.t.Helper(); return r.as(0, req) }

// do runs a command of the rig's session.
func (r *rig) do(req api.Request) codec.Message { r.t.Helper(); return r.as(r.session, req) }

// refused runs a command that must be refused.
func (r *rig) refused(kind errkind.Kind, req api.Request) {
	r.t.Helper()
	_, err := r.try(r.session, req)
	require.ErrorIs(r.t, err, kind, "%T %+v", req, req)
}

func (r *rig) ask(req api.Request) codec.Message {
	r.t.Helper()
	body, err := r.m.Query(r.kv, &api.Header{Session: r.session}, req)
	require.NoError(r.t, err)
	return body
}

func (r *rig) check() {
	r.t.Helper()
	require.NoError(r.t, Check(r.kv))
}

func (r *rig) create(parent ids.Ino, name string, mode uint32) ids.Ino {
	r.t.Helper()
	return r.do(&api.Create{Parent: parent, Name: []byte(name), Mode: mode, Time: r.clock}).(*api.Entry).Attr.Ino
}

func (r *rig) file(parent ids.Ino, name string) ids.Ino {
	r.t.Helper()
	return r.create(parent, name, api.ModeRegular|0o644)
}

func (r *rig) dir(parent ids.Ino, name string) ids.Ino {
	r.t.Helper()
	return r.create(parent, name, api.ModeDir|0o755)
}

func (r *rig) attr(ino ids.Ino) api.Attr {
	r.t.Helper()
	return r.ask(&api.GetAttr{Ino: ino}).(*api.Entry).Attr
}

// newBlock describes a sealed block of the session for a file.
func (r *rig) newBlock(ino ids.Ino, length int) ids.Block {
	r.blockNo++
	b := ids.Block{
		ID: ids.MakeBlockID(ino.Slot(), 1, r.session, r.blockNo), Layout: ids.RS(4, 2), Length: uint32(length),
		Logical: uint32(length), Granule: 16,
	}
	for i := range 6 {
		b.Disks = append(b.Disks, ids.DiskID(i+1))
		b.Digests = append(b.Digests, r.blockNo<<8|uint64(i))
	}
	return b
}

// write commits a whole block to a range.
func (r *rig) write(ino ids.Ino, off uint64, length int) ids.Block {
	r.t.Helper()
	b := r.newBlock(ino, length)
	r.do(&api.Commit{Ino: ino, Ops: []api.Op{{Kind: api.OpWrite, Off: off, Len: uint64(length), Block: b.ID}}, Blocks: []ids.Block{b}})
	return b
}

// drain frees all that is queued.
func (r *rig) drain() {
	r.t.Helper()
	for range 10000 {
		if !r.must(&api.FreeStep{}).(*api.Stepped).More {
			return
		}
	}
	require.Fail(r.t, "the queue of things to free does not end")
}

func (r *rig) reapAll() {
	r.t.Helper()
	orphans, err := ReadOrphans(r.kv, 0, 1000)
	require.NoError(r.t, err)
	r.must(&api.Reap{Inos: orphans})
	r.drain()
}

func (r *rig) counts() Counts {
	r.t.Helper()
	i, err := ReadInfo(r.kv)
	require.NoError(r.t, err)
	return i.Counts
}

// replay applies the whole log to another store.
func (r *rig) replay() *memory {
	r.t.Helper()
	other := &memory{}
	for i, cmd := range r.log {
		_, err := New().Apply(other, uint64(i+1), slices.Clone(cmd))
		require.NoError(r.t, err)
	}
	return other
}

func TestFoundAndRoot(t *testing.T) {
	r := newRig(t)
	r.check()
	root := r.attr(ids.RootIno)
	require.True(t, root.IsDir())
	require.EqualValues(t, 2, root.Nlink)
	r.must(&api.Found{Cluster: testCluster, Layout: ids.RS(4, 2)})
	r.refused(errkind.Exists, &api.Found{Cluster: ids.UUID{5}, Layout: ids.RS(4, 2)})
	m, err := ReadMap(r.kv)
	require.NoError(t, err)
	require.Len(t, m.Disks, 6)
	require.False(t, m.DiskDomains)
	require.EqualValues(t, 5400, r.ask(&api.StatFS{}).(*api.Totals).Free)
}

func TestNothingBeforeFounding(t *testing.T) {
	m, kv := New(), &memory{}
	p, err := m.Apply(kv, 1, api.EncodeRequest(&api.Header{}, &api.CreateSession{}))
	require.NoError(t, err)
	reply, _, err := api.DecodeReply(api.KindCreateSession, p)
	require.NoError(t, err)
	require.ErrorIs(t, reply.Failure(), errkind.Unavailable)
	require.Zero(t, kv.m.Len())
	require.NoError(t, Check(kv))
}

func TestViewFailureStopsTheNode(t *testing.T) {
	r := newRig(t)
	r.kv.fail = errkind.Corrupt.Wrap("page 7")
	before := r.kv.touched
	_, err := r.m.Apply(r.kv, 99, r.encode(r.session, &api.Create{Parent: 1, Name: []byte("x"), Mode: api.ModeRegular}))
	require.ErrorIs(t, err, errkind.Corrupt)
	require.Equal(t, before, r.kv.touched)
	_, err = r.m.Query(r.kv, &api.Header{}, &api.GetAttr{Ino: 1})
	require.ErrorIs(t, err, errkind.Corrupt)
}

func TestPoisonCommandIsAnswered(t *testing.T) {
	r := newRig(t)
	before := r.kv.dump()
	reply, _, err := api.DecodeReply(api.KindCreate, r.applyRaw([]byte{1, 2, 3}))
	require.NoError(t, err)
	require.ErrorIs(t, reply.Failure(), errkind.Invalid)
	require.Equal(t, before, r.kv.dump())
}
