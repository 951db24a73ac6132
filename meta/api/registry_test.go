package api

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

var update = flag.Bool("update", false, "write the golden files anew")

// filler fills a value with numbers that all differ, so that two fields that
// were swapped show.
type filler struct{ n uint64 }

func (f *filler) next() uint64 { f.n++; return f.n }

func (f *filler) special(v reflect.Value) bool {
	switch p := v.Addr().Interface().(type) {
	case *ids.Layout:
		*p = ids.RS(4, 2)
	case *ids.Block:
		*p = f.block()
	case *ids.Extent:
		*p = f.extent()
	case *Op:
		*p = Op{Kind: OpWrite, Off: f.next(), Len: f.next(), Block: f.id(), BlockOff: uint32(f.next())}
	case *[]Op:
		*p = f.ops()
	case *errkind.Kind:
		*p = errkind.OK
	default:
		return false
	}
	return true
}

func (f *filler) id() ids.BlockID {
	return ids.MakeBlockID(ids.Slot(f.next()), 1, ids.Session(f.next()), f.next())
}

func (f *filler) block() ids.Block {
	b := ids.Block{
		ID: f.id(), Layout: ids.RS(2, 1), Length: uint32(f.next()), Logical: uint32(f.next()),
		Frames: []ids.Frame{{Logical: uint32(f.next()), Stored: uint32(f.next()), Sum: f.next()}}, Granule: 16, Version: f.next(),
	}
	for range 3 {
		b.Disks = append(b.Disks, ids.DiskID(f.next()))
		b.Digests = append(b.Digests, f.next()<<40)
	}
	return b
}

func (f *filler) extent() ids.Extent {
	if f.n%2 == 0 {
		return ids.Extent{Off: f.next(), Len: 3, Kind: ids.ExtentInline, Data: []byte("abc")}
	}
	return ids.Extent{Off: f.next(), Len: f.next(), Kind: ids.ExtentBlock, Block: f.id(), BlockOff: uint32(f.next())}
}

func (f *filler) ops() []Op {
	return []Op{
		{Kind: OpWrite, Off: f.next(), Len: f.next(), Block: f.id(), BlockOff: uint32(f.next())},
		{Kind: OpInline, Off: f.next(), Len: 2, Data: []byte("hi")},
		{Kind: OpPunch, Off: f.next(), Len: f.next()},
		{Kind: OpTruncate, Off: f.next()},
		{Kind: OpAppend, Off: f.next(), Len: f.next(), Extents: []ids.Extent{f.extent()}},
		{Kind: OpReplace, Off: f.next(), Len: f.next(), Extents: []ids.Extent{f.extent(), f.extent()}, Expect: f.next()},
		{Kind: OpKillPriv},
		{Kind: OpExtend, Off: f.next()},
	}
}

