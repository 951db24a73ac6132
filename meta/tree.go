package meta

import (
	"bytes"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// maxDepth bounds the directories on the way to the root when one more is made.
const maxDepth = 1024

// inode reads an inode.
func (v *view) inode(ino ids.Ino) (*inode, bool) {
	n := &inode{}
	if !v.load(inoKey(spaceInode, ino), n) {
		return nil, false
	}
	n.Ino = ino
	return n, true
}

// need reads an inode that the caller holds by number: Stale when it is gone.
func (v *view) need(ino ids.Ino) (*inode, error) {
	n, ok := v.inode(ino)
	if !ok {
		return nil, errkind.Stale.Wrap("inode %d is gone", ino)
	}
	return n, nil
}

// directory reads an inode that must be a directory.
func (v *view) directory(ino ids.Ino) (*inode, error) {
	n, err := v.need(ino)
	if err == nil && !n.IsDir() {
		err = errkind.NotDir.Wrap("inode %d", ino)
	}
	return n, err
}

// openDirectory reads a directory that takes new names: not a removed one.
func (v *view) openDirectory(ino ids.Ino) (*inode, error) {
	n, err := v.directory(ino)
	if err == nil && n.Nlink == 0 {
		err = errkind.NotFound.Wrap("directory %d was removed", ino)
	}
	return n, err
}

// name looks a name up.
func (v *view) name(parent ids.Ino, name []byte) (dirent, bool) {
	var d dirent
	ok := v.load(nameKey(parent, name), &d)
	return d, ok
}

// child looks a name up and reads its inode. A name without inode is damage.
func (v *view) child(parent ids.Ino, name []byte) (*inode, error) {
	d, ok := v.name(parent, name)
	if !ok {
		return nil, errkind.NotFound.Wrap("name %q in directory %d", name, parent)
	}
	n, ok := v.inode(d.Ino)
	if !ok {
		if !v.failed() {
			v.fail(errkind.Corrupt.Wrap("name %q in directory %d: inode %d is missing", name, parent, d.Ino))
		}
		return nil, errkind.Corrupt.Wrap("inode %d", d.Ino)
	}
	return n, nil
}

// empty reports whether a directory has no names.
func (v *view) empty(dir ids.Ino) bool {
	none := true
	lo := inoKey(spaceName, dir)
	v.ascend(lo, next(lo), func(_, _ []byte) bool {
		none = false
		return false
	})
	return none
}

// validName checks a new name.
func validName(name []byte) error {
	switch {
	case len(name) > api.MaxName:
		return errkind.NameTooLong.Wrap("name of %d bytes: at most %d", len(name), api.MaxName)
	case len(name) == 0, string(name) == ".", string(name) == "..", bytes.ContainsAny(name, "/\x00"):
		return errkind.Invalid.Wrap("name %q", name)
	}
	return nil
}

// attr returns what the world sees of an inode.
func (n *inode) attr() api.Attr {
	a := n.Attr
	if !n.IsDir() {
		a.Parent = 0
	}
	return a
}

func (n *inode) entry() *api.Entry { return &api.Entry{Attr: n.attr()} }

// entryIn is entry with the directory that has changed.
func (n *inode) entryIn(dir *inode) *api.Entry {
	a := dir.attr()
	return &api.Entry{Attr: n.attr(), Dir: &a}
}

// touch marks an inode as changed now.
func (s *state) touch(n *inode) {
	n.Ctime = s.now
	n.Change++
}

// touchDir marks a directory's entries as changed. mtime is the client's wall
// clock; zero means the logged time.
func (s *state) touchDir(n *inode, mtime int64) {
	n.Mtime = mtime
	if mtime == 0 {
		n.Mtime = s.now
	}
	s.touch(n)
}

func (s *state) setInode(n *inode) {
	n.Birth = s.id.Epoch
	s.put(inoKey(spaceInode, n.Ino), n)
}

func (s *state) setName(parent ids.Ino, name []byte, n *inode) {
	s.put(nameKey(parent, name), &dirent{Ino: n.Ino, Type: uint8(n.Mode >> 12), Birth: s.id.Epoch})
}

// cost is what an inode adds to the sums of its home directory and above.
func (v *view) cost(n *inode) sum {
	c := sum{Bytes: n.Stored, Inodes: 1}
	if n.IsDir() {
		var below sum
		v.load(inoKey(spaceSum, n.Ino), &below)
		c = sum{Bytes: below.Bytes, Inodes: below.Inodes + 1, Dirs: below.Dirs + 1}
	}
	return c
}

func (c sum) negative() sum { return sum{-c.Bytes, -c.Inodes, -c.Dirs} }

func (c sum) add(d sum) sum { return sum{c.Bytes + d.Bytes, c.Inodes + d.Inodes, c.Dirs + d.Dirs} }

// charge adds d to the sums of dir and of all its ancestors.
func (s *state) charge(dir ids.Ino, d sum) {
	if d == (sum{}) {
		return
	}
	for steps := 0; !s.failed(); steps++ {
		if steps > api.MaxRecords {
			s.fail(errkind.Corrupt.Wrap("directory %d is its own ancestor", dir))
			return
		}
		var c sum
		key := inoKey(spaceSum, dir)
		s.load(key, &c)
		if c = c.add(d); c == (sum{}) {
			s.delete(key)
		} else {
			s.put(key, &c)
		}
		if dir == ids.RootIno {
			return
		}
		dir = s.parentOf(dir)
	}
}

// parentOf returns the directory above dir. A missing one is damage.
func (v *view) parentOf(dir ids.Ino) ids.Ino {
	n, ok := v.inode(dir)
	if !ok || n.Parent == 0 {
		if !v.failed() {
			v.fail(errkind.Corrupt.Wrap("directory %d has no parent", dir))
		}
		return ids.RootIno
	}
	return n.Parent
}

// path calls fn for dir and each directory above it up to the root, until fn
// returns false.
func (v *view) path(dir *inode, fn func(*inode) bool) {
	for steps := 0; !v.failed() && fn(dir) && dir.Ino != ids.RootIno; steps++ {
		if steps > api.MaxRecords {
			v.fail(errkind.Corrupt.Wrap("directory %d is its own ancestor", dir.Ino))
			return
		}
		up, ok := v.inode(dir.Parent)
		if !ok {
			return
		}
		dir = up
	}
}

// checkDepth refuses a directory below parent when the tree is too deep there.
func (v *view) checkDepth(parent *inode) error {
	depth := 0
	v.path(parent, func(*inode) bool {
		depth++
		return depth <= maxDepth
	})
	if depth > maxDepth {
		return errkind.NameTooLong.Wrap("directory %d lies %d directories deep", parent.Ino, maxDepth)
	}
	return nil
}

// backs reads the directories that hold names of a multiply-linked inode, at
// most limit of them.
func (v *view) backs(ino ids.Ino, limit int) []ids.Ino {
	var dirs []ids.Ino
	lo := inoKey(spaceBack, ino)
	v.ascend(lo, next(lo), func(key, _ []byte) bool {
		dirs = append(dirs, ids.Ino(beUint64(key[9:])))
		return len(dirs) < limit
	})
	return dirs
}

// addBack counts one more (or, negative, fewer) names of ino in dir, and
// returns how many there are now.
func (s *state) addBack(ino, dir ids.Ino, d int) number {
	key := backKey(ino, dir)
	var n number
	s.load(key, &n)
	if n += number(d); n == 0 {
		s.delete(key)
	} else {
		s.put(key, &n)
	}
	return n
}

// attach counts a new name of a file in dir. n is changed, not saved.
func (s *state) attach(n *inode, dir ids.Ino) {
	switch n.Nlink {
	case 0:
		n.Parent = dir
		s.charge(dir, s.cost(n))
	case 1:
		s.addBack(n.Ino, n.Parent, 1)
		s.addBack(n.Ino, dir, 1)
	default:
		s.addBack(n.Ino, dir, 1)
	}
	n.Nlink++
}

// detach takes away a name that a file had in dir; the last one makes it an
// orphan. n is changed, not saved.
func (s *state) detach(n *inode, dir ids.Ino) {
	home := n.Parent
	switch n.Nlink {
	case 1:
		home = 0
		s.put(inoKey(spaceOrphan, n.Ino), &mark{})
		s.counts.Orphans++
	case 2:
		s.addBack(n.Ino, dir, -1)
		if left := s.backs(n.Ino, 1); len(left) == 1 {
			home = left[0]
			s.delete(backKey(n.Ino, home))
		}
	default:
		if s.addBack(n.Ino, dir, -1) == 0 && dir == home {
			if left := s.backs(n.Ino, 1); len(left) == 1 {
				home = left[0]
			}
		}
	}
	n.Nlink--
	s.rehome(n, home)
}

// rehome charges a file to another directory, or to none.
func (s *state) rehome(n *inode, home ids.Ino) {
	if home == n.Parent {
		return
	}
	c := s.cost(n)
	s.charge(n.Parent, c.negative())
	if home != 0 {
		s.charge(home, c)
	}
	n.Parent = home
}
