package meta

import (
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

var update = flag.Bool("update", false, "write the golden files anew")

// sample is a key with a record whose fields all differ.
type sample struct {
	name string
	key  []byte
	rec  codec.Message
}

func sampleBlock() *block {
	return &block{
		Block: ids.Block{
			Layout: ids.RS(2, 1), Length: 100, Logical: 300, Codec: 7,
			Frames:  []ids.Frame{{Logical: 300, Stored: 100, Sum: 0x1122334455667788}},
			Granule: 16, Disks: []ids.DiskID{5, 0, 300}, Digests: []uint64{1 << 60, 2, 3}, Version: 9,
		},
		Birth: 4, Pins: 2, Holders: []holder{{ids.MakeIno(1, 2), 70}, {ids.MakeIno(1, 3), 80}},
	}
}

func sampleInode() *inode {
	return &inode{
		Attr: api.Attr{
			Mode: api.ModeRegular | 0o644, Nlink: 2, UID: 1000, GID: 1001, Rdev: 7, Flags: 3, Layout: ids.RS(4, 2), Size: 12345, Stored: 5,
			Atime: 1_700_000_000_000_000_001, Mtime: 1_700_000_000_000_000_500, Ctime: 1_700_000_000_000_000_400,
			Btime: 1_700_000_000_000_000_000, Change: 8, Generation: 9, MapVersion: 10, Parent: ids.MakeIno(11, 12),
		},
		Birth: 13, LastSnap: 14, Pin: 15, XattrBytes: 16, Clips: []clip{{17, 18}}, Inline: []byte("hello"),
	}
}

func samples() []sample {
	ino, dir := ids.MakeIno(3, 4), ids.MakeIno(5, 6)
	id := ids.MakeBlockID(3, 1, 0x1234567, 89)
	chunk := ids.ChunkKey{Block: id, Index: 2}
	u := ids.UUID{1, 2, 3, 4}
	n := number(300)
	whole := extent{Extent: ids.Extent{Len: 70 << 20, Kind: ids.ExtentBlock, Block: id, BlockOff: 9}, Version: 5, Birth: 6}
	inline := extent{Extent: ids.Extent{Len: 2, Kind: ids.ExtentInline, Data: []byte("hi")}, Version: 5, Birth: 6}
	return []sample{
		{"cluster", keyCluster, &identity{u, 2, 3, 4, 5, ids.Copies(3), 6, 7}},
		{"clock", keyClock, &n},
		{"alloc", keyAlloc, &alloc{1, 2, 3, 4}},
		{"counts", keyCounts, &Counts{1, 2, 3, 4, 5, 6}},
		{"slot", slotKey(0x102), &n},
		{"name", nameKey(dir, []byte("model.bin")), &dirent{Ino: ino, Type: 8, Birth: 3}},
		{"inode", inoKey(spaceInode, ino), sampleInode()},
		{"xattr", xattrKey(ino, []byte("user.a")), &xattr{Birth: 3, Value: []byte("value")}},
		{"extent", extentKey(ino, 300, 1<<20), &whole},
		{"extent-inline", extentKey(ino, 0, 0), &inline},
		{"block", blockKey(id), sampleBlock()},
		{"sum", inoKey(spaceSum, dir), &sum{1000, 2000, 3000}},
		{"back", backKey(ino, dir), &n},
		{"orphan", inoKey(spaceOrphan, ino), &mark{}},
		{"free-clip", freeKey(freeClip, uint64(ino), 0), &n},
		{"free-generation", freeKey(freeGeneration, uint64(ino), 7), &mark{}},
		{"free-inode", freeKey(freeInode, uint64(ino), 0), &mark{}},
		{"free-session", freeKey(freeSession, 9, 0), &mark{}},
		{"dead", deadKey(0x102, chunk), &n},
		{"repair", repairKey(chunk), &repair{Disk: 3, Since: 1_700_000_000_000_000_000, Reason: "digest"}},
		{"lock", inoKey(spaceLock, ino), &locks{[]lock{{api.LockOFD, api.WriteLock, 1, 2, 3, 4, 5}}}},
		{"locked", lockedKey(9, ino), &mark{}},
		{"session", sessionKey(9), &session{SessionSuspect, "/mnt", "h", u, 4, 1_700_000_000_000_000_000}},
		{"secret", uuidKey(spaceSecret, u), &n},
		{"window", windowKey(9, 127), &window{5, []byte("reply")}},
		{"server", idKey(spaceServer, 3), &server{u, "h:1", "h", "r"}},
		{"disk", idKey(spaceDisk, 3), &disk{u, 2, "h", cluster.DiskDraining, 1000, 900}},
		{"member", uuidKey(spaceMember, u), &n},
	}
}

func fresh(m codec.Message) codec.Message {
	return reflect.New(reflect.TypeOf(m).Elem()).Interface().(codec.Message)
}

func TestGoldenRecords(t *testing.T) {
	for _, s := range samples() {
		value := encodeRecord(s.rec)
		got := hex.EncodeToString(s.key) + " " + hex.EncodeToString(value)
		file := filepath.Join("testdata", "record-"+s.name+".hex")
		if *update {
			require.NoError(t, os.MkdirAll("testdata", 0o755))
			require.NoError(t, os.WriteFile(file, []byte(got+"\n"), 0o644))
		}
		want, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, strings.TrimSpace(string(want)), got, s.name)
		back := fresh(s.rec)
		require.NoError(t, decodeRecord(value, back), s.name)
		if e, ok := back.(*extent); ok {
			e.Off = s.rec.(*extent).Off
		}
		require.Equal(t, s.rec, back, s.name)
	}
}