func (f *filler) fill(v reflect.Value) {
	if f.special(v) {
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(f.next() % 100)
	case reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(f.next())
	case reflect.Int64:
		v.SetInt(-int64(f.next()))
	case reflect.String:
		v.SetString(fmt.Sprintf("text %d", f.next()))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			f.fill(v.Index(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			f.fill(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(v.Field(i))
		}
	default:
		panic(v.Kind().String())
	}
}

func filled[M codec.Message](m M) M {
	f := &filler{}
	f.fill(reflect.ValueOf(m).Elem())
	switch m := any(m).(type) {
	case *UpdateDisks: // names, states and sizes only
		for i := range m.Disks {
			m.Disks[i].UUID, m.Disks[i].Server = ids.UUID{}, 0
		}
	case *Orders:
		m.Jobs[0].Kind = JobRepair
		m.Jobs[1].Kind, m.Jobs[1].Block = JobCompact, ids.Block{}
	}
	return m
}

func kinds() []Kind {
	var all []Kind
	for k := Kind(1); k < lastMutation; k++ {
		all = append(all, k)
	}
	for k := KindLookup; k < lastQuery; k++ {
		all = append(all, k)
	}
	return all
}

func golden(t *testing.T, name string, p []byte) {
	t.Helper()
	file := filepath.Join("testdata", name+".hex")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(file, []byte(hex.EncodeToString(p)+"\n"), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, strings.TrimSpace(string(want)), hex.EncodeToString(p), name)
}

func sampleRequest(k Kind) []byte {
	h := filled(&Header{})
	h.Version, h.Slot = Version, 7
	return EncodeRequest(h, filled(NewRequest(k)))
}

func sampleReply(k Kind) []byte {
	return EncodeReply(&Reply{Epoch: 9}, filled(NewReply(k)))
}

func TestEveryKindIsKnown(t *testing.T) {
	require.Len(t, makers, len(kinds()))
	for _, k := range kinds() {
		require.NotNil(t, NewRequest(k), "kind %d", k)
		require.NotNil(t, NewReply(k), "kind %d", k)
		require.Equal(t, k, NewRequest(k).Kind())
	}
	require.Nil(t, NewRequest(0))
	require.Nil(t, NewReply(PushRecall))
}

func TestGolden(t *testing.T) {
	for _, k := range kinds() {
		p := sampleRequest(k)
		golden(t, fmt.Sprintf("request-%s", k), p)
		h, r, err := DecodeRequest(p)
		require.NoError(t, err, k)
		require.Equal(t, k, h.Kind)
		require.Equal(t, filled(NewRequest(k)), r)

		p = sampleReply(k)
		golden(t, fmt.Sprintf("reply-%s", k), p)
		reply, body, err := DecodeReply(k, p)
		require.NoError(t, err, k)
		require.NoError(t, reply.Failure())
		require.Equal(t, filled(NewReply(k)), body)
	}
	golden(t, "push", codec.Encode(nil, filled(&Pushed{})))
	golden(t, "reply-error", EncodeError(errkind.NotFound.Wrap("lookup"), 3))
}

func TestTimeOffset(t *testing.T) {
	p := sampleRequest(KindUnlink)
	h, _, err := DecodeRequest(p)
	require.NoError(t, err)
	for i := range 8 {
		p[TimeOffset+i] = 0
	}
	again, _, err := DecodeRequest(p)
	require.NoError(t, err)
	require.NotZero(t, h.Time)
	h.Time = 0
	require.Equal(t, h, again)
}

func TestRefusals(t *testing.T) {
	r, body, err := DecodeReply(KindLookup, EncodeError(errkind.NotFound.Wrap("lookup %q in 1", "x"), 3))
	require.NoError(t, err)
	require.Nil(t, body)
	require.ErrorIs(t, r.Failure(), errkind.NotFound)
	require.EqualValues(t, 3, r.Epoch)
	require.Contains(t, r.Failure().Error(), `lookup "x" in 1`)

	_, _, err = DecodeRequest(codec.Encode(nil, &Header{Version: Version, Kind: 999}))
	require.ErrorIs(t, err, errkind.Unsupported)
	_, _, err = DecodeRequest(codec.Encode(nil, &Header{Version: Version + 1, Kind: KindLookup}))
	require.ErrorIs(t, err, errkind.Version)
	for _, k := range kinds() {
		p := sampleRequest(k)
		_, _, err = DecodeRequest(append(p, 0))
		require.ErrorIs(t, err, codec.ErrCorrupt)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for _, k := range kinds() {
		f.Add(sampleRequest(k))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		h, r, err := DecodeRequest(p)
		if err != nil {
			return
		}
		h2, r2, err := DecodeRequest(EncodeRequest(&h, r))
		require.NoError(t, err)
		require.Equal(t, h, h2)
		require.Equal(t, r, r2)
	})
}

func FuzzDecodeReply(f *testing.F) {
	for _, k := range kinds() {
		f.Add(uint16(k), sampleReply(k))
	}
	f.Fuzz(func(t *testing.T, k uint16, p []byte) {
		r, body, err := DecodeReply(Kind(k), p)
		if err != nil || body == nil {
			return
		}
		r2, body2, err := DecodeReply(Kind(k), EncodeReply(&r, body))
		require.NoError(t, err)
		require.Equal(t, r, r2)
		require.Equal(t, body, body2)
	})
}
