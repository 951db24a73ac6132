package meta

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// contentModel keeps what files must contain. Blocks are byte arrays.
type contentModel struct {
	r      *rig
	inos   []ids.Ino
	data   map[ids.Ino][]byte
	blocks map[ids.BlockID][]byte
	fill   uint32 // makes every written byte run differ
}

const modelSize = 20000 // largest file of the model, bytes

func newContentModel(t tester) *contentModel {
	m := &contentModel{r: newRig(t), data: map[ids.Ino][]byte{}, blocks: map[ids.BlockID][]byte{}}
	dir := m.r.dir(ids.RootIno, "d")
	for _, name := range []string{"x", "y"} {
		ino := m.r.file(dir, name)
		m.inos = append(m.inos, ino)
		m.data[ino] = nil
	}
	return m
}

func (m *contentModel) bytes(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		if i%4 == 0 {
			m.fill++
		}
		p[i] = byte(m.fill >> (8 * (i % 4)))
	}
	return p
}

func overlay(file []byte, off int, p []byte) []byte {
	if n := off + len(p); n > len(file) {
		file = append(bytes.Clone(file), make([]byte, n-len(file))...)
	} else {
		file = bytes.Clone(file)
	}
	copy(file[off:], p)
	return file
}

// op draws one operation on what the file contains at that point and returns
// what it contains then.
func (m *contentModel) op(t *rapid.T, c *api.Commit, file []byte) []byte {
	off := rapid.IntRange(0, modelSize-4000).Draw(t, "off")
	n := rapid.IntRange(1, 4000).Draw(t, "len")
	switch rapid.IntRange(0, 8).Draw(t, "op") {
	case 0, 1:
		return m.scatter(t, c, file, off, n)
	case 2:
		n, off = n%300+1, off%5000
		p := m.bytes(n)
		c.Ops = append(c.Ops, api.Op{Kind: api.OpInline, Off: uint64(off), Len: uint64(n), Data: p})
		return overlay(file, off, p)
	case 3:
		c.Ops = append(c.Ops, api.Op{Kind: api.OpPunch, Off: uint64(off), Len: uint64(n)})
		if off >= len(file) {
			return file
		}
		return overlay(file, off, make([]byte, min(n, len(file)-off)))
	case 4:
		size := rapid.SampledFrom([]int{0, 1, 50, off, len(file), len(file) + 100}).Draw(t, "size")
		size = min(size, modelSize)
		c.Ops = append(c.Ops, api.Op{Kind: api.OpTruncate, Off: uint64(size)})
		return overlay(file[:min(size, len(file))], size, nil)
	case 5:
		if len(file)+n > modelSize {
			return file
		}
		b := m.r.newBlock(c.Ino, n)
		m.blocks[b.ID] = m.bytes(n)
		c.Blocks = append(c.Blocks, b)
		e := ids.Extent{Len: uint64(n), Kind: ids.ExtentBlock, Block: b.ID}
		c.Ops = append(c.Ops, api.Op{Kind: api.OpAppend, Off: uint64(off), Len: uint64(n), Extents: []ids.Extent{e}})
		return overlay(file, len(file), m.blocks[b.ID])
	case 6:
		return m.share(t, c, file, off)
	case 7:
		c.Ops = append(c.Ops, api.Op{Kind: api.OpExtend, Off: uint64(off)})
		return overlay(file, max(off, len(file)), nil)
	}
	c.Ops = append(c.Ops, api.Op{Kind: api.OpKillPriv})
	return file
}

// scatter writes one block in several pieces.
func (m *contentModel) scatter(t *rapid.T, c *api.Commit, file []byte, off, n int) []byte {
	b := m.r.newBlock(c.Ino, n)
	p := m.bytes(n)
	m.blocks[b.ID] = p
	c.Blocks = append(c.Blocks, b)
	pieces := min(rapid.SampledFrom([]int{1, 1, 3, 100}).Draw(t, "pieces"), n)
	gap := rapid.IntRange(0, 30).Draw(t, "gap")
	for i := range pieces {
		lo, hi := n*i/pieces, n*(i+1)/pieces
		at := min(off+lo+gap*i, modelSize-(hi-lo))
		c.Ops = append(c.Ops, api.Op{Kind: api.OpWrite, Off: uint64(at), Len: uint64(hi - lo), Block: b.ID, BlockOff: uint32(lo)})
		file = overlay(file, at, p[lo:hi])
	}
	return file
}

// share maps a range of some file's block, as a copy by reference does.
func (m *contentModel) share(t *rapid.T, c *api.Commit, file []byte, off int) []byte {
	other := rapid.SampledFrom(m.inos).Draw(t, "from")
	have := m.r.ask(&api.GetMap{Ino: other, End: modelSize, Max: 1}).(*api.Mapped).Map
	if len(have.Blocks) == 0 {
		return file
	}
	id := have.Blocks[0].ID
	c.Ops = append(c.Ops, api.Op{Kind: api.OpWrite, Off: uint64(off), Len: uint64(len(m.blocks[id])), Block: id})
	return overlay(file, off, m.blocks[id])
}

func (m *contentModel) commit(t *rapid.T) {
	c := &api.Commit{Ino: rapid.SampledFrom(m.inos).Draw(t, "file"), Mtime: m.r.clock}
	file := m.data[c.Ino]
	for range rapid.IntRange(1, 4).Draw(t, "ops") {
		file = m.op(t, c, file)
	}
	_, err := m.r.try(m.r.session, c)
	if errkind.Of(err) == errkind.Busy {
		return // too many clips are pending
	}
	require.NoError(t, err)
	m.data[c.Ino] = file
}

