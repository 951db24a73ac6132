package meta

import (
	"encoding/binary"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Tags of a POSIX ACL entry, as Linux writes them into extended attributes.
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20

	aclVersion   = 2
	aclEntrySize = 8
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

// acl is a POSIX access control list; empty is "none".
type acl []aclEntry

// parseACL reads the value of an ACL attribute: a version, then entries in the
// order of their tags, all little-endian.
func parseACL(p []byte) (acl, error) {
	if len(p) == 0 {
		return nil, nil
	}
	if len(p) < 4 || (len(p)-4)%aclEntrySize != 0 || binary.LittleEndian.Uint32(p) != aclVersion {
		return nil, errkind.Invalid.Wrap("ACL of %d bytes", len(p))
	}
	var a acl
	seen := uint16(0)
	for p = p[4:]; len(p) > 0; p = p[aclEntrySize:] {
		e := aclEntry{binary.LittleEndian.Uint16(p), binary.LittleEndian.Uint16(p[2:]), binary.LittleEndian.Uint32(p[4:])}
		single := e.tag != aclUser && e.tag != aclGroup
		if e.tag == 0 || e.tag&(e.tag-1) != 0 || e.tag > aclOther || e.perm > 7 || seen >= e.tag<<1 || single && seen&e.tag != 0 {
			return nil, errkind.Invalid.Wrap("ACL entry %d: tag %#x, permissions %#x", len(a), e.tag, e.perm)
		}
		seen |= e.tag
		a = append(a, e)
	}
	base := uint16(aclUserObj | aclGroupObj | aclOther)
	named := seen&(aclUser|aclGroup) != 0
	if len(a) > 0 && (seen&base != base || named && seen&aclMask == 0) {
		return nil, errkind.Invalid.Wrap("ACL without all of owner, group, other, or without the mask that named entries need")
	}
	return a, nil
}

func (a acl) encode() []byte {
	p := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range a {
		p = binary.LittleEndian.AppendUint16(p, e.tag)
		p = binary.LittleEndian.AppendUint16(p, e.perm)
		p = binary.LittleEndian.AppendUint32(p, e.id)
	}
	return p
}

// find returns the only entry with the tag, or nil.
func (a acl) find(tag uint16) *aclEntry {
	for i := range a {
		if a[i].tag == tag {
			return &a[i]
		}
	}
	return nil
}

// classes returns the entries that stand for the three digits of the mode.
// The mask, where there is one, is the group's.
func (a acl) classes() [3]*aclEntry {
	group := a.find(aclMask)
	if group == nil {
		group = a.find(aclGroupObj)
	}
	return [3]*aclEntry{a.find(aclUserObj), group, a.find(aclOther)}
}

// mode returns the permission bits that the list, which must not be empty,
// stands for, and whether they say all that it says.
func (a acl) mode() (mode uint32, plain bool) {
	for _, e := range a.classes() {
		mode = mode<<3 | uint32(e.perm)
	}
	return mode, len(a) == 3
}

// restrict takes away from the list what mode does not allow, and returns what
// both allow: what a new file gets from a default ACL.
func (a acl) restrict(mode uint32) uint32 {
	out := uint32(0)
	for i, e := range a.classes() {
		e.perm &= uint16(mode >> (6 - 3*i) & 7)
		out = out<<3 | uint32(e.perm)
	}
	return mode&^0o777 | out
}

// inheritACL gives a new inode its permissions: by the default ACL of the
// directory, or else by the umask. n is changed, not saved.
func (s *state) inheritACL(n, dir *inode, umask uint32) {
	if n.Mode&api.ModeType == api.ModeSymlink {
		return
	}
	var x xattr
	if dir.Flags&api.FlagACL == 0 || !s.load(xattrKey(dir.Ino, []byte(xattrDefault)), &x) {
		n.Mode &^= umask & 0o777
		return
	}
	a, err := parseACL(x.Value)
	if err != nil {
		s.fail(errkind.Corrupt.Wrap("default ACL of directory %d: %v", dir.Ino, err))
		return
	}
	n.Mode = a.restrict(n.Mode)
	if _, plain := a.mode(); !plain {
		s.putXattr(n, []byte(xattrAccess), a.encode())
	}
	if n.IsDir() {
		s.putXattr(n, []byte(xattrDefault), x.Value)
	}
}

// chmodACL makes the access ACL of an inode follow its mode.
func (s *state) chmodACL(n *inode) {
	name := []byte(xattrAccess)
	var x xattr
	if n.Flags&api.FlagACL == 0 || !s.load(xattrKey(n.Ino, name), &x) {
		return
	}
	a, err := parseACL(x.Value)
	if err != nil {
		s.fail(errkind.Corrupt.Wrap("ACL of inode %d: %v", n.Ino, err))
		return
	}
	for i, e := range a.classes() {
		e.perm = uint16(n.Mode >> (6 - 3*i) & 7)
	}
	s.putXattr(n, name, a.encode())
}
