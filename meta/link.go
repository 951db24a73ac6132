package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func (s *state) link(r *api.Link) (codec.Message, error) {
	if err := validName(r.Name); err != nil {
		return nil, err
	}
	n, err := s.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if n.IsDir() {
		return nil, errkind.Perm.Wrap("link to directory %d", r.Ino)
	}
	if n.Nlink >= api.MaxLinks {
		return nil, errkind.TooManyLinks.Wrap("inode %d has %d names", r.Ino, n.Nlink)
	}
	orphan := inoKey(spaceOrphan, n.Ino)
	if n.Nlink == 0 && !s.has(orphan) {
		return nil, errkind.NotFound.Wrap("inode %d was removed", r.Ino)
	}
	dir, err := s.openDirectory(r.Parent)
	if err != nil {
		return nil, err
	}
	if _, ok := s.name(r.Parent, r.Name); ok {
		return nil, errkind.Exists.Wrap("name %q in directory %d", r.Name, r.Parent)
	}
	if n.Nlink == 0 {
		s.dequeue(orphan, &s.counts.Orphans)
	}
	s.attach(n, dir.Ino)
	s.touch(n)
	s.setInode(n)
	s.setName(dir.Ino, r.Name, n)
	s.touchDir(dir, 0)
	s.setInode(dir)
	return n.entry(), nil
}

func (s *state) unlink(r *api.Unlink) (codec.Message, error) {
	if len(r.Name) > api.MaxName {
		return nil, validName(r.Name)
	}
	dir, err := s.directory(r.Parent)
	if err != nil {
		return nil, err
	}
	n, err := s.child(r.Parent, r.Name)
	if err != nil {
		return nil, err
	}
	if r.Dir != n.IsDir() {
		if r.Dir {
			return nil, errkind.NotDir.Wrap("rmdir %q in directory %d", r.Name, r.Parent)
		}
		return nil, errkind.IsDir.Wrap("unlink %q in directory %d", r.Name, r.Parent)
	}
	if err := s.removeChild(dir, n); err != nil {
		return nil, err
	}
	s.delete(nameKey(dir.Ino, r.Name))
	s.touchDir(dir, r.Time)
	s.setInode(dir)
	return n.entryIn(dir), nil
}

// removeChild takes one name of n in dir away: the link counts, the sums and
// the orphan table. n is saved; dir is changed, not saved; the name record is
// the caller's.
func (s *state) removeChild(dir, n *inode) error {
	if n.IsDir() {
		if !s.empty(n.Ino) {
			return errkind.NotEmpty.Wrap("directory %d", n.Ino)
		}
		s.charge(dir.Ino, s.cost(n).negative())
		dir.Nlink--
		n.Nlink, n.Parent = 0, 0
		s.put(inoKey(spaceOrphan, n.Ino), &mark{})
		s.counts.Orphans++
	} else {
		s.detach(n, dir.Ino)
	}
	s.touch(n)
	s.setInode(n)
	return nil
}

// moveChild moves one name of n from one directory to another: link counts of
// the directories, parent, sums. All three are changed, not saved.
func (s *state) moveChild(n, from, to *inode) {
	if from.Ino == to.Ino {
		return
	}
	switch {
	case n.IsDir():
		from.Nlink--
		to.Nlink++
		s.rehome(n, to.Ino)
	case n.Nlink == 1:
		s.rehome(n, to.Ino)
	default:
		s.addBack(n.Ino, to.Ino, 1)
		if s.addBack(n.Ino, from.Ino, -1) == 0 && n.Parent == from.Ino {
			s.rehome(n, s.backs(n.Ino, 1)[0])
		}
	}
}

// below reports whether dir is ancestor or lies below it.
func (v *view) below(dir *inode, ancestor ids.Ino) bool {
	found := false
	v.path(dir, func(n *inode) bool {
		found = n.Ino == ancestor
		return !found
	})
	return found
}
