package store

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/chunktest"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares p with a file of testdata: the formats are on people's disks.
func golden(t *testing.T, name string, p []byte) []byte {
	path := filepath.Join("testdata", name+".golden")
	if *update {
		require.NoError(t, os.WriteFile(path, p, 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, p, "the %s format has changed", name)
	return want
}

var (
	goldenPlace  = place{seg: ids.UUID{0xaa, 15: 0xbb}, off: 17 * pageSize}
	goldenHeader = func() chunk.Header {
		h := chunktest.Header(chunktest.Key(77, 5), 1<<20)
		h.Session = 0x0102030405
		return h
	}()
)

func goldenFront() (page []byte, sums []uint64) {
	page = bytes.Repeat([]byte{0xee}, pageSize)
	sums = []uint64{1, 2, 0xfedcba9876543210}
	encodeFront(page, goldenPlace, &goldenHeader)
	encodeSeal(page, 3<<16-4096, tableDigest(sums), sums)
	return page, sums
}

func TestFrontPageFormat(t *testing.T) {
	page, sums := goldenFront()
	kind, f := decodeFront(golden(t, "front", page), goldenPlace)
	require.Equal(t, frontSeal, kind)
	require.Equal(t, front{header: goldenHeader, length: 3<<16 - 4096, digest: tableDigest(sums), sums: sums}, f)

	encodeFront(page, goldenPlace, &goldenHeader)
	kind, f = decodeFront(page, goldenPlace)
	require.Equal(t, frontOpen, kind)
	require.Equal(t, goldenHeader, f.header)
	require.True(t, allZero(page[headerSize:]), "nothing of an older seal is left")
}

// TestFrontPageElsewhere: a front page counts only in its segment, at its offset.
func TestFrontPageElsewhere(t *testing.T) {
	page, _ := goldenFront()
	for _, at := range []place{{seg: goldenPlace.seg, off: goldenPlace.off + pageSize}, {seg: ids.UUID{1}, off: goldenPlace.off}} {
		kind, _ := decodeFront(page, at)
		require.Equal(t, frontNone, kind)
	}
	kind, _ := decodeFront(make([]byte, pageSize), goldenPlace)
	require.Equal(t, frontZero, kind)
}

// TestFrontPageDamage flips every bit that is in use: never is a sealed chunk
// made of it, and no damage of the seal record hides the header.
func TestFrontPageDamage(t *testing.T) {
	page, sums := goldenFront()
	used := sealAt + sealFixed + 8*len(sums)
	for bit := range used * 8 {
		if at := bit / 8; at >= sealAt+12 && at < sealAt+16 {
			continue // unused
		}
		damaged := bytes.Clone(page)
		damaged[bit/8] ^= 1 << (bit % 8)
		kind, _ := decodeFront(damaged, goldenPlace)
		if bit/8 < headerSize {
			require.Equal(t, frontNone, kind, "bit %d", bit)
		} else {
			require.Contains(t, []frontKind{frontOpen}, kind, "bit %d", bit)
		}
	}
}

// TestSealBelongsToHeader: a torn page may join a new header to an older seal.
func TestSealBelongsToHeader(t *testing.T) {
	page, _ := goldenFront()
	other := goldenHeader
	other.Key = chunktest.Key(78, 5)
	fresh := make([]byte, pageSize)
	encodeFront(fresh, goldenPlace, &other)
	copy(page[:headerSize], fresh)
	kind, f := decodeFront(page, goldenPlace)
	require.Equal(t, frontOpen, kind)
	require.Equal(t, other.Key, f.header.Key)
}

func goldenBatch() *batch {
	return &batch{
		more: true,
		puts: []entry{
			{hi: 1, lo: 2, index: 3, state: chunk.StateSealed, seg: 4, page: 5, pages: 3, length: 8000, digest: 6},
			{hi: 1, lo: 3, index: 0, state: chunk.StateOpen, seg: 4, page: 9, pages: 4097},
		},
		drops:     []ids.ChunkKey{chunktest.Key(9, 1)},
		segs:      []segRecord{{num: 4, uuid: ids.UUID{7}, pages: 5000, punched: spans{{1, 3}, {7, 9}}}, {num: 5, removed: true}},
		setActive: true,
		active:    []activeRun{{4, span{4106, 5000}}},
	}
}

func TestCheckpointFormat(t *testing.T) {
	p := encodeBatch(nil, 8, 0x1122334455667788, goldenBatch())
	require.Zero(t, len(p)%pageSize)
	var b batch
	h, ok := decodeBatch(golden(t, "batch", p), &b)
	require.True(t, ok)
	require.Equal(t, uint64(8), h.seq)
	require.Equal(t, uint64(0x1122334455667788), h.prev)
	require.Equal(t, len(p), h.size)
	require.Equal(t, goldenBatch(), &b)
	for _, at := range []int{0, 5, 9, 17, 25, 40, 100} {
		damaged := bytes.Clone(p)
		damaged[at] ^= 4
		_, ok := decodeBatch(damaged, new(batch))
		require.False(t, ok, "byte %d", at)
	}

	head := golden(t, "log", encodeLogHeader(logHeader{disk: ids.UUID{1}, gen: 3}))
	lh, ok := decodeLogHeader(head)
	require.True(t, ok)
	require.Equal(t, logHeader{disk: ids.UUID{1}, gen: 3}, lh)

	head = golden(t, "segment", encodeSegHeader(segHeader{disk: ids.UUID{1}, uuid: ids.UUID{2}, num: 3, pages: 4}))
	sh, ok := decodeSegHeader(head)
	require.True(t, ok)
	require.Equal(t, segHeader{disk: ids.UUID{1}, uuid: ids.UUID{2}, num: 3, pages: 4}, sh)
}

func TestIdentity(t *testing.T) {
	id, err := decodeIdentity(golden(t, "identity", encodeIdentity(testIdentity)))
	require.NoError(t, err)
	require.Equal(t, testIdentity, id)

	m := vfs.NewMem()
	_, err = ReadIdentity(m)
	require.ErrorIs(t, err, errkind.NotFound)
	_, err = Open(testConfig(m))
	require.ErrorIs(t, err, errkind.NotFound)
	fresh := Identity{Disk: ids.UUID{1}, Server: ids.UUID{2}}
	require.NoError(t, Format(m, fresh))
	require.ErrorIs(t, Format(m, fresh), errkind.Exists)
	require.NoError(t, fresh.CheckCluster(ids.UUID{9}), "a new disk may join any cluster")
	require.NoError(t, WriteIdentity(m, testIdentity))
	m.Crash(nil)
	got, err := ReadIdentity(m)
	require.NoError(t, err)
	require.Equal(t, testIdentity, got)
	require.NoError(t, got.CheckCluster(testIdentity.Cluster))
	require.ErrorIs(t, got.CheckCluster(ids.UUID{9}), errkind.WrongCluster)

	require.True(t, m.Flip(identityFile, 20, 0))
	_, err = ReadIdentity(m)
	require.ErrorIs(t, err, errkind.Corrupt)
	require.ErrorIs(t, Format(m, fresh), errkind.Corrupt)

	used := vfs.NewMem()
	_, err = used.Create("holiday.jpg")
	require.NoError(t, err)
	require.ErrorIs(t, Format(used, fresh), errkind.Invalid)
}

func FuzzFront(f *testing.F) {
	page, _ := goldenFront()
	f.Add(page)
	f.Add(page[:headerSize])
	f.Fuzz(func(t *testing.T, p []byte) {
		p = append(p, make([]byte, pageSize)...)[:pageSize]
		putSum(p[:headerSize]) // get past the checksum
		kind, fr := decodeFront(p, goldenPlace)
		if kind == frontNone || kind == frontZero {
			return
		}
		again := make([]byte, pageSize)
		encodeFront(again, goldenPlace, &fr.header)
		require.Equal(t, p[:headerSize-8], again[:headerSize-8], "one encoding a header")
	})
}

func FuzzBatch(f *testing.F) {
	f.Add(encodeBatch(nil, 1, 2, goldenBatch()))
	f.Add(encodeBatch(nil, 1, 0, &batch{}))
	f.Fuzz(func(t *testing.T, p []byte) {
		decodeBatch(p, new(batch))
		if len(p) <= batchHeader {
			return
		}
		b := new(batch)
		if codec.Decode(p[batchHeader:], b) == nil {
			out := encodeBatch(nil, 1, 2, b)
			again := new(batch)
			_, ok := decodeBatch(out, again)
			require.True(t, ok)
			require.Equal(t, b, again)
		}
	})
}

func FuzzIdentity(f *testing.F) {
	f.Add(encodeIdentity(testIdentity))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) >= 16 {
			copy(p, magicIdentity[:])
			putSum(p)
		}
		if id, err := decodeIdentity(p); err == nil {
			again, err := decodeIdentity(encodeIdentity(id))
			require.NoError(t, err)
			require.Equal(t, id, again)
		}
		decodeSegHeader(p)
		decodeLogHeader(p)
	})
}
