package meta

import (
	"fmt"
	"sort"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// node is an inode of the model.
type node struct {
	ino   ids.Ino
	dir   map[string]*node // nil for a file
	up    *node
	nlink int
}

func (n *node) under(a *node) bool {
	for ; n != nil; n = n.up {
		if n == a {
			return true
		}
	}
	return false
}

// treeModel says what the name space must look like.
type treeModel struct {
	r    *rig
	root *node
	all  []*node
}

func newTreeModel(t tester) *treeModel {
	root := &node{ino: ids.RootIno, dir: map[string]*node{}, nlink: 2}
	return &treeModel{r: newRig(t), root: root, all: []*node{root}}
}

func (m *treeModel) pick(t *rapid.T) *node { return rapid.SampledFrom(m.all).Draw(t, "node") }

func (m *treeModel) pickDir(t *rapid.T) *node {
	var dirs []*node
	for _, n := range m.all {
		if n.dir != nil {
			dirs = append(dirs, n)
		}
	}
	return rapid.SampledFrom(dirs).Draw(t, "dir")
}

func pickName(t *rapid.T) string {
	return rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "name")
}

// expect runs a command and compares whether it succeeds, and else how it fails.
func (m *treeModel) expect(t *rapid.T, want errkind.Kind, req api.Request) any {
	body, err := m.r.try(m.r.session, req)
	require.Equal(t, want, errkind.Of(err), "%T %+v: %v", req, req, err)
	return body
}

func (m *treeModel) create(t *rapid.T) {
	dir, name := m.pickDir(t), pickName(t)
	isDir := rapid.Bool().Draw(t, "isDir")
	mode := uint32(api.ModeRegular | 0o644)
	if isDir {
		mode = api.ModeDir | 0o755
	}
	want := errkind.OK
	switch {
	case dir.nlink == 0:
		want = errkind.NotFound
	case dir.dir[name] != nil:
		want = errkind.Exists
	}
	body := m.expect(t, want, &api.Create{Parent: dir.ino, Name: []byte(name), Mode: mode, Exclusive: true})
	if want != errkind.OK {
		return
	}
	n := &node{ino: body.(*api.Entry).Attr.Ino, nlink: 1, up: dir}
	if isDir {
		n.dir, n.nlink = map[string]*node{}, 2
		dir.nlink++
	}
	dir.dir[name] = n
	m.all = append(m.all, n)
	if !isDir && rapid.Bool().Draw(t, "data") {
		m.r.write(n.ino, 0, rapid.IntRange(1, 5000).Draw(t, "length"))
	}
}

func (m *treeModel) link(t *rapid.T) {
	n, dir, name := m.pick(t), m.pickDir(t), pickName(t)
	want := errkind.OK
	switch {
	case n.dir != nil:
		want = errkind.Perm
	case dir.nlink == 0:
		want = errkind.NotFound
	case dir.dir[name] != nil:
		want = errkind.Exists
	}
	m.expect(t, want, &api.Link{Ino: n.ino, Parent: dir.ino, Name: []byte(name)})
	if want == errkind.OK {
		dir.dir[name] = n
		n.nlink++
	}
}

// drop takes a name away in the model.
func (m *treeModel) drop(dir *node, name string) {
	n := dir.dir[name]
	delete(dir.dir, name)
	if n.dir != nil {
		n.nlink, n.up = 0, nil
		dir.nlink--
	} else {
		n.nlink--
	}
}

func (m *treeModel) unlink(t *rapid.T) {
	dir, name, asDir := m.pickDir(t), pickName(t), rapid.Bool().Draw(t, "rmdir")
	n := dir.dir[name]
	want := errkind.OK
	switch {
	case n == nil:
		want = errkind.NotFound
	case asDir && n.dir == nil:
		want = errkind.NotDir
	case !asDir && n.dir != nil:
		want = errkind.IsDir
	case asDir && len(n.dir) > 0:
		want = errkind.NotEmpty
	}
	m.expect(t, want, &api.Unlink{Parent: dir.ino, Name: []byte(name), Dir: asDir})
	if want == errkind.OK {
		m.drop(dir, name)
	}
}

