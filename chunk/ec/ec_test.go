package ec

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func layouts() *rapid.Generator[ids.Layout] {
	return rapid.Custom(func(t *rapid.T) ids.Layout {
		var l ids.Layout
		if rapid.Bool().Draw(t, "coded") {
			l = ids.RS(rapid.IntRange(2, ids.MaxK).Draw(t, "k"), rapid.IntRange(1, ids.MaxM).Draw(t, "m"))
		} else {
			l = ids.Copies(rapid.IntRange(1, ids.MaxM+1).Draw(t, "n"))
		}
		l.CellLog = uint8(rapid.IntRange(ids.MinCellLog, int(l.CellLog)).Draw(t, "cell"))
		require.NoError(t, l.Validate())
		return l
	})
}

// lengths favours the borders of stripes and pages.
func lengths(t *rapid.T, l ids.Layout, most int) int {
	n := rapid.IntRange(0, most).Draw(t, "length")
	switch rapid.IntRange(0, 3).Draw(t, "border") {
	case 0:
		n -= n % l.StripeData()
	case 1:
		n -= n % Page
	}
	return max(0, min(most, n+rapid.IntRange(-1, 1).Draw(t, "nudge")))
}

func TestPiecesTileTheBlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		n := lengths(t, l, l.MaxBlockData())
		off := rapid.IntRange(0, n).Draw(t, "off")
		size := rapid.IntRange(0, n-off).Draw(t, "size")
		at, chunkLen := off, ChunkLen(l, n)
		for _, p := range Pieces(nil, l, n, off, size) {
			require.Equal(t, at, p.BlockOff)
			require.Positive(t, p.Len)
			require.Less(t, p.Chunk, int(l.K))
			require.LessOrEqual(t, p.Off+p.Len, chunkLen)
			require.Equal(t, p.Off>>l.CellLog, (p.Off+p.Len-1)>>l.CellLog, "crosses a cell")
			require.Equal(t, []Piece{p}, DataPieces(nil, l, n, p.Chunk, p.Off, p.Len))
			at += p.Len
		}
		require.Equal(t, off+size, at)
	})
}

func TestDataPiecesCoverEveryByteOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		n := lengths(t, l, min(l.MaxBlockData(), 3*l.StripeData()))
		seen := make([]byte, n)
		for c := range l.Width() {
			for _, p := range DataPieces(nil, l, n, c, 0, ChunkLen(l, n)) {
				require.Equal(t, []Piece{p}, Pieces(nil, l, n, p.BlockOff, p.Len))
				for i := p.BlockOff; i < p.BlockOff+p.Len; i++ {
					seen[i]++
				}
			}
		}
		require.Equal(t, n, bytes.Count(seen, []byte{1}))
	})
}

func TestLengths(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		n := lengths(t, l, l.MaxBlockData())
		c := ChunkLen(l, n)
		require.Zero(t, c%Page)
		require.LessOrEqual(t, c, ids.MaxChunk)
		require.GreaterOrEqual(t, c*int(l.K), n)
		require.Less(t, c*int(l.K)-n, int(l.K)*Page, "more padding than a page a chunk")
		require.LessOrEqual(t, ChunkLen(l, max(0, n-1)), c, "shorter blocks have no longer chunks")
		sum := 0
		for s := 0; CellLen(l, n, s) > 0; s++ {
			require.Equal(t, s<<l.CellLog, sum)
			sum += CellLen(l, n, s)
		}
		require.Equal(t, c, sum)
		g := Granule(l, Reserve(l, n))
		require.LessOrEqual(t, Granules(c, g), 256)
		require.Zero(t, l.CellSize()%(1<<g))
	})
}

// stripes lays a block out as chunks, the way a writer does.
func stripes(t require.TestingT, l ids.Layout, block []byte) (chunks [][]byte, sums [][]uint64) {
	c, err := For(l)
	require.NoError(t, err)
	n := ChunkLen(l, len(block))
	chunks, sums = make([][]byte, l.Width()), make([][]uint64, l.Width())
	for i := range chunks {
		chunks[i] = make([]byte, n)
	}
	for _, p := range Pieces(nil, l, len(block), 0, len(block)) {
		copy(chunks[p.Chunk][p.Off:], block[p.BlockOff:p.BlockOff+p.Len])
	}
	g := Granule(l, Reserve(l, len(block)))
	for s := 0; CellLen(l, len(block), s) > 0; s++ {
		lo := s << l.CellLog
		cells := make([][]byte, l.Width())
		for i := range cells {
			cells[i] = chunks[i][lo : lo+CellLen(l, len(block), s)]
		}
		require.NoError(t, c.EncodeAndSum(cells[:l.K], cells[l.K:], sums, g))
	}
	for i := range chunks {
		require.Equal(t, Sums(nil, chunks[i], g), sums[i])
		require.True(t, Check(chunks[i], sums[i], g))
	}
	return chunks, sums
}

func fill(seed uint64, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		seed = seed*6364136223846793005 + 1442695040888963407
		p[i] = byte(seed >> 56)
	}
	return p
}

