package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func writeOp(off uint64, b *ids.Block) api.Op {
	return api.Op{Kind: api.OpWrite, Off: off, Len: uint64(b.Length), Block: b.ID}
}

func TestCommitRefusesBadBlocks(t *testing.T) {
	r := newRig(t)
	f := r.file(r.dir(1, "d"), "f")
	used := r.write(f, 0, 4096)
	other := r.open(50)
	cases := []struct {
		name string
		kind errkind.Kind
		edit func(b *ids.Block)
	}{
		{"another session", errkind.Invalid, func(b *ids.Block) { b.ID = ids.MakeBlockID(f.Slot(), 1, other, 900) }},
		{"another incarnation", errkind.Invalid, func(b *ids.Block) { b.ID = ids.MakeBlockID(f.Slot(), 2, r.session, 900) }},
		{"another slot", errkind.Invalid, func(b *ids.Block) { b.ID = ids.MakeBlockID(f.Slot()+1, 1, r.session, 900) }},
		{"seen before", errkind.Conflict, func(b *ids.Block) { b.ID = used.ID }},
		{"empty", errkind.Invalid, func(b *ids.Block) { b.Length, b.Logical = 0, 0 }},
		{"too long", errkind.Invalid, func(b *ids.Block) { b.Length, b.Logical = 65<<20, 65<<20 }},
		{"unknown codec", errkind.Invalid, func(b *ids.Block) { b.Codec = 9 }},
		{"no quorum", errkind.Invalid, func(b *ids.Block) { b.Disks[0], b.Disks[1] = 0, 0 }},
		{"unknown disk", errkind.Invalid, func(b *ids.Block) { b.Disks[0] = 99 }},
		{"too few disks", errkind.Invalid, func(b *ids.Block) { b.Layout = ids.RS(6, 2) }},
	}
	for _, c := range cases {
		b := r.newBlock(f, 4096)
		c.edit(&b)
		// A forged list of disks does not even pass the decoder.
		before := r.kv.dump()
		_, err := r.try(0, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
		require.ErrorIs(t, err, errkind.Invalid, "without a session")
		require.Equal(t, before, r.kv.dump(), c.name)
		_, err = r.try(r.session, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
		require.ErrorIs(t, err, c.kind, c.name)
	}
	b := r.newBlock(f, 4096)
	r.refused(errkind.Invalid, &api.Commit{Ino: f, Blocks: []ids.Block{b}})
	r.refused(errkind.Invalid, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b, b}})
	r.refused(errkind.Changed, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}})
	long := writeOp(0, &b)
	long.Len++
	r.refused(errkind.Invalid, &api.Commit{Ino: f, Ops: []api.Op{long}, Blocks: []ids.Block{b}})
	r.refused(errkind.TooBig, &api.Commit{Ino: f, Ops: []api.Op{writeOp(api.MaxFileSize-10, &b)}, Blocks: []ids.Block{b}})
	r.refused(errkind.TooBig, &api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpTruncate, Off: 1 << 63}}})
	r.refused(errkind.Invalid, &api.Commit{Ino: 1})
	require.EqualValues(t, 1, r.counts().Blocks)
	r.check()
}

func TestFloor(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	r.do(&api.Commit{Ino: f, Floor: 100})
	b := r.newBlock(f, 4096)
	r.refused(errkind.Fenced, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
	r.do(&api.Commit{Ino: f, Floor: 50}) // never goes back
	r.refused(errkind.Fenced, &api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
	r.blockNo = 100
	r.write(f, 0, 4096)
}

func TestAppendTellsItsBase(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	run := func(expect uint64, data string) []uint64 {
		e := ids.Extent{Len: uint64(len(data)), Kind: ids.ExtentInline, Data: []byte(data)}
		op := api.Op{Kind: api.OpAppend, Off: expect, Len: e.Len, Extents: []ids.Extent{e}}
		return r.do(&api.Commit{Ino: f, Ops: []api.Op{op, op}}).(*api.Committed).Bases
	}
	require.Equal(t, []uint64{0, 3}, run(0, "abc"))
	require.Equal(t, []uint64{6, 8}, run(0, "de")) // another appended meanwhile
	m := r.ask(&api.Open{Ino: f}).(*api.Opened).Map
	require.Len(t, m.Extents, 1)
	require.Equal(t, "abcabcdede", string(m.Extents[0].Data), "small appends stay in the inode")
	r.check()
}

func TestInlineLeavesTheInode(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	inline := func(off uint64, data string) {
		r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpInline, Off: off, Len: uint64(len(data)), Data: []byte(data)}}})
	}
	inline(0, "hello")
	require.Zero(t, countSpace(r, spaceExtent))
	inline(3, "p!")
	require.Zero(t, countSpace(r, spaceExtent))
	inline(100, "far")
	require.Equal(t, 2, countSpace(r, spaceExtent))
	r.check()
	r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpTruncate}}})
	inline(0, "new")
	require.EqualValues(t, 1, r.attr(f).Generation)
	r.check()
	r.drain()
	require.Zero(t, countSpace(r, spaceExtent))
	r.refused(errkind.Invalid, &api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpInline, Len: 5000, Data: make([]byte, 5000)}}})
}

