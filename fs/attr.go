package fs

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// generation goes with every node id: numbers are never reused, so it is one.
const generation = 1

// split divides nanoseconds since 1970, which may be negative, as stat does.
func split(ns int64) (sec uint64, nsec uint32) {
	s, n := ns/int64(time.Second), ns%int64(time.Second)
	if n < 0 {
		s, n = s-1, n+int64(time.Second)
	}
	return uint64(s), uint32(n)
}

func join(sec uint64, nsec uint32) int64 { return int64(sec)*int64(time.Second) + int64(nsec) }

// fill writes attributes that were overlaid.
func (f *FS) fill(out *fuseconn.Attr, a *api.Attr) {
	out.Ino = uint64(a.Ino)
	out.Size = a.Size
	out.Blocks = (a.Stored + 511) / 512
	out.Atime, out.Atimensec = split(a.Atime)
	out.Mtime, out.Mtimensec = split(a.Mtime)
	out.Ctime, out.Ctimensec = split(a.Ctime)
	out.Mode = a.Mode
	out.Nlink = a.Nlink
	out.Uid, out.Gid = a.UID, a.GID
	out.Rdev = a.Rdev
	out.Blksize = f.cfg.BlockSize
}

// overlay makes attributes from the metadata service what this mount knows.
func (f *FS) overlay(a *api.Attr) {
	f.cfg.Engine.Overlay(a)
	f.atimes.overlay(a)
}

// validity is how long the kernel may use what it is told by an operation:
// never longer than the lease that covered all of it, and never long, because a
// recall waits until the kernel has forgotten (data-path rule 28). Nil is an
// answer of unknown age.
func (f *FS) validity(o *op) time.Duration {
	if o == nil || o.lease == 0 || f.cfg.KernelTimeout <= 0 {
		return 0
	}
	return f.cfg.Leases.Lend(o.lease, f.cfg.KernelTimeout)
}

// entry answers with a name's inode and gives the kernel one more reference.
func (f *FS) entry(o *op, out *fuseconn.EntryOut, a *api.Attr) {
	f.overlay(a)
	f.nodes.see(a, true)
	out.NodeId = uint64(a.Ino)
	out.Generation = generation
	valid := f.validity(o)
	out.SetEntryTimeout(valid)
	out.SetAttrTimeout(valid)
	f.fill(&out.Attr, a)
}

// attr answers with attributes.
func (f *FS) attr(o *op, out *fuseconn.AttrOut, a *api.Attr) {
	f.overlay(a)
	f.nodes.see(a, false)
	out.SetTimeout(f.validity(o))
	f.fill(&out.Attr, a)
}

// Lookup resolves a name. The names "." and ".." come with file handles that
// outlive the kernel's cache or the mount.
func (f *FS) Lookup(cancel <-chan struct{}, in *fuseconn.InHeader, name string, out *fuseconn.EntryOut) fuseconn.Status {
	if len(name) > api.MaxName {
		return fuseconn.Status(syscall.ENAMETOOLONG)
	}
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	if err := f.cfg.Meta.Do(o, &api.Lookup{Parent: ids.Ino(in.NodeId), Name: []byte(name)}, &e); err != nil {
		return f.status("lookup", in.NodeId, err)
	}
	f.entry(o, out, &e.Attr)
	return fuseconn.OK
}

// Forget takes references of the kernel away.
func (f *FS) Forget(nodeid, nlookup uint64) { f.nodes.forget(ids.Ino(nodeid), nlookup) }

// GetAttr answers stat.
func (f *FS) GetAttr(cancel <-chan struct{}, in *fuseconn.GetAttrIn, out *fuseconn.AttrOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	if err := f.cfg.Meta.Do(o, &api.GetAttr{Ino: ids.Ino(in.NodeId)}, &e); err != nil {
		return f.inodeStatus("getattr", in.NodeId, err)
	}
	f.attr(o, out, &e.Attr)
	return fuseconn.OK
}

// Statx answers statx(2) when it asks for more than stat does: the birth time.
func (f *FS) Statx(cancel <-chan struct{}, in *fuseconn.StatxIn, out *fuseconn.StatxOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	var e api.Entry
	if err := f.cfg.Meta.Do(o, &api.GetAttr{Ino: ids.Ino(in.NodeId)}, &e); err != nil {
		return f.inodeStatus("statx", in.NodeId, err)
	}
	a := &e.Attr
	f.overlay(a)
	f.nodes.see(a, false)
	out.SetTimeout(f.validity(o))
	out.Mask = unix.STATX_BASIC_STATS | unix.STATX_BTIME
	out.Blksize = f.cfg.BlockSize
	out.Nlink = a.Nlink
	out.Uid, out.Gid = a.UID, a.GID
	out.Mode = uint16(a.Mode)
	out.Ino = uint64(a.Ino)
	out.Size = a.Size
	out.Blocks = (a.Stored + 511) / 512
	out.RdevMajor, out.RdevMinor = unix.Major(uint64(a.Rdev)), unix.Minor(uint64(a.Rdev))
	out.Atime.Sec, out.Atime.Nsec = split(a.Atime)
	out.Btime.Sec, out.Btime.Nsec = split(a.Btime)
	out.Ctime.Sec, out.Ctime.Nsec = split(a.Ctime)
	out.Mtime.Sec, out.Mtime.Nsec = split(a.Mtime)
	return fuseconn.OK
}

