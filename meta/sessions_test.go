package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func TestSessionsByName(t *testing.T) {
	r := newRig(t)
	a := r.open(30)
	require.Equal(t, a, r.open(30), "a retry with the same secret gets the same session")
	found, err := FindSession(r.kv, ids.UUID{7, 30})
	require.NoError(t, err)
	require.Equal(t, a, found)

	b := r.as(0, &api.CreateSession{Secret: ids.UUID{7, 31}, Replaces: ids.UUID{7, 30}}).(*api.SessionOpened).Session
	require.Greater(t, b, a)
	_, err = r.try(a, &api.SetAttr{Ino: 1})
	require.ErrorIs(t, err, errkind.Expired)
	r.check()
	_, ok, err := ReadSession(r.kv, a)
	require.NoError(t, err)
	require.True(t, ok)
	r.drain()
	r.check()
	_, ok, err = ReadSession(r.kv, a)
	require.NoError(t, err)
	require.False(t, ok, "an ended session leaves no record")
	_, err = r.try(a, &api.SetAttr{Ino: 1})
	require.ErrorIs(t, err, errkind.Expired, "and stays ended")
	_, err = r.try(999, &api.SetAttr{Ino: 1})
	require.ErrorIs(t, err, errkind.Expired)
	require.Greater(t, r.open(30), b, "numbers are never used again")
}

func TestWindow(t *testing.T) {
	r := newRig(t)
	create := &api.Create{Parent: 1, Name: []byte("x"), Mode: api.ModeRegular, Exclusive: true}
	h := &api.Header{Session: r.session, Place: 5, Seq: 1000, Time: r.clock + 5000}
	first := r.applyRaw(api.EncodeRequest(h, create))
	before := r.kv.dump()
	h.Time += 77
	require.Equal(t, first, r.applyRaw(api.EncodeRequest(h, create)), "the same place and sequence get the first answer")
	require.Equal(t, before, r.kv.dump(), "and change nothing")

	h.Seq = 999
	reply, _, err := api.DecodeReply(api.KindCreate, r.applyRaw(api.EncodeRequest(h, create)))
	require.NoError(t, err)
	require.ErrorIs(t, reply.Failure(), errkind.Invalid)
	require.Equal(t, before, r.kv.dump())

	h.Seq = 1001 // refusals are answers too
	refusal := r.applyRaw(api.EncodeRequest(h, create))
	r.do(&api.Unlink{Parent: 1, Name: []byte("x")})
	require.Equal(t, refusal, r.applyRaw(api.EncodeRequest(h, create)))

	for _, bad := range []*api.Header{{Session: r.session, Place: api.Places, Seq: 1}, {Seq: 1}} {
		reply, _, err := api.DecodeReply(api.KindCreate, r.applyRaw(api.EncodeRequest(bad, create)))
		require.NoError(t, err)
		require.ErrorIs(t, reply.Failure(), errkind.Invalid)
	}
	for seq := uint64(2000); seq < 2300; seq++ {
		r.applyRaw(api.EncodeRequest(&api.Header{Session: r.session, Place: uint8(seq % api.Places), Seq: seq}, &api.SetAttr{Ino: 1}))
	}
	v := &view{base: r.kv}
	require.Len(t, v.keys([]byte{spaceWindow}, []byte{spaceWindow + 1}, 1000), api.Places, "the table is bounded")
}

// TestEveryCommandRetried runs a history in which each command is applied
// twice: the second time must answer as the first and change nothing.
func TestEveryCommandRetried(t *testing.T) {
	r := newRig(t)
	f := r.file(r.dir(1, "d"), "f")
	b := r.newBlock(f, 5000)
	again := func(req api.Request) {
		t.Helper()
		cmd := r.encode(r.session, req)
		first := r.applyRaw(cmd)
		before := r.kv.dump()
		require.Equal(t, first, r.applyRaw(cmd), "%T", req)
		require.Equal(t, before, r.kv.dump(), "%T", req)
		r.check()
	}
	again(&api.Commit{Ino: f, Blocks: []ids.Block{b}, Ops: []api.Op{
		{Kind: api.OpAppend, Extents: []ids.Extent{{Len: 5000, Kind: ids.ExtentBlock, Block: b.ID}}},
	}})
	require.EqualValues(t, 5000, r.attr(f).Size)
	again(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpTruncate}}})
	again(&api.Link{Ino: f, Parent: 1, Name: []byte("l")})
	again(&api.Rename{OldParent: 1, OldName: []byte("l"), NewParent: 1, NewName: []byte("m")})
	again(&api.SetXattr{Ino: f, Name: []byte("user.x"), Value: []byte("y"), Flags: api.XattrCreate})
	again(&api.RemoveXattr{Ino: f, Name: []byte("user.x")})
	again(&api.Lock{Ino: f, Space: api.LockPOSIX, Type: api.WriteLock, End: 9})
	again(&api.Unlink{Parent: 1, Name: []byte("m")})
	again(&api.FreeStep{})
	require.Equal(t, r.kv.dump(), r.replay().dump())
}
