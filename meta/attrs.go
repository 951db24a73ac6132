package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Names of the extended attributes that the state machine knows.
const (
	xattrAccess  = "system.posix_acl_access"
	xattrDefault = "system.posix_acl_default"
	xattrCaps    = "security.capability"
)

// maxXattrNames bounds the names of an inode's extended attributes, with a
// zero byte behind each: what one listxattr(2) may return.
const maxXattrNames = 64 << 10

func (s *state) setAttr(r *api.SetAttr) (codec.Message, error) {
	n, err := s.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if r.Valid&api.SetUID != 0 {
		n.UID = r.UID
	}
	if r.Valid&api.SetGID != 0 {
		n.GID = r.GID
	}
	owner := r.Valid&(api.SetUID|api.SetGID) != 0 && !n.IsDir()
	if owner || r.Valid&api.SetKillPriv != 0 {
		s.killPriv(n)
	}
	if r.Valid&api.SetMode != 0 {
		if r.Mode&^(api.ModeType|api.ModePerm) != 0 {
			return nil, errkind.Invalid.Wrap("mode %o of inode %d", r.Mode, r.Ino)
		}
		n.Mode = n.Mode&api.ModeType | r.Mode&api.ModePerm
		s.chmodACL(n)
	}
	if r.Valid&api.SetAtime != 0 {
		n.Atime = r.Atime
	}
	if r.Valid&api.SetMtime != 0 {
		n.Mtime = r.Mtime
	}
	s.touch(n)
	s.setInode(n)
	return n.entry(), nil
}

// killPriv takes away what makes a program run with other rights: set-uid,
// set-gid where the group may execute, file capabilities.
func (s *state) killPriv(n *inode) {
	n.Mode &^= api.ModeSetuid
	if n.Mode&0o010 != 0 {
		n.Mode &^= api.ModeSetgid
	}
	if n.Flags&api.FlagCaps != 0 {
		s.dropXattr(n, []byte(xattrCaps))
	}
}

func checkXattr(r *api.SetXattr) error {
	switch {
	case len(r.Name) == 0 || len(r.Name) > api.MaxXattrName:
		return errkind.Range.Wrap("attribute name of %d bytes: 1 to %d", len(r.Name), api.MaxXattrName)
	case len(r.Value) > api.MaxXattrValue:
		return errkind.TooBig.Wrap("attribute %q of %d bytes: at most %d", r.Name, len(r.Value), api.MaxXattrValue)
	case r.Flags&api.XattrCreate != 0 && r.Flags&api.XattrReplace != 0:
		return errkind.Invalid.Wrap("attribute %q: flags %#x", r.Name, r.Flags)
	}
	return nil
}

func (s *state) setXattr(r *api.SetXattr) (codec.Message, error) {
	if err := checkXattr(r); err != nil {
		return nil, err
	}
	n, err := s.need(r.Ino)
	if err != nil {
		return nil, err
	}
	exists := s.has(xattrKey(n.Ino, r.Name))
	switch {
	case exists && r.Flags&api.XattrCreate != 0:
		return nil, errkind.Exists.Wrap("attribute %q of inode %d", r.Name, r.Ino)
	case !exists && r.Flags&api.XattrReplace != 0:
		return nil, errkind.NoAttr.Wrap("attribute %q of inode %d", r.Name, r.Ino)
	case !exists && int(n.XattrBytes)+len(r.Name)+1 > maxXattrNames:
		return nil, errkind.NoSpace.Wrap("attributes of inode %d: names of more than %d bytes", r.Ino, maxXattrNames)
	}
	if err := s.storeXattr(n, r); err != nil {
		return nil, err
	}
	s.touch(n)
	s.setInode(n)
	return n.entry(), nil
}

// storeXattr stores a value, after what the system's own attributes ask for.
func (s *state) storeXattr(n *inode, r *api.SetXattr) error {
	switch string(r.Name) {
	case xattrAccess:
		a, err := parseACL(r.Value)
		if err != nil {
			return err
		}
		if len(a) == 0 {
			s.dropXattr(n, r.Name)
			return nil
		}
		mode, plain := a.mode()
		n.Mode = n.Mode&^0o777 | mode
		if r.Flags&api.XattrKillSgid != 0 {
			n.Mode &^= api.ModeSetgid
		}
		if plain { // the mode says it all
			s.dropXattr(n, r.Name)
			return nil
		}
	case xattrDefault:
		if !n.IsDir() {
			return errkind.Access.Wrap("default ACL of inode %d, which is not a directory", n.Ino)
		}
		a, err := parseACL(r.Value)
		if err != nil {
			return err
		}
		if len(a) == 0 {
			s.dropXattr(n, r.Name)
			return nil
		}
	}
	s.putXattr(n, r.Name, r.Value)
	return nil
}

// putXattr stores a value as it is. n is changed, not saved.
func (s *state) putXattr(n *inode, name, value []byte) {
	key := xattrKey(n.Ino, name)
	if !s.has(key) {
		n.XattrBytes += uint32(len(name)) + 1
	}
	s.put(key, &xattr{Birth: s.id.Epoch, Value: value})
	n.Flags |= api.FlagXattrs | xattrFlag(name)
}

// dropXattr removes an attribute; false when there was none. n is changed, not
// saved.
func (s *state) dropXattr(n *inode, name []byte) bool {
	key := xattrKey(n.Ino, name)
	if !s.has(key) {
		return false
	}
	s.delete(key)
	n.XattrBytes -= uint32(len(name)) + 1
	n.Flags &^= xattrFlag(name)
	if n.XattrBytes == 0 {
		n.Flags &^= api.FlagXattrs
	}
	if s.has(xattrKey(n.Ino, []byte(xattrAccess))) || s.has(xattrKey(n.Ino, []byte(xattrDefault))) {
		n.Flags |= api.FlagACL
	}
	return true
}

func xattrFlag(name []byte) uint8 {
	switch string(name) {
	case xattrAccess, xattrDefault:
		return api.FlagACL
	case xattrCaps:
		return api.FlagCaps
	}
	return 0
}

func (s *state) removeXattr(r *api.RemoveXattr) (codec.Message, error) {
	n, err := s.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if !s.dropXattr(n, r.Name) {
		return nil, errkind.NoAttr.Wrap("attribute %q of inode %d", r.Name, r.Ino)
	}
	s.touch(n)
	s.setInode(n)
	return n.entry(), nil
}

func (s *state) setLayout(r *api.SetLayout) (codec.Message, error) {
	n, err := s.directory(r.Ino)
	if err != nil {
		return nil, err
	}
	switch {
	case r.Layout.IsZero():
		if n.Parent == n.Ino {
			return nil, errkind.Invalid.Wrap("the root directory has no other to inherit a layout from")
		}
	default:
		if err := r.Layout.Validate(); err != nil {
			return nil, errkind.Invalid.Wrap("%v", err)
		}
	}
	n.Layout = r.Layout
	s.touch(n)
	s.setInode(n)
	return n.entry(), nil
}
