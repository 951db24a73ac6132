package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// TestCheckFindsDamage plants one fault at a time in a sound state.
func TestCheckFindsDamage(t *testing.T) {
	build := func() (*rig, ids.Ino, ids.Ino, ids.Block) {
		r := newRig(t)
		d := r.dir(1, "d")
		f := r.file(d, "f")
		b := r.newBlock(f, 5000)
		b.Disks[5] = 0
		r.do(&api.Commit{Ino: f, Ops: []api.Op{writeOp(0, &b)}, Blocks: []ids.Block{b}})
		r.do(&api.Link{Ino: f, Parent: 1, Name: []byte("l")})
		r.do(&api.Lock{Ino: f, Space: api.LockOFD, Type: api.ReadLock, End: 5})
		r.check()
		return r, d, f, b
	}
	put := func(r *rig, key []byte, rec codec.Message) { r.kv.Set(key, encodeRecord(rec)) }
	faults := map[string]func(r *rig, d, f ids.Ino, b ids.Block){
		"name gone":          func(r *rig, d, _ ids.Ino, _ ids.Block) { r.kv.Delete(nameKey(d, []byte("f"))) },
		"name of nothing":    func(r *rig, d, _ ids.Ino, _ ids.Block) { put(r, nameKey(d, []byte("z")), &dirent{Ino: 999, Type: 8}) },
		"inode gone":         func(r *rig, _, f ids.Ino, _ ids.Block) { r.kv.Delete(inoKey(spaceInode, f)) },
		"back-pointer gone":  func(r *rig, d, f ids.Ino, _ ids.Block) { r.kv.Delete(backKey(f, d)) },
		"sum wrong":          func(r *rig, d, _ ids.Ino, _ ids.Block) { put(r, inoKey(spaceSum, d), &sum{Bytes: 1}) },
		"extent gone":        func(r *rig, _, f ids.Ino, _ ids.Block) { r.kv.Delete(extentKey(f, 0, 0)) },
		"block gone":         func(r *rig, _, _ ids.Ino, b ids.Block) { r.kv.Delete(blockKey(b.ID)) },
		"repair forgotten":   func(r *rig, _, _ ids.Ino, b ids.Block) { r.kv.Delete(repairKey(ids.ChunkKey{Block: b.ID, Index: 5})) },
		"alive and dead":     func(r *rig, _, _ ids.Ino, b ids.Block) { put(r, deadKey(1, ids.ChunkKey{Block: b.ID}), &mark{}) },
		"orphan with names":  func(r *rig, _, f ids.Ino, _ ids.Block) { put(r, inoKey(spaceOrphan, f), &mark{}) },
		"attribute unknown":  func(r *rig, _, f ids.Ino, _ ids.Block) { put(r, xattrKey(f, []byte("user.x")), &xattr{}) },
		"lock not indexed":   func(r *rig, _, f ids.Ino, _ ids.Block) { r.kv.Delete(lockedKey(r.session, f)) },
		"counters wrong":     func(r *rig, _, _ ids.Ino, _ ids.Block) { put(r, keyCounts, &Counts{}) },
		"session gone":       func(r *rig, _, _ ids.Ino, _ ids.Block) { r.kv.Delete(sessionKey(r.session)) },
		"disk of no server":  func(r *rig, _, _ ids.Ino, _ ids.Block) { r.kv.Delete(idKey(spaceServer, 2)) },
		"slot counter lost":  func(r *rig, d, _ ids.Ino, _ ids.Block) { r.kv.Delete(slotKey(d.Slot())) },
		"queued for nothing": func(r *rig, _, f ids.Ino, _ ids.Block) { put(r, freeKey(freeClip, uint64(f), 0), &mark{}) },
		"unreadable":         func(r *rig, _, f ids.Ino, _ ids.Block) { r.kv.Set(inoKey(spaceInode, f), []byte{9}) },
	}
	for name, plant := range faults {
		t.Run(name, func(t *testing.T) {
			r, d, f, b := build()
			plant(r, d, f, b)
			require.Error(t, Check(r.kv))
		})
	}
}

// TestDirectoryThatIsItsOwnAncestor must stop the node, not hang it.
func TestDirectoryThatIsItsOwnAncestor(t *testing.T) {
	r := newRig(t)
	a := r.dir(1, "a")
	b := r.dir(a, "b")
	n, _ := (&view{base: r.kv}).inode(a)
	n.Parent = b
	r.kv.Set(inoKey(spaceInode, a), encodeRecord(n))
	require.Error(t, Check(r.kv))
	_, err := r.m.Apply(r.kv, 50, r.encode(r.session, &api.Create{Parent: b, Name: []byte("f"), Mode: api.ModeRegular}))
	require.ErrorIs(t, err, errkind.Corrupt)
}