func (m *treeModel) renameOutcome(from, to *node, oldName, newName string, flags uint32) errkind.Kind {
	old, over := from.dir[oldName], to.dir[newName]
	switch {
	case to.nlink == 0 && to != from, old == nil:
		return errkind.NotFound
	case over != nil && flags == api.RenameNoReplace:
		return errkind.Exists
	case over == nil && flags == api.RenameExchange:
		return errkind.NotFound
	case old.dir != nil && to.under(old), flags == api.RenameExchange && over.dir != nil && from.under(over):
		return errkind.Loop
	case over == nil || over == old || flags == api.RenameExchange:
		return errkind.OK
	case old.dir != nil && over.dir == nil:
		return errkind.NotDir
	case old.dir == nil && over.dir != nil:
		return errkind.IsDir
	case len(over.dir) > 0:
		return errkind.NotEmpty
	}
	return errkind.OK
}

func (m *treeModel) rename(t *rapid.T) {
	from, to, oldName, newName := m.pickDir(t), m.pickDir(t), pickName(t), pickName(t)
	flags := rapid.SampledFrom([]uint32{0, 0, api.RenameNoReplace, api.RenameExchange}).Draw(t, "flags")
	want := m.renameOutcome(from, to, oldName, newName, flags)
	m.expect(t, want, &api.Rename{
		OldParent: from.ino, OldName: []byte(oldName), NewParent: to.ino, NewName: []byte(newName), Flags: flags,
	})
	old, over := from.dir[oldName], to.dir[newName]
	if want != errkind.OK || old == over {
		return
	}
	place := func(n, from, to *node, name string) {
		to.dir[name] = n
		if n.dir != nil {
			n.up = to
			from.nlink--
			to.nlink++
		}
	}
	if flags == api.RenameExchange {
		place(old, from, to, newName)
		place(over, to, from, oldName)
		return
	}
	if over != nil {
		m.drop(to, newName)
	}
	delete(from.dir, oldName)
	place(old, from, to, newName)
}

// reap removes all orphans; the model forgets them.
func (m *treeModel) reap(*rapid.T) {
	m.r.reapAll()
	var left []*node
	for _, n := range m.all {
		if n.nlink > 0 {
			left = append(left, n)
		}
	}
	m.all = left
}

// verify compares the whole tree.
func (m *treeModel) verify(t *rapid.T) {
	require.NoError(t, Check(m.r.kv))
	for _, n := range m.all {
		a := m.r.attr(n.ino)
		require.EqualValues(t, n.nlink, a.Nlink, "inode %d", n.ino)
		if n.dir == nil {
			continue
		}
		var want, got []string
		for name, c := range n.dir {
			want = append(want, fmt.Sprintf("%s=%d", name, c.ino))
		}
		sort.Strings(want)
		for cookie, eof := uint64(0), false; !eof; {
			l := m.r.ask(&api.ReadDir{Ino: n.ino, Cookie: cookie, Max: 2, Plus: true}).(*api.Listing)
			for _, e := range l.Entries {
				got = append(got, fmt.Sprintf("%s=%d", e.Name, e.Ino))
				require.Equal(t, e.Ino, e.Attr.Ino)
				cookie = e.Cookie
			}
			eof = l.EOF
		}
		sort.Strings(got)
		require.Equal(t, want, got, "directory %d", n.ino)
		if n.up != nil {
			require.Equal(t, n.up.ino, m.r.ask(&api.Lookup{Parent: n.ino, Name: []byte("..")}).(*api.Entry).Attr.Ino)
		}
	}
}

func TestTreeAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newTreeModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"create": m.create, "create2": m.create, "link": m.link, "unlink": m.unlink,
			"rename": m.rename, "rename2": m.rename, "reap": m.reap, "": m.verify,
		})
		require.Equal(t, m.r.kv.dump(), m.r.replay().dump())
	})
}
