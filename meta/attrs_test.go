package meta

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func makeACL(entries ...aclEntry) []byte { return acl(entries).encode() }

func (r *rig) setXattr(ino ids.Ino, name string, value []byte) {
	r.t.Helper()
	r.do(&api.SetXattr{Ino: ino, Name: []byte(name), Value: value})
}

func (r *rig) xattr(ino ids.Ino, name string) []byte {
	r.t.Helper()
	return r.ask(&api.GetXattr{Ino: ino, Name: []byte(name)}).(*api.Bytes).Value
}

func TestCreateModes(t *testing.T) {
	r := newRig(t)
	e := r.do(&api.Create{Parent: 1, Name: []byte("f"), Mode: api.ModeRegular | 0o666, Umask: 0o027, UID: 5, GID: 6, Time: 77}).(*api.Entry)
	require.EqualValues(t, api.ModeRegular|0o640, e.Attr.Mode)
	require.Equal(t, [3]int64{77, 77, 77}, [3]int64{e.Attr.Atime, e.Attr.Mtime, e.Attr.Btime})
	require.Equal(t, [2]uint32{5, 6}, [2]uint32{e.Attr.UID, e.Attr.GID})
	again := r.do(&api.Create{Parent: 1, Name: []byte("f"), Mode: api.ModeRegular | 0o600}).(*api.Entry)
	require.True(t, again.Existed)
	require.Equal(t, e.Attr, again.Attr)
	r.refused(errkind.Exists, &api.Create{Parent: 1, Name: []byte("f"), Mode: api.ModeRegular, Exclusive: true})
	r.refused(errkind.NameTooLong, &api.Create{Parent: 1, Name: bytes.Repeat([]byte("n"), 256), Mode: api.ModeRegular})
	r.refused(errkind.Invalid, &api.Create{Parent: 1, Name: []byte("a/b"), Mode: api.ModeRegular})
	r.refused(errkind.NotDir, &api.Create{Parent: e.Attr.Ino, Name: []byte("x"), Mode: api.ModeRegular})

	r.do(&api.Create{Parent: 1, Name: []byte("s"), Mode: api.ModeDir | api.ModeSetgid | 0o755, GID: 42})
	s := r.ask(&api.Lookup{Parent: 1, Name: []byte("s")}).(*api.Entry).Attr
	r.do(&api.SetAttr{Ino: s.Ino, Valid: api.SetMode, Mode: api.ModeSetgid | 0o775})
	sub := r.attr(r.dir(s.Ino, "sub"))
	require.EqualValues(t, 42, sub.GID)
	require.NotZero(t, sub.Mode&api.ModeSetgid)
	in := r.attr(r.file(sub.Ino, "in"))
	require.EqualValues(t, 42, in.GID)
	require.Zero(t, in.Mode&api.ModeSetgid)

	link := r.do(&api.Create{Parent: 1, Name: []byte("l"), Mode: api.ModeSymlink | 0o777, Umask: 0o77, Target: []byte("over/there")}).(*api.Entry)
	require.EqualValues(t, 10, link.Attr.Size)
	require.EqualValues(t, api.ModeSymlink|0o777, link.Attr.Mode)
	require.Equal(t, "over/there", string(r.ask(&api.Readlink{Ino: link.Attr.Ino}).(*api.Bytes).Value))
	dev := r.do(&api.Create{Parent: 1, Name: []byte("dev"), Mode: api.ModeChar | 0o600, Rdev: 0x103}).(*api.Entry)
	require.EqualValues(t, 0x103, r.attr(dev.Attr.Ino).Rdev)
	r.check()
}

func TestOrphanGetsAName(t *testing.T) {
	r := newRig(t)
	d := r.dir(1, "d")
	tmp := r.do(&api.Create{Parent: d, Mode: api.ModeRegular | 0o600, Orphan: true}).(*api.Entry).Attr
	require.Zero(t, tmp.Nlink)
	r.write(tmp.Ino, 0, 8000)
	r.check()
	require.EqualValues(t, 1, r.counts().Orphans)
	r.do(&api.Link{Ino: tmp.Ino, Parent: d, Name: []byte("now")})
	require.Zero(t, r.counts().Orphans)
	require.EqualValues(t, 1, r.attr(tmp.Ino).Nlink)
	r.check()
	r.must(&api.Reap{Inos: []ids.Ino{tmp.Ino}}) // no orphan: ignored
	require.EqualValues(t, 8000, r.ask(&api.StatFS{}).(*api.Totals).Bytes)

	r.do(&api.Unlink{Parent: d, Name: []byte("now")})
	require.EqualValues(t, 8000, r.attr(tmp.Ino).Size)
	r.reapAll()
	r.refused(errkind.Stale, &api.Link{Ino: tmp.Ino, Parent: d, Name: []byte("gone")})
	r.check()
}