// SetAttr changes the size, then everything else.
func (f *FS) SetAttr(cancel <-chan struct{}, in *fuseconn.SetAttrIn, out *fuseconn.AttrOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	ino := ids.Ino(in.NodeId)
	var e api.Entry
	var err error
	have := false
	if in.Valid&fuseconn.SetSize != 0 {
		if in.Size > api.MaxFileSize {
			return fuseconn.Status(syscall.EFBIG)
		}
		err = f.dropPrivileges(o, ino, in.Valid&fuseconn.SetKillPriv != 0)
		if err == nil {
			e.Attr, err = f.cfg.Engine.Truncate(o, ino, int64(in.Size))
			have = true
		}
	}
	if req := f.setAttr(in); err == nil && req.Valid != 0 {
		err = f.settle(o, req)
		if err == nil {
			err = f.cfg.Meta.Do(o, req, &e)
			have = true
		}
		if err == nil && req.Valid&api.SetAtime != 0 {
			f.atimes.drop(ino)
		}
	}
	if err == nil && !have {
		err = f.cfg.Meta.Do(o, &api.GetAttr{Ino: ino}, &e)
	}
	if err != nil {
		return f.inodeStatus("setattr", in.NodeId, err)
	}
	f.attr(o, out, &e.Attr)
	return fuseconn.OK
}

// setAttr is what the request asks of the metadata service.
func (f *FS) setAttr(in *fuseconn.SetAttrIn) *api.SetAttr {
	req := &api.SetAttr{Ino: ids.Ino(in.NodeId)}
	if in.Valid&fuseconn.SetMode != 0 {
		req.Valid |= api.SetMode
		req.Mode = in.Mode & api.ModePerm
	}
	if in.Valid&fuseconn.SetUID != 0 {
		req.Valid |= api.SetUID
		req.UID = in.Uid
	}
	if in.Valid&fuseconn.SetGID != 0 {
		req.Valid |= api.SetGID
		req.GID = in.Gid
	}
	if in.Valid&fuseconn.SetAtime != 0 {
		req.Valid |= api.SetAtime
		req.Atime = join(in.Atime, in.Atimensec)
		if in.Valid&fuseconn.SetAtimeNow != 0 {
			req.Atime = f.now()
		}
	}
	if in.Valid&fuseconn.SetMtime != 0 {
		req.Valid |= api.SetMtime
		req.Mtime = join(in.Mtime, in.Mtimensec)
		if in.Valid&fuseconn.SetMtimeNow != 0 {
			req.Mtime = f.now()
		}
	}
	return req
}

// settle commits what was written before a change that must come after it: the
// time of an uncommitted write would overwrite a time that is set now, and the
// clearing of set-id bits one that is given now.
func (f *FS) settle(o *op, req *api.SetAttr) error {
	if req.Valid&api.SetMtime == 0 && (req.Valid&api.SetMode == 0 || req.Mode&(api.ModeSetuid|api.ModeSetgid) == 0) {
		return nil
	}
	return f.cfg.Engine.FlushIno(o, req.Ino)
}

// dropPrivileges clears security.capability, and with setID the set-id bits,
// where the inode has any.
func (f *FS) dropPrivileges(o *op, ino ids.Ino, setID bool) error {
	bits := f.nodes.bits(ino)
	if setID && bits&nodeSetID != 0 {
		var e api.Entry
		if err := f.cfg.Meta.Do(o, &api.SetAttr{Ino: ino, Valid: api.SetKillPriv}, &e); err != nil {
			return err
		}
		f.nodes.see(&e.Attr, false)
	}
	if bits&nodeCaps == 0 {
		return nil
	}
	var e api.Entry
	err := f.cfg.Meta.Do(o, &api.RemoveXattr{Ino: ino, Name: []byte(xattrCaps)}, &e)
	if errors.Is(err, errkind.NoAttr) {
		return nil
	}
	if err == nil {
		f.nodes.see(&e.Attr, false)
	}
	return err
}

// Access is never asked: the kernel checks permissions.
func (f *FS) Access(<-chan struct{}, *fuseconn.AccessIn) fuseconn.Status {
	return fuseconn.Status(syscall.ENOSYS)
}

// StatFs answers with usable bytes: what is free on the disks, less the share
// that redundancy takes in the root's layout.
func (f *FS) StatFs(cancel <-chan struct{}, in *fuseconn.InHeader, out *fuseconn.StatfsOut) fuseconn.Status {
	o := f.begin(cancel)
	defer o.end()
	var t api.Totals
	if err := f.cfg.Meta.Do(o, &api.StatFS{}, &t); err != nil {
		return f.status("statfs", in.NodeId, err)
	}
	const unit = 4096
	usable := func(raw uint64) uint64 {
		blocks := raw / unit
		if w := uint64(t.Layout.Width()); w > 0 {
			blocks = blocks / w * uint64(t.Layout.K)
		}
		return blocks
	}
	out.Bsize, out.Frsize = unit, unit
	out.Blocks = usable(t.Capacity)
	out.Bfree = min(usable(t.Free), out.Blocks)
	out.Bavail = out.Bfree
	out.Ffree = ids.MaxInoCounter - t.Inodes
	out.Files = ids.MaxInoCounter
	out.NameLen = api.MaxName
	return fuseconn.OK
}
