package fs

import (
	"fmt"
	"syscall"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	accessMode = syscall.O_ACCMODE
	// openDirect is O_DIRECT.
	openDirect = syscall.O_DIRECT
)

// create makes an inode and answers with its entry.
func (f *FS) create(name string, cancel <-chan struct{}, in *fuseconn.InHeader, req *api.Create, out *fuseconn.EntryOut) fuseconn.Status {
	if len(req.Name) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	o := f.begin(cancel)
	defer o.end()
	req.Parent = ids.Ino(in.NodeId)
	req.UID, req.GID = in.Uid, in.Gid
	req.Time = f.now()
	req.Exclusive = true
	var e api.Entry
	if err := f.cfg.Meta.Do(o, req, &e); err != nil {
		return f.status(name, in.NodeId, err)
	}
	f.entry(o, out, &e.Attr)
	return fuseconn.OK
}

// Mknod makes a file, a FIFO, a socket or a device.
func (f *FS) Mknod(cancel <-chan struct{}, in *fuseconn.MknodIn, name string, out *fuseconn.EntryOut) fuseconn.Status {
	mode := in.Mode
	if mode&api.ModeType == 0 {
		mode |= api.ModeRegular
	}
	return f.create("mknod", cancel, &in.InHeader, &api.Create{Name: []byte(name), Mode: mode, Umask: in.Umask, Rdev: in.Rdev}, out)
}

// Mkdir makes a directory.
func (f *FS) Mkdir(cancel <-chan struct{}, in *fuseconn.MkdirIn, name string, out *fuseconn.EntryOut) fuseconn.Status {
	mode := in.Mode&api.ModePerm | api.ModeDir
	return f.create("mkdir", cancel, &in.InHeader, &api.Create{Name: []byte(name), Mode: mode, Umask: in.Umask}, out)
}