func TestLayoutInheritance(t *testing.T) {
	r := newRig(t)
	a := r.dir(1, "a")
	b := r.dir(a, "b")
	require.Equal(t, ids.RS(4, 2), r.attr(r.file(b, "1")).Layout)
	r.do(&api.SetLayout{Ino: a, Layout: ids.Copies(3)})
	require.Equal(t, ids.Copies(3), r.attr(r.file(b, "2")).Layout)
	l := r.ask(&api.GetLayout{Ino: b}).(*api.LayoutOf)
	require.Equal(t, api.LayoutOf{Effective: ids.Copies(3), From: a}, *l)
	r.do(&api.SetLayout{Ino: a})
	require.Equal(t, ids.RS(4, 2), r.attr(r.file(b, "3")).Layout)
	r.refused(errkind.Invalid, &api.SetLayout{Ino: 1})
}

func TestSetIDBitsAreCleared(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	set := func(mode uint32) {
		r.do(&api.SetAttr{Ino: f, Valid: api.SetMode, Mode: mode})
		r.setXattr(f, xattrCaps, []byte("cap"))
	}
	set(0o6755)
	require.EqualValues(t, api.ModeRegular|0o6755, r.attr(f).Mode)
	require.NotZero(t, r.attr(f).Flags&api.FlagCaps)
	r.do(&api.SetAttr{Ino: f, Valid: api.SetUID, UID: 9})
	require.EqualValues(t, api.ModeRegular|0o755, r.attr(f).Mode)
	require.Zero(t, r.attr(f).Flags&api.FlagCaps)
	set(0o6745) // the group may not execute: set-gid means something else
	r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpKillPriv}}})
	require.EqualValues(t, api.ModeRegular|0o2745, r.attr(f).Mode)
	r.check()
}

func TestTimesAndChange(t *testing.T) {
	r := newRig(t)
	d := r.dir(1, "d")
	before := r.attr(d)
	f := r.do(&api.Create{Parent: d, Name: []byte("f"), Mode: api.ModeRegular, Time: 123}).(*api.Entry).Attr
	after := r.attr(d)
	require.EqualValues(t, 123, after.Mtime)
	require.Greater(t, after.Ctime, before.Ctime)
	require.Greater(t, after.Change, before.Change)
	r.clock -= 50_000 // the leader's clock steps back: logged time does not
	g := r.do(&api.SetAttr{Ino: f.Ino, Valid: api.SetMtime | api.SetAtime, Mtime: 5, Atime: -6}).(*api.Entry).Attr
	require.Equal(t, [2]int64{5, -6}, [2]int64{g.Mtime, g.Atime})
	require.Greater(t, g.Ctime, after.Ctime)
}

func TestXattrs(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	r.setXattr(f, "user.a", []byte("1"))
	r.refused(errkind.Exists, &api.SetXattr{Ino: f, Name: []byte("user.a"), Flags: api.XattrCreate})
	r.refused(errkind.NoAttr, &api.SetXattr{Ino: f, Name: []byte("user.b"), Flags: api.XattrReplace})
	r.refused(errkind.Range, &api.SetXattr{Ino: f, Name: bytes.Repeat([]byte("n"), 256)})
	r.refused(errkind.TooBig, &api.SetXattr{Ino: f, Name: []byte("user.b"), Value: make([]byte, api.MaxXattrValue+1)})
	r.setXattr(f, "user.big", make([]byte, api.MaxXattrValue))
	r.setXattr(f, "user.empty", nil)
	require.Empty(t, r.xattr(f, "user.empty"))
	require.Len(t, r.ask(&api.ListXattr{Ino: f}).(*api.Names).Names, 3)
	r.check()
	for i := range 1000 {
		name := "user." + strings.Repeat("x", 60) + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676))
		if _, err := r.try(r.session, &api.SetXattr{Ino: f, Name: []byte(name)}); err != nil {
			require.ErrorIs(t, err, errkind.NoSpace)
			require.Greater(t, i, 900)
			break
		}
	}
	r.check()
	r.do(&api.RemoveXattr{Ino: f, Name: []byte("user.a")})
	r.refused(errkind.NoAttr, &api.RemoveXattr{Ino: f, Name: []byte("user.a")})
	r.do(&api.Unlink{Parent: 1, Name: []byte("f")})
	r.reapAll()
	r.check()
	require.Zero(t, r.counts().Freeing)
}

