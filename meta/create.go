package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func (s *state) create(r *api.Create) (codec.Message, error) {
	dir, err := s.openDirectory(r.Parent)
	if err != nil {
		return nil, err
	}
	if err := checkCreate(r); err != nil {
		return nil, err
	}
	if !r.Orphan {
		if d, ok := s.name(r.Parent, r.Name); ok {
			return s.createExisting(r, d)
		}
	}
	isDir := r.Mode&api.ModeType == api.ModeDir
	if isDir {
		if err := s.checkDepth(dir); err != nil {
			return nil, err
		}
	}
	n := s.newInode(r, dir)
	if n.Ino == 0 {
		return nil, errkind.NoSpace.Wrap("create in directory %d: no inode number is left in slot", r.Parent)
	}
	s.inheritACL(n, dir, r.Umask)
	switch {
	case r.Orphan:
		s.put(inoKey(spaceOrphan, n.Ino), &mark{})
		s.counts.Orphans++
	case isDir:
		n.Nlink, n.Parent = 2, dir.Ino
		dir.Nlink++
		s.charge(dir.Ino, sum{Inodes: 1, Dirs: 1})
	default:
		s.attach(n, dir.Ino)
	}
	s.setInode(n)
	if r.Orphan {
		return n.entry(), nil
	}
	s.setName(dir.Ino, r.Name, n)
	s.touchDir(dir, r.Time)
	s.setInode(dir)
	return n.entryIn(dir), nil
}

func (s *state) createExisting(r *api.Create, d dirent) (codec.Message, error) {
	if r.Exclusive || r.Mode&api.ModeType != api.ModeRegular {
		return nil, errkind.Exists.Wrap("name %q in directory %d", r.Name, r.Parent)
	}
	n, err := s.child(r.Parent, r.Name)
	if err != nil {
		return nil, err
	}
	if n.IsDir() {
		return nil, errkind.IsDir.Wrap("name %q in directory %d", r.Name, r.Parent)
	}
	e := n.entry()
	e.Existed = true
	return e, nil
}

func checkCreate(r *api.Create) error {
	if r.Mode&^(api.ModeType|api.ModePerm) != 0 {
		return errkind.Invalid.Wrap("mode %o", r.Mode)
	}
	typ := r.Mode & api.ModeType
	switch typ {
	case api.ModeRegular, api.ModeDir, api.ModeFIFO, api.ModeSocket, api.ModeChar, api.ModeBlock:
		if len(r.Target) != 0 {
			return errkind.Invalid.Wrap("target of an inode of mode %o", r.Mode)
		}
	case api.ModeSymlink:
		if len(r.Target) == 0 {
			return errkind.NotFound.Wrap("symbolic link without a target")
		}
		if len(r.Target) > api.MaxTarget {
			return errkind.NameTooLong.Wrap("target of %d bytes: at most %d", len(r.Target), api.MaxTarget)
		}
	default:
		return errkind.Invalid.Wrap("file type of mode %o", r.Mode)
	}
	if r.Orphan {
		if typ != api.ModeRegular {
			return errkind.Invalid.Wrap("an inode of mode %o without a name", r.Mode)
		}
		return nil
	}
	return validName(r.Name)
}

// newInode makes the inode of a Create, without its links and its ACL.
func (s *state) newInode(r *api.Create, dir *inode) *inode {
	n := &inode{Attr: api.Attr{
		Mode: r.Mode, UID: r.UID, GID: r.GID,
		Atime: r.Time, Mtime: r.Time, Btime: r.Time, Ctime: s.now, Change: 1,
	}}
	if r.Time == 0 {
		n.Atime, n.Mtime, n.Btime = s.now, s.now, s.now
	}
	slot := dir.Ino.Slot()
	switch r.Mode & api.ModeType {
	case api.ModeDir:
		slot = s.nextSlot()
	case api.ModeSymlink:
		n.Mode = api.ModeSymlink | 0o777
		n.Inline, n.Size = r.Target, uint64(len(r.Target))
	case api.ModeRegular:
		n.Layout = s.layoutAt(dir).Effective
	case api.ModeChar, api.ModeBlock:
		n.Rdev = r.Rdev
	}
	if dir.Mode&api.ModeSetgid != 0 {
		n.GID = dir.GID
		if n.IsDir() {
			n.Mode |= api.ModeSetgid
		}
	}
	n.Ino = s.nextIno(slot)
	return n
}

// layoutAt returns the layout that files created in dir get.
func (v *view) layoutAt(dir *inode) *api.LayoutOf {
	l := &api.LayoutOf{Own: dir.Layout}
	v.path(dir, func(n *inode) bool {
		l.Effective, l.From = n.Layout, n.Ino
		return n.Layout.IsZero()
	})
	return l
}

// nextSlot gives each new directory a slot of its own, in turn.
func (s *state) nextSlot() ids.Slot {
	var a alloc
	s.load(keyAlloc, &a)
	a.Slot = (a.Slot + 1) & ids.MaxSlot
	s.put(keyAlloc, &a)
	return a.Slot
}

// nextIno returns a number that was never used, or zero when the slot has none left.
func (s *state) nextIno(slot ids.Slot) ids.Ino {
	var last number
	s.load(slotKey(slot), &last)
	if uint64(last) >= ids.MaxInoCounter {
		return 0
	}
	last++
	s.put(slotKey(slot), &last)
	return ids.MakeIno(slot, uint64(last))
}
