package file_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/meta/api"
)

// TestSpilledBlocksAreCommittedTogether lets every block become several when it
// is sealed: of a stream, of scattered writes, of appended bytes, before and
// after the commit.
func TestSpilledBlocksAreCommittedTogether(t *testing.T) {
	p := newPair(t, 64<<20)
	p.blocks.faults.spill = 100
	most := 0
	p.a.s.before = func(r api.Request) error {
		if c, ok := r.(*api.Commit); ok {
			most = max(most, len(c.Blocks))
		}
		return nil
	}
	attr := p.a.s.create(t, "spilled")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	want := random(1, 5<<20)
	for off := 0; off < len(want); off += 1 << 20 {
		write(t, h, want[off:off+1<<20], int64(off))
	}
	got, err := readAll(h, len(want))
	require.NoError(t, err)
	require.Zero(t, differ(want, got)-len(want), "sealed, not committed")
	require.NoError(t, h.Flush(ctx))
	require.Greater(t, most, 1)
	for i := range 100 {
		part := random(uint64(100+i), 3000)
		at := i * 7919 % 100 * 40_000
		copy(want[at:], part)
		write(t, h, part, int64(at))
	}
	require.NoError(t, h.Flush(ctx))
	tail := random(2, 700_000)
	_, err = h.WriteAt(ctx, tail, 0, file.WriteFlags{Append: true})
	require.NoError(t, err)
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.expect(t, attr, append(want, tail...))
}

// TestSpilledBlocksThatAreOverwritten leaves some of the blocks of a spilled
// one without a reference before the commit, which must not name them.
func TestSpilledBlocksThatAreOverwritten(t *testing.T) {
	p := newPair(t, 64<<20)
	p.blocks.faults.spill = 100
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	want := random(1, 2<<20)
	write(t, h, want[:1<<20], 0)
	write(t, h, want[1<<20:], 1<<20)
	_, err := h.ReadAt(ctx, make([]byte, 10), 0) // seals
	require.NoError(t, err)
	clear(want[100_000 : 2<<20-100])
	require.NoError(t, h.Allocate(ctx, file.AllocPunch, 100_000, 2<<20-100-100_000))
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.expect(t, attr, want)
}

// TestSplitCommitOfSpilledBlock divides a spilled pack, because the metadata
// service takes few ranges at once; the halves spill, too.
func TestSplitCommitOfSpilledBlock(t *testing.T) {
	p := newPair(t, 64<<20)
	p.blocks.faults.spill = 50
	p.a.s.before = splitLarge(8)
	attr := p.a.s.create(t, "f")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	want := make([]byte, 200*20_000)
	for i := range 200 {
		part := random(uint64(i), 10_000)
		copy(want[i*20_000:], part)
		write(t, h, part, int64(i*20_000))
	}
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.expect(t, attr, want[:199*20_000+10_000])
}

// TestExtensionNeverLowersTheSize raises the size on two mounts of which one
// does not know what the other did.
func TestExtensionNeverLowersTheSize(t *testing.T) {
	p := newPair(t, 8<<20)
	for _, mode := range []file.AllocMode{file.AllocExtend, file.AllocZero} {
		attr := p.a.s.create(t, string(rune('a'+mode)))
		h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
		other, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{Write: true})
		require.NoError(t, err)
		require.NoError(t, h.Allocate(ctx, mode, 1000, 1000))
		want := random(1, 300_000)
		write(t, other, want, 0)
		require.NoError(t, other.Flush(ctx))
		require.NoError(t, h.Flush(ctx))
		require.EqualValues(t, len(want), h.Attr().Size)
		h.Release()
		other.Release()
		p.expect(t, attr, want)
	}
}
