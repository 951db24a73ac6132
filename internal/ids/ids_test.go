package ids

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestInoParts(t *testing.T) {
	require.Equal(t, RootIno, MakeIno(0, 1))
	rapid.Check(t, func(t *rapid.T) {
		slot := Slot(rapid.Uint16Max(uint16(MaxSlot)).Draw(t, "slot"))
		n := rapid.Uint64Max(MaxInoCounter).Draw(t, "counter")
		i := MakeIno(slot, n)
		require.Equal(t, slot, i.Slot())
		require.Equal(t, n, i.Counter())
		require.False(t, i.Virtual())
	})
}

func drawBlockID(t *rapid.T) BlockID {
	return MakeBlockID(
		Slot(rapid.Uint16Max(uint16(MaxSlot)).Draw(t, "slot")),
		Incarnation(rapid.Uint16().Draw(t, "incarnation")),
		Session(rapid.Uint64Max(uint64(MaxSession)).Draw(t, "session")),
		rapid.Uint64Max(MaxBlockCounter).Draw(t, "counter"))
}

func TestBlockIDParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slot := Slot(rapid.Uint16Max(uint16(MaxSlot)).Draw(t, "slot"))
		inc := Incarnation(rapid.Uint16().Draw(t, "incarnation"))
		s := Session(rapid.Uint64Max(uint64(MaxSession)).Draw(t, "session"))
		n := rapid.Uint64Max(MaxBlockCounter).Draw(t, "counter")
		b := MakeBlockID(slot, inc, s, n)
		require.Equal(t, slot, b.Slot())
		require.Equal(t, inc, b.Incarnation())
		require.Equal(t, s, b.Session())
		require.Equal(t, n, b.Counter())
		back, err := ParseBlockID(b.String())
		require.NoError(t, err)
		require.Equal(t, b, back)
		require.Equal(t, b, BlockIDFrom(b.Append(nil)))
	})
}

func TestBlockIDOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawBlockID(t), drawBlockID(t)
		require.Equal(t, bytes.Compare(a.Append(nil), b.Append(nil)), a.Compare(b))
	})
}

func TestParseRefuses(t *testing.T) {
	for _, s := range []string{"", "x", "00-00-00-00", "0001-0001-0000000001-0000000000001g"} {
		_, err := ParseBlockID(s)
		require.ErrorIs(t, err, ErrSyntax, s)
	}
	for _, s := range []string{"", "1234", "zz"} {
		_, err := ParseUUID(s)
		require.ErrorIs(t, err, ErrSyntax, s)
	}
	u := UUID{1, 2, 3}
	back, err := ParseUUID(u.String())
	require.NoError(t, err)
	require.Equal(t, u, back)
}

func TestLayoutSyntax(t *testing.T) {
	for _, c := range []struct {
		in             string
		k, m, quorum   int
		cell, block    int
		asWritten      string
		narrow5, small string
	}{
		{"rs-4-2", 4, 2, 5, 512 << 10, 64 << 20, "rs-4-2", "rs-3-2", "copies-3"},
		{"rs-2-1", 2, 1, 3, 512 << 10, 32 << 20, "rs-2-1", "rs-2-1", "copies-2"},
		{"rs-16-8", 16, 8, 23, 256 << 10, 64 << 20, "rs-16-8", "", "copies-9:256KiB"},
		{"rs-4-2:64KiB", 4, 2, 5, 64 << 10, 64 << 20, "rs-4-2:64KiB", "rs-3-2:64KiB", "copies-3:64KiB"},
		{"copies-3", 1, 2, 2, 512 << 10, 16 << 20, "copies-3", "copies-3", "copies-3"},
		{"copies-1", 1, 0, 1, 512 << 10, 16 << 20, "copies-1", "copies-1", "copies-1"},
	} {
		l, err := ParseLayout(c.in)
		require.NoError(t, err, c.in)
		require.Equal(t, c.asWritten, l.String())
		require.Equal(t, c.k+c.m, l.Width())
		require.Equal(t, c.quorum, l.Quorum(), c.in)
		require.Equal(t, c.cell, l.CellSize(), c.in)
		require.Equal(t, c.block, l.MaxBlockData(), c.in)
		require.Equal(t, c.small, l.Small().String(), c.in)
		n, ok := l.Narrow(5)
		require.Equal(t, c.narrow5 != "", ok, c.in)
		if ok {
			require.Equal(t, c.narrow5, n.String(), c.in)
			require.NoError(t, n.Validate())
		}
	}
	for _, s := range []string{"", "rs", "rs-4", "rs-4-2-1", "rs-17-2", "rs-4-9", "rs-1-2", "rs-4-0", "copies", "copies-0", "copies-10", "raid6", "rs-4-2:", "rs-4-2:3KiB", "rs-16-8:1024KiB", "rs--4-2"} {
		_, err := ParseLayout(s)
		require.ErrorIs(t, err, ErrSyntax, s)
	}
}

func TestNarrowKeepsRedundancy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := RS(rapid.IntRange(2, MaxK).Draw(t, "k"), rapid.IntRange(1, MaxM).Draw(t, "m"))
		n := rapid.IntRange(0, MaxK+MaxM).Draw(t, "domains")
		got, ok := l.Narrow(n)
		require.Equal(t, n >= int(l.M)+1, ok)
		if ok {
			require.NoError(t, got.Validate())
			require.LessOrEqual(t, got.Width(), max(n, int(l.M)+1))
			require.Equal(t, l.M, got.M)
			require.Greater(t, got.Quorum(), int(got.K)-1)
		}
	})
}

func TestExtentSlice(t *testing.T) {
	e := Extent{Off: 100, Len: 10, Kind: ExtentBlock, BlockOff: 7}
	require.Equal(t, Extent{Off: 103, Len: 4, Kind: ExtentBlock, BlockOff: 10}, e.Slice(103, 107))
	require.Equal(t, e, e.Slice(0, 1000))
	in := Extent{Off: 5, Len: 3, Kind: ExtentInline, Data: []byte("abc")}
	require.Equal(t, Extent{Off: 6, Len: 2, Kind: ExtentInline, Data: []byte("bc")}, in.Slice(6, 9))
}
