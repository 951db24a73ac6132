package codec

import (
	"encoding/hex"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// everything has one field of each kind.
type everything struct {
	A uint8
	B uint16
	C uint32
	D uint64
	E int64
	F uint64
	G bool
	H []byte
	I string
	J [3]byte
	K []uint32
	L ids.DiskID
}

func (m *everything) Code(c *Coder) {
	c.U8(&m.A)
	c.U16(&m.B)
	c.U32(&m.C)
	c.U64(&m.D)
	c.I64(&m.E)
	c.Var(&m.F)
	c.Bool(&m.G)
	c.Bytes(&m.H)
	c.String(&m.I)
	c.Fixed(m.J[:])
	Slice(c, &m.K, func(c *Coder, v *uint32) { VarInt(c, v) })
	VarInt(c, &m.L)
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := everything{
			A: rapid.Uint8().Draw(t, "a"), B: rapid.Uint16().Draw(t, "b"), C: rapid.Uint32().Draw(t, "c"),
			D: rapid.Uint64().Draw(t, "d"), E: rapid.Int64().Draw(t, "e"), F: rapid.Uint64().Draw(t, "f"),
			G: rapid.Bool().Draw(t, "g"), I: rapid.String().Draw(t, "i"), L: ids.DiskID(rapid.Uint32().Draw(t, "l")),
		}
		if b := rapid.SliceOf(rapid.Byte()).Draw(t, "h"); len(b) > 0 {
			m.H = b
		}
		if k := rapid.SliceOf(rapid.Uint32()).Draw(t, "k"); len(k) > 0 {
			m.K = k
		}
		p := Encode(nil, &m)
		var back everything
		require.NoError(t, Decode(p, &back))
		require.Equal(t, m, back)
		cut := rapid.IntRange(0, len(p)-1).Draw(t, "cut")
		require.ErrorIs(t, Decode(p[:cut], &everything{}), ErrCorrupt, "a prefix must not decode")
		require.ErrorIs(t, Decode(append(p, 0), &everything{}), ErrCorrupt, "a tail must not be ignored")
	})
}

func TestForgedCountsAllocateNothing(t *testing.T) {
	huge := []byte{0xff, 0xff, 0xff, 0xff, 0x0f}
	var s sliceOnly
	require.ErrorIs(t, Decode(huge, &s), ErrCorrupt)
	var b bytesOnly
	require.ErrorIs(t, Decode(huge, &b), ErrCorrupt)
	var d diskOnly
	require.ErrorIs(t, Decode([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, &d), ErrCorrupt, "a number too large for its field")
}

type sliceOnly struct{ V []uint64 }

func (m *sliceOnly) Code(c *Coder) { Slice(c, &m.V, func(c *Coder, v *uint64) { c.U64(v) }) }

type bytesOnly struct{ V []byte }

func (m *bytesOnly) Code(c *Coder) { c.Bytes(&m.V) }

type diskOnly struct{ V ids.DiskID }

func (m *diskOnly) Code(c *Coder) { VarInt(c, &m.V) }

// described is a block and an extent: the two records that other formats embed.
type described struct {
	Block   ids.Block
	Extents []ids.Extent
}

func (m *described) Code(c *Coder) {
	c.Block(&m.Block)
	Slice(c, &m.Extents, func(c *Coder, e *ids.Extent) { c.Extent(e) })
}

func sample() described {
	id := ids.MakeBlockID(3, 1, 77, 4242)
	return described{
		Block: ids.Block{
			ID: id, Layout: ids.RS(4, 2), Length: 3 << 20, Logical: 3 << 20, Granule: 16,
			Disks: []ids.DiskID{1, 2, 3, 4, 5, 0}, Digests: []uint64{11, 12, 13, 14, 15, 16}, Version: 2,
		},
		Extents: []ids.Extent{
			{Off: 0, Len: 3 << 20, Kind: ids.ExtentBlock, Block: id},
			{Off: 3 << 20, Len: 2, Kind: ids.ExtentInline, Data: []byte("hi")},
		},
	}
}

func TestGoldenBlockAndExtent(t *testing.T) {
	m := sample()
	want, err := os.ReadFile("testdata/block-extent.hex")
	require.NoError(t, err)
	require.Equal(t, string(want), hex.EncodeToString(Encode(nil, &m))+"\n")
	raw, err := hex.DecodeString(string(want[:len(want)-1]))
	require.NoError(t, err)
	var back described
	require.NoError(t, Decode(raw, &back))
	require.Equal(t, m, back)
}

func FuzzBlockAndExtent(f *testing.F) {
	m := sample()
	f.Add(Encode(nil, &m))
	f.Fuzz(func(t *testing.T, p []byte) {
		var d described
		if Decode(p, &d) != nil {
			return
		}
		var again described
		require.NoError(t, Decode(Encode(nil, &d), &again))
		require.Equal(t, d, again)
	})
}