func TestAccessACLAndMode(t *testing.T) {
	r := newRig(t)
	f := r.file(1, "f")
	r.setXattr(f, xattrAccess, makeACL(aclEntry{aclUserObj, 7, 0}, aclEntry{aclUser, 6, 5}, aclEntry{aclGroupObj, 5, 0},
		aclEntry{aclMask, 4, 0}, aclEntry{aclOther, 1, 0}))
	require.EqualValues(t, api.ModeRegular|0o741, r.attr(f).Mode)
	require.NotZero(t, r.attr(f).Flags&api.FlagACL)
	r.do(&api.SetAttr{Ino: f, Valid: api.SetMode, Mode: 0o620})
	a, err := parseACL(r.xattr(f, xattrAccess))
	require.NoError(t, err)
	require.Equal(t, acl{{aclUserObj, 6, 0}, {aclUser, 6, 5}, {aclGroupObj, 5, 0}, {aclMask, 2, 0}, {aclOther, 0, 0}}, a)
	r.check()
	plain := makeACL(aclEntry{aclUserObj, 6, 0}, aclEntry{aclGroupObj, 4, 0}, aclEntry{aclOther, 4, 0})
	r.setXattr(f, xattrAccess, plain)
	require.EqualValues(t, api.ModeRegular|0o644, r.attr(f).Mode)
	require.Zero(t, r.attr(f).Flags)
	r.refused(errkind.Access, &api.SetXattr{Ino: f, Name: []byte(xattrDefault), Value: plain})
	for _, bad := range [][]byte{
		{1},
		{2, 0, 0, 0, 1},
		makeACL(aclEntry{aclUserObj, 7, 0}), makeACL(aclEntry{aclOther, 7, 0}, aclEntry{aclUserObj, 7, 0}),
		makeACL(aclEntry{aclUserObj, 7, 0}, aclEntry{aclUser, 7, 1}, aclEntry{aclGroupObj, 7, 0}, aclEntry{aclOther, 7, 0}),
	} {
		r.refused(errkind.Invalid, &api.SetXattr{Ino: f, Name: []byte(xattrAccess), Value: bad})
	}
	r.do(&api.SetAttr{Ino: f, Valid: api.SetMode, Mode: 0o2755})
	r.do(&api.SetXattr{Ino: f, Name: []byte(xattrAccess), Value: plain, Flags: api.XattrKillSgid})
	require.EqualValues(t, api.ModeRegular|0o644, r.attr(f).Mode)
	r.check()
}

func TestDefaultACLIsInherited(t *testing.T) {
	r := newRig(t)
	d := r.dir(1, "d")
	def := makeACL(aclEntry{aclUserObj, 7, 0}, aclEntry{aclUser, 7, 5}, aclEntry{aclGroupObj, 5, 0},
		aclEntry{aclMask, 7, 0}, aclEntry{aclOther, 0, 0})
	r.setXattr(d, xattrDefault, def)
	f := r.do(&api.Create{Parent: d, Name: []byte("f"), Mode: api.ModeRegular | 0o664, Umask: 0o077}).(*api.Entry).Attr
	require.EqualValues(t, api.ModeRegular|0o660, f.Mode, "the umask does not count")
	a, err := parseACL(r.xattr(f.Ino, xattrAccess))
	require.NoError(t, err)
	require.Equal(t, acl{{aclUserObj, 6, 0}, {aclUser, 7, 5}, {aclGroupObj, 5, 0}, {aclMask, 6, 0}, {aclOther, 0, 0}}, a)
	sub := r.dir(d, "sub")
	require.Equal(t, def, r.xattr(sub, xattrDefault))
	link := r.do(&api.Create{Parent: d, Name: []byte("l"), Mode: api.ModeSymlink, Target: []byte("x")}).(*api.Entry).Attr
	require.Zero(t, link.Flags)
	r.check()

	r.setXattr(d, xattrDefault, makeACL(aclEntry{aclUserObj, 7, 0}, aclEntry{aclGroupObj, 4, 0}, aclEntry{aclOther, 4, 0}))
	g := r.do(&api.Create{Parent: d, Name: []byte("g"), Mode: api.ModeRegular | 0o666, Umask: 0o077}).(*api.Entry).Attr
	require.EqualValues(t, api.ModeRegular|0o644, g.Mode)
	require.Zero(t, g.Flags, "the mode says it all")
}