// compact rewrites a window of a file in one block.
func (m *contentModel) compact(t *rapid.T) {
	ino := rapid.SampledFrom(m.inos).Draw(t, "file")
	file := m.data[ino]
	a := m.r.attr(ino)
	lo := rapid.IntRange(0, 5000).Draw(t, "lo")
	hi := min(lo+rapid.IntRange(1, 9000).Draw(t, "window"), len(file))
	if lo >= hi {
		return
	}
	b := m.r.newBlock(ino, hi-lo)
	m.blocks[b.ID] = bytes.Clone(file[lo:hi])
	e := ids.Extent{Off: uint64(lo), Len: uint64(hi - lo), Kind: ids.ExtentBlock, Block: b.ID}
	op := api.Op{Kind: api.OpReplace, Off: e.Off, Len: e.Len, Extents: []ids.Extent{e}, Expect: a.MapVersion}
	stale := rapid.Bool().Draw(t, "stale")
	if stale {
		op.Expect += 5
	}
	_, err := m.r.try(m.r.session, &api.Commit{Ino: ino, Ops: []api.Op{op}, Blocks: []ids.Block{b}})
	if stale {
		require.ErrorIs(t, err, errkind.Changed)
		return
	}
	require.NoError(t, err)
	after := m.r.attr(ino)
	require.Equal(t, [3]int64{a.Mtime, a.Ctime, int64(a.Size)}, [3]int64{after.Mtime, after.Ctime, int64(after.Size)})
}

func (m *contentModel) free(t *rapid.T) {
	m.r.must(&api.FreeStep{Max: uint32(rapid.SampledFrom([]int{1, 50, 0}).Draw(t, "max"))})
}

// read puts a file together from its map, asking for a few extents at a time.
func (m *contentModel) read(t *rapid.T, ino ids.Ino) []byte {
	a := m.r.attr(ino)
	p := make([]byte, a.Size)
	for at := uint64(0); at < a.Size; {
		part := m.r.ask(&api.GetMap{Ino: ino, Off: at, End: a.Size, Max: 7}).(*api.Mapped).Map
		known := map[ids.BlockID]bool{}
		for _, b := range part.Blocks {
			known[b.ID] = true
		}
		for _, e := range part.Extents {
			e = e.Slice(max(e.Off, at), min(e.End(), part.End))
			from := e.Data
			if e.Kind == ids.ExtentBlock {
				require.True(t, known[e.Block])
				from = m.blocks[e.Block][e.BlockOff:][:e.Len]
			}
			copy(p[e.Off:], from)
		}
		require.Greater(t, part.End, at)
		at = part.End
	}
	return p
}

func (m *contentModel) verify(t *rapid.T) {
	require.NoError(t, Check(m.r.kv))
	for _, ino := range m.inos {
		require.Equal(t, len(m.data[ino]), int(m.r.attr(ino).Size))
		if !bytes.Equal(m.data[ino], m.read(t, ino)) {
			require.Fail(t, "content differs", "inode %d", ino)
		}
	}
}

func TestContentAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newContentModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"commit": m.commit, "commit2": m.commit, "commit3": m.commit, "compact": m.compact, "free": m.free, "": m.verify,
		})
		require.Equal(t, m.r.kv.dump(), m.r.replay().dump())
		m.r.drain()
		m.verify(t)
		m.removeAll(t)
	})
}

// removeAll deletes everything: every chunk that was ever committed must end
// in the queue of dead chunks.
func (m *contentModel) removeAll(t *rapid.T) {
	dir := m.r.ask(&api.Lookup{Parent: ids.RootIno, Name: []byte("d")}).(*api.Entry).Attr.Ino
	m.r.do(&api.Unlink{Parent: dir, Name: []byte("x")})
	m.r.do(&api.Unlink{Parent: dir, Name: []byte("y")})
	m.r.reapAll()
	require.NoError(t, Check(m.r.kv))
	n := m.r.counts()
	require.Zero(t, n.Blocks)
	require.Zero(t, n.Freeing)
	dead := 0
	for disk := ids.DiskID(1); disk <= 6; disk++ {
		list, err := ReadDead(m.r.kv, disk, ids.ChunkKey{}, 1<<20)
		require.NoError(t, err)
		for _, d := range list {
			require.Contains(t, m.blocks, d.Key.Block)
		}
		m.r.must(&api.ChunksFreed{Chunks: chunksOn(disk, list)})
		dead += len(list)
	}
	require.EqualValues(t, n.Dead, dead)
	require.Zero(t, m.r.counts().Dead)
	require.NoError(t, Check(m.r.kv))
}

func chunksOn(disk ids.DiskID, list []DeadChunk) []api.ChunkAt {
	var at []api.ChunkAt
	for _, d := range list {
		at = append(at, api.ChunkAt{Key: d.Key, Disk: disk})
	}
	return at
}

func TestOrderedNumbersSort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.Uint64().Draw(t, "a"), rapid.Uint64().Draw(t, "b")
		a >>= rapid.IntRange(0, 63).Draw(t, "shift")
		require.Equal(t, bytes.Compare(binary.BigEndian.AppendUint64(nil, a), binary.BigEndian.AppendUint64(nil, b)),
			bytes.Compare(ordered(nil, a), ordered(nil, b)))
		v, rest, ok := takeOrdered(append(ordered(nil, a), 7))
		require.True(t, ok)
		require.Equal(t, a, v)
		require.Equal(t, []byte{7}, rest)
	})
}
