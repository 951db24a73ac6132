package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

// renaming is what a rename works on. to is from when the directory is the
// same, so that both see each other's changes.
type renaming struct {
	r         *api.Rename
	from, to  *inode
	old, over *inode // over is nil when the new name is free
}

func (s *state) rename(r *api.Rename) (codec.Message, error) {
	m, err := s.openRename(r)
	if err != nil {
		return nil, err
	}
	switch {
	case r.Flags&api.RenameExchange != 0:
		err = s.exchange(m)
	case m.over != nil && m.over.Ino == m.old.Ino:
		return &api.Renamed{Moved: m.old.attr()}, nil // two names of one inode: nothing to do
	default:
		err = s.move(m)
	}
	if err != nil {
		return nil, err
	}
	s.touchDir(m.from, r.Time)
	s.setInode(m.from)
	if m.to != m.from {
		s.touchDir(m.to, r.Time)
		s.setInode(m.to)
	}
	reply := &api.Renamed{Moved: m.old.attr()}
	if r.Flags&api.RenameExchange == 0 && m.over != nil {
		reply.Replaced = m.over.Ino
	}
	return reply, nil
}

// openRename reads what the rename concerns and checks all that does not
// depend on the kind of rename.
func (s *state) openRename(r *api.Rename) (*renaming, error) {
	if r.Flags&^(api.RenameNoReplace|api.RenameExchange) != 0 || r.Flags == api.RenameNoReplace|api.RenameExchange {
		return nil, errkind.Invalid.Wrap("rename flags %#x", r.Flags)
	}
	for _, name := range [][]byte{r.OldName, r.NewName} {
		if err := validName(name); err != nil {
			return nil, err
		}
	}
	m := &renaming{r: r}
	var err error
	if m.from, err = s.directory(r.OldParent); err != nil {
		return nil, err
	}
	m.to = m.from
	if r.NewParent != r.OldParent {
		if m.to, err = s.openDirectory(r.NewParent); err != nil {
			return nil, err
		}
	}
	if m.old, err = s.child(r.OldParent, r.OldName); err != nil {
		return nil, err
	}
	if d, ok := s.name(r.NewParent, r.NewName); ok {
		if r.Flags&api.RenameNoReplace != 0 {
			return nil, errkind.Exists.Wrap("name %q in directory %d", r.NewName, r.NewParent)
		}
		if m.over, err = s.child(r.NewParent, r.NewName); err != nil {
			return nil, err
		}
		if d.Ino == m.old.Ino {
			m.over = m.old
		}
	} else if r.Flags&api.RenameExchange != 0 {
		return nil, errkind.NotFound.Wrap("name %q in directory %d", r.NewName, r.NewParent)
	}
	if m.to != m.from && m.old.IsDir() {
		if s.below(m.to, m.old.Ino) {
			return nil, errkind.Loop.Wrap("directory %d moved below itself", m.old.Ino)
		}
		return m, s.checkDepth(m.to)
	}
	return m, nil
}

// move gives the old inode the new name, in place of whatever had it.
func (s *state) move(m *renaming) error {
	r := m.r
	if m.over != nil {
		if err := replaceable(m); err != nil {
			return err
		}
		if err := s.removeChild(m.to, m.over); err != nil {
			return err
		}
	}
	s.moveChild(m.old, m.from, m.to)
	s.touch(m.old)
	s.setInode(m.old)
	s.delete(nameKey(r.OldParent, r.OldName))
	s.setName(r.NewParent, r.NewName, m.old)
	return nil
}

func replaceable(m *renaming) error {
	switch {
	case m.old.IsDir() && !m.over.IsDir():
		return errkind.NotDir.Wrap("rename: directory %d over file %q", m.old.Ino, m.r.NewName)
	case !m.old.IsDir() && m.over.IsDir():
		return errkind.IsDir.Wrap("rename: file %d over directory %q", m.old.Ino, m.r.NewName)
	}
	return nil
}

// exchange swaps two names.
func (s *state) exchange(m *renaming) error {
	r := m.r
	if m.over.Ino == m.old.Ino {
		return nil
	}
	if m.over.IsDir() && m.to != m.from {
		if s.below(m.from, m.over.Ino) {
			return errkind.Loop.Wrap("directory %d moved below itself", m.over.Ino)
		}
		if err := s.checkDepth(m.from); err != nil {
			return err
		}
	}
	s.moveChild(m.old, m.from, m.to)
	s.moveChild(m.over, m.to, m.from)
	for _, n := range []*inode{m.old, m.over} {
		s.touch(n)
		s.setInode(n)
	}
	s.setName(r.NewParent, r.NewName, m.old)
	s.setName(r.OldParent, r.OldName, m.over)
	return nil
}