func TestAnyErasuresUpToMAreRepaired(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layouts().Draw(t, "layout")
		l.CellLog = ids.MinCellLog
		block := fill(rapid.Uint64().Draw(t, "seed"), 1+lengths(t, l, 2*l.StripeData()))
		chunks, _ := stripes(t, l, block)
		n := len(chunks[0])
		lo := rapid.IntRange(0, n-1).Draw(t, "lo")
		hi := rapid.IntRange(lo+1, n).Draw(t, "hi")

		order := rapid.Permutation(indices(l.Width())).Draw(t, "order")
		lost := order[:rapid.IntRange(0, int(l.M)).Draw(t, "losses")]
		cells, want := make([][]byte, l.Width()), make([]bool, l.Width())
		for i := range cells {
			cells[i] = chunks[i][lo:hi]
		}
		for _, i := range lost {
			cells[i], want[i] = make([]byte, 0, hi-lo), true
		}
		c, err := For(l)
		require.NoError(t, err)
		require.NoError(t, c.Reconstruct(cells, want))
		for i := range cells {
			require.True(t, bytes.Equal(chunks[i][lo:hi], cells[i]), "chunk %d", i)
		}
	})
}

func indices(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

func TestTooManyErasuresAreRefused(t *testing.T) {
	for _, l := range []ids.Layout{ids.RS(4, 2), ids.Copies(3)} {
		c, err := For(l)
		require.NoError(t, err)
		cells, want := make([][]byte, l.Width()), make([]bool, l.Width())
		for i := range int(l.K) - 1 {
			cells[i] = make([]byte, Page)
		}
		want[l.K] = true
		cells[l.K] = make([]byte, 0, Page)
		require.Error(t, c.Reconstruct(cells, want))
		require.Error(t, c.Encode(cells[:l.K-1], cells[l.K:]))
	}
}

func TestCheckFindsEveryFlippedBit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := fill(1, rapid.IntRange(1, 3*Page).Draw(t, "length"))
		sums := Sums(nil, p, SmallGranule)
		require.True(t, Check(p, sums, SmallGranule))
		bit := rapid.IntRange(0, len(p)*8-1).Draw(t, "bit")
		p[bit/8] ^= 1 << (bit % 8)
		require.False(t, Check(p, sums, SmallGranule))
		require.False(t, Check(p, sums[1:], SmallGranule))
	})
}

// golden holds what must never change: parity bytes and digests of a block.
type golden struct {
	Layout   string
	Length   int
	ChunkLen int
	Granule  uint8
	Parity   []string // XXH3-128 of each parity chunk, and its first 16 bytes
	Digests  []uint64
}

func TestGolden(t *testing.T) {
	var got []golden
	for _, l := range []ids.Layout{ids.RS(4, 2), ids.RS(2, 1), ids.RS(3, 2), ids.RS(8, 3), ids.RS(16, 8), ids.Copies(3)} {
		for _, n := range []int{1, 5000, 256 << 10, 1 << 20, l.StripeData() + 12345} {
			chunks, sums := stripes(t, l, fill(42, n))
			g := golden{Layout: l.String(), Length: n, ChunkLen: len(chunks[0]), Granule: Granule(l, Reserve(l, n))}
			for i, s := range sums {
				g.Digests = append(g.Digests, Digest(s))
				if i >= int(l.K) {
					h := xxh3.Hash128(chunks[i]).Bytes()
					g.Parity = append(g.Parity, hex.EncodeToString(h[:])+" "+hex.EncodeToString(chunks[i][:16]))
				}
			}
			got = append(got, g)
		}
	}
	path := filepath.Join("testdata", "blocks.json")
	if *update {
		raw, err := json.MarshalIndent(got, "", " ")
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, append(raw, '\n'), 0o644))
	}
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	var want []golden
	require.NoError(t, json.Unmarshal(raw, &want))
	require.Equal(t, want, got)
}

func benchCells(b *testing.B, l ids.Layout) (*Coder, [][]byte) {
	c, err := For(l)
	require.NoError(b, err)
	cells := make([][]byte, l.Width())
	for i := range cells {
		cells[i] = fill(uint64(i), l.CellSize())
	}
	b.SetBytes(int64(l.StripeData()))
	return c, cells
}

func BenchmarkEncodeAndSum(b *testing.B) {
	for _, l := range []ids.Layout{ids.RS(4, 2), ids.RS(8, 3)} {
		b.Run(l.String(), func(b *testing.B) {
			c, cells := benchCells(b, l)
			sums := make([][]uint64, l.Width())
			for b.Loop() {
				for i := range sums {
					sums[i] = sums[i][:0]
				}
				_ = c.EncodeAndSum(cells[:l.K], cells[l.K:], sums, LargeGranule)
			}
		})
		b.Run(l.String()+"-apart", func(b *testing.B) {
			c, cells := benchCells(b, l)
			var sums []uint64
			for b.Loop() {
				_ = c.rs.Encode(cells)
				for _, p := range cells {
					sums = Sums(sums[:0], p, LargeGranule)
				}
			}
		})
	}
}

func BenchmarkReconstructOne(b *testing.B) {
	l := ids.RS(4, 2)
	c, cells := benchCells(b, l)
	want := make([]bool, l.Width())
	want[1] = true
	for b.Loop() {
		cells[1] = cells[1][:0]
		_ = c.Reconstruct(cells, want)
	}
}