func TestNameHashIsPartOfTheFormat(t *testing.T) {
	require.EqualValues(t, 0x77e80fb05d4c9493, HashName(nil))
	require.EqualValues(t, 0x415154ac54df672d, HashName([]byte("a")))
	require.EqualValues(t, 0xf4f80d22cf892c9, HashName([]byte("model-00001-of-00002.safetensors")))
}

func FuzzRecords(f *testing.F) {
	all := samples()
	for i, s := range all {
		f.Add(uint8(i), encodeRecord(s.rec))
	}
	f.Fuzz(func(t *testing.T, which uint8, p []byte) {
		rec := fresh(all[int(which)%len(all)].rec)
		if decodeRecord(p, rec) != nil {
			return
		}
		again := fresh(rec)
		require.NoError(t, decodeRecord(encodeRecord(rec), again))
		require.Equal(t, rec, again)
	})
}

// FuzzQueryOnDamage damages one record of a small state: reading must tell of
// it or go on, never panic or run for ever.
func FuzzQueryOnDamage(f *testing.F) {
	f.Add(uint16(3), []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, which uint16, value []byte) {
		r := newRig(t)
		d := r.dir(1, "d")
		ino := r.file(d, "f")
		r.write(ino, 0, 5000)
		keys := (&view{base: r.kv}).keys([]byte{0}, nil, 1<<16)
		r.kv.Set(keys[int(which)%len(keys)], value)
		_ = Check(r.kv)
		for _, q := range []api.Request{
			&api.GetAttr{Ino: ino}, &api.Open{Ino: ino}, &api.ReadDir{Ino: d, Max: 9, Plus: true},
			&api.Lookup{Parent: d, Name: []byte("..")}, &api.GetLayout{Ino: d}, &api.StatFS{},
		} {
			_, _ = r.m.Query(r.kv, &api.Header{Session: 1}, q)
		}
		for _, c := range []api.Request{
			&api.Commit{Ino: ino, Ops: []api.Op{{Kind: api.OpTruncate, Off: 10}}},
			&api.Rename{OldParent: d, OldName: []byte("f"), NewParent: 1, NewName: []byte("g")}, &api.FreeStep{},
		} {
			_, _ = r.m.Apply(r.kv, 100, r.encode(r.session, c))
		}
	})
}

// TestRecordsStaySmall keeps a file of one block within its share of one GiB
// for a million: keys and values of its four records, with 24 bytes a record
// for the store, in pages that are two thirds full.
func TestRecordsStaySmall(t *testing.T) {
	r := newRig(t)
	d := r.dir(1, "checkpoint-1000")
	size := func() (n, records int) {
		r.kv.m.Scan(func(k string, v []byte) bool {
			if k[0] >= spaceName && k[0] < spaceFree {
				records++
				n += len(k) + len(v)
			}
			return true
		})
		return n, records
	}
	r.write(r.file(d, "first"), 0, 64<<20)
	bytes0, records0 := size()
	r.write(r.file(d, "model-00001-of-00002.safetensors"), 0, 64<<20)
	bytes1, records1 := size()
	require.Equal(t, 4, records1-records0)
	cost := (bytes1 - bytes0 + 4*24) * 3 / 2
	t.Logf("%d bytes of keys and values, about %d on the disk", bytes1-bytes0, cost)
	require.LessOrEqual(t, cost, 1<<30/1_000_000)
}