// Symlink makes a symbolic link called name.
func (f *FS) Symlink(cancel <-chan struct{}, in *fuseconn.InHeader, target, name string, out *fuseconn.EntryOut) fuseconn.Status {
	if len(target) > api.MaxTarget {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	return f.create("symlink", cancel, in, &api.Create{Name: []byte(name), Mode: api.ModeSymlink | 0o777, Target: []byte(target)}, out)
}

// Readlink reads a symbolic link.
func (f *FS) Readlink(cancel <-chan struct{}, in *fuseconn.InHeader) ([]byte, fuseconn.Status) {
	o := f.begin(cancel)
	defer o.end()
	var b api.Bytes
	if err := f.cfg.Meta.Do(o, &api.Readlink{Ino: ids.Ino(in.NodeId)}, &b); err != nil {
		return nil, f.inodeStatus("readlink", in.NodeId, err)
	}
	return b.Value, fuseconn.OK
}

// Link gives an inode one more name; also the way in which a file made with
// O_TMPFILE gets its first.
func (f *FS) Link(cancel <-chan struct{}, in *fuseconn.LinkIn, name string, out *fuseconn.EntryOut) fuseconn.Status {
	if len(name) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	// A name is a promise that the bytes are there, as with rename.
	err := f.cfg.Engine.FlushIno(o, ids.Ino(in.Oldnodeid))
	if err == nil {
		err = f.cfg.Meta.Do(o, &api.Link{Ino: ids.Ino(in.Oldnodeid), Parent: ids.Ino(in.NodeId), Name: []byte(name)}, &e)
	}
	if err != nil {
		return f.status("link", in.NodeId, err)
	}
	f.entry(o, out, &e.Attr)
	return fuseconn.OK
}

// Unlink removes a file's name.
func (f *FS) Unlink(cancel <-chan struct{}, in *fuseconn.InHeader, name string) fuseconn.Status {
	return f.unlink("unlink", cancel, in, name, false)
}

// Rmdir removes an empty directory.
func (f *FS) Rmdir(cancel <-chan struct{}, in *fuseconn.InHeader, name string) fuseconn.Status {
	return f.unlink("rmdir", cancel, in, name, true)
}

func (f *FS) unlink(what string, cancel <-chan struct{}, in *fuseconn.InHeader, name string, dir bool) fuseconn.Status {
	if len(name) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	err := f.cfg.Meta.Do(o, &api.Unlink{Parent: ids.Ino(in.NodeId), Name: []byte(name), Dir: dir, Time: f.now()}, &e)
	return f.status(what, in.NodeId, err)
}

// Rename moves a name, after the bytes written to what it names are safe: a
// program that never calls fsync relies on the order.
func (f *FS) Rename(cancel <-chan struct{}, in *fuseconn.RenameIn, oldName, newName string) fuseconn.Status {
	if len(oldName) > api.MaxName || len(newName) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	if in.Flags&^(api.RenameNoReplace|api.RenameExchange) != 0 || in.Flags == api.RenameNoReplace|api.RenameExchange {
		return fuseconn.Status(syscall.EINVAL)
	}
	o := f.begin(cancel)
	defer o.end()
	req := &api.Rename{
		OldParent: ids.Ino(in.NodeId), OldName: []byte(oldName),
		NewParent: ids.Ino(in.Newdir), NewName: []byte(newName),
		Flags: in.Flags, Time: f.now(),
	}
	err := f.flushName(o, req.OldParent, req.OldName)
	if err == nil && in.Flags&api.RenameExchange != 0 {
		err = f.flushName(o, req.NewParent, req.NewName)
	}
	if err == nil {
		var r api.Renamed
		err = f.cfg.Meta.Do(o, req, &r)
	}
	return f.status("rename", in.NodeId, err)
}

// flushName commits what was written to the file of that name.
func (f *FS) flushName(o *op, parent ids.Ino, name []byte) error {
	if len(f.cfg.Engine.DirtyInos()) == 0 {
		return nil
	}
	var e api.Entry
	if err := f.cfg.Meta.Do(o, &api.Lookup{Parent: parent, Name: name}, &e); err != nil {
		return err
	}
	if !e.Attr.IsRegular() {
		return nil
	}
	return f.cfg.Engine.FlushIno(o, e.Attr.Ino)
}

// Create makes and opens a file, or opens the one that another mount made
// since the kernel looked.
func (f *FS) Create(cancel <-chan struct{}, in *fuseconn.CreateIn, name string, out *fuseconn.CreateOut) fuseconn.Status {
	if len(name) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	o := f.begin(cancel)
	defer o.end()
	req := &api.Create{
		Parent: ids.Ino(in.NodeId), Name: []byte(name), Mode: in.Mode&api.ModePerm | api.ModeRegular, Umask: in.Umask,
		UID: in.Uid, GID: in.Gid, Time: f.now(), Exclusive: in.Flags&syscall.O_EXCL != 0, Open: true,
	}
	var e api.Entry
	if err := f.cfg.Meta.Do(o, req, &e); err != nil {
		return f.status("create", in.NodeId, err)
	}
	if e.Existed {
		return f.createExisting(o, in, &e.Attr, out)
	}
	h := f.cfg.Engine.OpenCreated(e.Attr, openFlags(in.Flags))
	f.entry(o, &out.EntryOut, &e.Attr)
	f.opened(&out.OpenOut, h, &e.Attr, in.Flags, true)
	return fuseconn.OK
}

// createExisting opens what Create found. The kernel does not check the
// permissions of what it believes to be new, so only what is plainly allowed is
// let through; for the rest ESTALE makes the kernel look again, and check.
func (f *FS) createExisting(o *op, in *fuseconn.CreateIn, a *api.Attr, out *fuseconn.CreateOut) fuseconn.Status {
	if !a.IsRegular() {
		f.dirOpens.release(f, a.Ino)
		return fuseconn.Status(syscall.ESTALE)
	}
	h, info, err := f.cfg.Engine.Open(o, a.Ino, openFlags(in.Flags))
	if err == nil && !ownerMayOpen(&info.Attr, in) {
		h.Release()
		return fuseconn.Status(syscall.ESTALE)
	}
	if err == nil && in.Flags&syscall.O_TRUNC != 0 {
		info.Attr, err = f.truncateAtOpen(o, h, a.Ino, in.OpenFlags)
	}
	if err != nil {
		return f.inodeStatus("create", in.NodeId, err)
	}
	f.entry(o, &out.EntryOut, &info.Attr)
	f.opened(&out.OpenOut, h, &info.Attr, in.Flags, info.KeepCache)
	return fuseconn.OK
}

// ownerMayOpen reports whether the caller is root, or the owner with the right
// that the owner's bits give, which no ACL changes.
func ownerMayOpen(a *api.Attr, in *fuseconn.CreateIn) bool {
	if in.Uid == 0 {
		return true
	}
	need := uint32(0o400)
	switch in.Flags & accessMode {
	case syscall.O_WRONLY:
		need = 0o200
	case syscall.O_RDWR:
		need = 0o600
	}
	return a.UID == in.Uid && a.Mode&need == need
}

// Tmpfile makes a file without a name (O_TMPFILE).
func (f *FS) Tmpfile(cancel <-chan struct{}, in *fuseconn.CreateIn, out *fuseconn.CreateOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	req := &api.Create{
		Parent: ids.Ino(in.NodeId), Mode: in.Mode&api.ModePerm | api.ModeRegular, Umask: in.Umask,
		UID: in.Uid, GID: in.Gid, Time: f.now(), Exclusive: true, Orphan: true, Open: true,
	}
	var e api.Entry
	if err := f.cfg.Meta.Do(o, req, &e); err != nil {
		return f.status("tmpfile", in.NodeId, err)
	}
	h := f.cfg.Engine.OpenCreated(e.Attr, openFlags(in.Flags))
	f.entry(o, &out.EntryOut, &e.Attr)
	f.opened(&out.OpenOut, h, &e.Attr, in.Flags, true)
	return fuseconn.OK
}

func openFlags(flags uint32) file.OpenFlags {
	return file.OpenFlags{Write: flags&accessMode != syscall.O_RDONLY}
}

// truncateAtOpen does what O_TRUNC asks; on an error it gives h back.
func (f *FS) truncateAtOpen(o *op, h File, ino ids.Ino, kernelFlags uint32) (api.Attr, error) {
	err := f.dropPrivileges(o, ino, kernelFlags&fuseconn.OpenKillPriv != 0)
	var a api.Attr
	if err == nil {
		a, err = f.cfg.Engine.Truncate(o, ino, 0)
	}
	if err != nil {
		h.Release()
		return a, fmt.Errorf("truncate at open: %w", err)
	}
	return a, nil
}