func countSpace(r *rig, space byte) int {
	v := &view{base: r.kv}
	return len(v.keys([]byte{space}, []byte{space + 1}, 1<<20))
}

// sparse writes n pieces of one byte, two bytes apart, from off on.
func (r *rig) sparse(f ids.Ino, off uint64, n int) {
	r.t.Helper()
	for n > 0 {
		k := min(n, api.MaxOps)
		b := r.newBlock(f, k)
		c := &api.Commit{Ino: f, Blocks: []ids.Block{b}}
		for i := range k {
			c.Ops = append(c.Ops, api.Op{Kind: api.OpWrite, Off: off, Len: 1, Block: b.ID, BlockOff: uint32(i)})
			off += 2
		}
		r.do(c)
		n -= k
	}
}

func TestClips(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	cut := func(size uint64) error {
		_, err := r.try(r.session, &api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpTruncate, Off: size}}})
		return err
	}
	size := uint64(0)
	for i := range maxClips {
		r.sparse(f, size, 3000)
		size = uint64(10 + i)
		require.NoError(t, cut(size))
		r.check()
	}
	v := &view{base: r.kv}
	n, _ := v.inode(f)
	require.Len(t, n.Clips, maxClips)
	r.sparse(f, size, 200)
	require.ErrorIs(t, cut(50), errkind.Busy)
	require.NoError(t, cut(5), "a lower one takes the place of all others")
	m := r.ask(&api.GetMap{Ino: f, End: 1 << 40, Max: 4000}).(*api.Mapped)
	require.Len(t, m.Map.Extents, 3)
	r.drain()
	r.check()
	n, _ = v.inode(f)
	require.Empty(t, n.Clips)
	require.EqualValues(t, 3, n.Stored)
}

func TestCommitThatTouchesTooMuchIsSplit(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	r.sparse(f, 0, 5000)
	before := r.kv.dump()
	_, err := r.try(r.session, &api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpPunch, Len: 1 << 40}}})
	require.ErrorIs(t, err, errkind.Split)
	after := r.kv.dump()
	for k := range after {
		if k[0] == spaceWindow {
			delete(after, k)
			delete(before, k)
		}
	}
	require.Equal(t, before, after, "nothing but the answer was stored")
	r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpPunch, Len: 5000}}})
	r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpPunch, Off: 5000, Len: 5000}}})
	require.Zero(t, countSpace(r, spaceExtent))
	require.Zero(t, r.counts().Blocks)
	r.check()
}

func TestNoCommandTouchesMoreThanTheLimit(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	r.sparse(f, 0, 20000)
	r.do(&api.Unlink{Parent: 1, Name: []byte("f")})
	for more := true; more; {
		r.kv.touched = 0
		orphans, err := ReadOrphans(r.kv, 0, 10)
		require.NoError(t, err)
		r.must(&api.Reap{Inos: orphans})
		more = r.must(&api.FreeStep{Max: 1 << 30}).(*api.Stepped).More
		require.LessOrEqual(t, r.kv.touched, 2*api.MaxRecords)
	}
	r.check()
	require.Zero(t, r.counts().Blocks)
}

func TestCompactionCandidates(t *testing.T) {
	r := newRig(t)
	d := r.dir(1, "d")
	fine, split, dead := r.file(d, "fine"), r.file(d, "split"), r.file(d, "dead")
	r.write(fine, 0, 4<<20)
	r.write(fine, CompactWindow, 4<<20)
	r.sparse(split, 0, CompactExtents+1)
	r.write(dead, 0, 4<<20)
	r.do(&api.Commit{Ino: dead, Ops: []api.Op{{Kind: api.OpPunch, Off: 100, Len: 3 << 20}}})
	var got []Candidate
	for at, rounds := (CompactCursor{}), 0; rounds == 0 || at != (CompactCursor{}); rounds++ {
		list, goOn, err := ReadCompactions(r.kv, at, 1)
		require.NoError(t, err)
		got = append(got, list...)
		at = goOn
	}
	require.Len(t, got, 2)
	require.Equal(t, split, got[0].Ino)
	require.Equal(t, Candidate{Ino: dead, End: CompactWindow, Extents: 2, Bytes: 1 << 20, Held: 4 << 20, Live: 1 << 20}, got[1])
}

func TestExtendNeverLowersTheSize(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	extend := func(size uint64) api.Attr {
		return r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpExtend, Off: size}}}).(*api.Committed).Attr
	}
	require.EqualValues(t, 5000, extend(5000).Size)
	before := r.write(f, 5000, 4096)
	a := extend(6000)
	require.EqualValues(t, 5000+before.Length, a.Size)
	require.EqualValues(t, before.Length, a.Stored)
	r.refused(errkind.TooBig, &api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpExtend, Off: 1 << 63}}})
	r.check()
}
