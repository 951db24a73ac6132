package fs

import (
	"errors"
	"strings"
	"syscall"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	xattrCaps       = "security.capability"
	xattrACL        = "system.posix_acl_access"
	xattrACLDefault = "system.posix_acl_default"
)

// xattrName refuses names outside the name spaces that exist here.
func xattrName(name string) syscall.Errno {
	switch {
	case len(name) > api.MaxXattrName:
		return syscall.ERANGE
	case name == xattrACL, name == xattrACLDefault:
		return 0
	}
	for _, prefix := range []string{"user.", "trusted.", "security."} {
		if rest, ok := strings.CutPrefix(name, prefix); ok && rest != "" {
			return 0
		}
	}
	return syscall.EOPNOTSUPP
}

// absent reports that an inode, as of the attributes that the kernel got last,
// cannot have the attribute. The kernel asks for ACLs at each directory of a
// path and for capabilities at each exec, right after it got the attributes.
func (f *FS) absent(ino ids.Ino, name string) bool {
	bits := f.nodes.bits(ino)
	if bits&nodeKnown == 0 {
		return false
	}
	switch name {
	case xattrACL, xattrACLDefault:
		return bits&nodeACL == 0
	case xattrCaps:
		return bits&nodeCaps == 0
	}
	return false
}

// GetXAttr copies a value to dest, or tells its size when dest is too short.
func (f *FS) GetXAttr(cancel <-chan struct{}, in *fuseconn.InHeader, name string, dest []byte) (uint32, fuseconn.Status) {
	if no := xattrName(name); no != 0 {
		return 0, fuseconn.Status(no)
	}
	ino := ids.Ino(in.NodeId)
	if f.absent(ino, name) {
		return 0, fuseconn.Status(syscall.ENODATA)
	}
	o := f.begin(cancel)
	defer o.end()
	var b api.Bytes
	if err := f.cfg.Meta.Do(o, &api.GetXattr{Ino: ino, Name: []byte(name)}, &b); err != nil {
		return 0, f.inodeStatus("getxattr", in.NodeId, err)
	}
	return answerBytes(dest, b.Value)
}

func answerBytes(dest, value []byte) (uint32, fuseconn.Status) {
	if len(dest) < len(value) {
		return uint32(len(value)), fuseconn.Status(syscall.ERANGE)
	}
	return uint32(copy(dest, value)), fuseconn.OK
}

// ListXAttr lists names, each with a NUL behind. Those of trusted are root's.
func (f *FS) ListXAttr(cancel <-chan struct{}, in *fuseconn.InHeader, dest []byte) (uint32, fuseconn.Status) {
	o := f.begin(cancel)
	defer o.end()
	var names api.Names
	if err := f.cfg.Meta.Do(o, &api.ListXattr{Ino: ids.Ino(in.NodeId)}, &names); err != nil {
		return 0, f.inodeStatus("listxattr", in.NodeId, err)
	}
	var list []byte
	for _, n := range names.Names {
		if in.Uid != 0 && strings.HasPrefix(string(n), "trusted.") {
			continue
		}
		list = append(append(list, n...), 0)
	}
	return answerBytes(dest, list)
}

// SetXAttr sets an attribute.
func (f *FS) SetXAttr(cancel <-chan struct{}, in *fuseconn.SetXAttrIn, name string, data []byte) fuseconn.Status {
	if no := xattrName(name); no != 0 {
		return fuseconn.Status(no)
	}
	if len(data) > api.MaxXattrValue {
		return fuseconn.Status(syscall.E2BIG)
	}
	flags := uint8(in.Flags) & (api.XattrCreate | api.XattrReplace)
	if in.SetXAttrFlags&fuseconn.XattrACLKillSgid != 0 {
		flags |= api.XattrKillSgid
	}
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	err := f.cfg.Meta.Do(o, &api.SetXattr{Ino: ids.Ino(in.NodeId), Name: []byte(name), Value: data, Flags: flags}, &e)
	switch {
	case errors.Is(err, errkind.TooBig):
		return fuseconn.Status(syscall.ENOSPC) // what setxattr(2) has for "no room for this attribute"
	case err != nil:
		return f.inodeStatus("setxattr", in.NodeId, err)
	}
	f.nodes.see(&e.Attr, false)
	return fuseconn.OK
}

// RemoveXAttr removes an attribute. There being no ACL to remove is no error.
func (f *FS) RemoveXAttr(cancel <-chan struct{}, in *fuseconn.InHeader, name string) fuseconn.Status {
	if no := xattrName(name); no != 0 {
		return fuseconn.Status(no)
	}
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	err := f.cfg.Meta.Do(o, &api.RemoveXattr{Ino: ids.Ino(in.NodeId), Name: []byte(name)}, &e)
	switch {
	case errors.Is(err, errkind.NoAttr) && (name == xattrACL || name == xattrACLDefault):
		return fuseconn.OK
	case err != nil:
		return f.inodeStatus("removexattr", in.NodeId, err)
	}
	f.nodes.see(&e.Attr, false)
	return fuseconn.OK
}
