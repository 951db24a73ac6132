package meta

import (
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// delta codes a signed number close to base in few bytes.
func delta(c *codec.Coder, v *int64, base int64) {
	d := *v - base
	u := uint64(d)<<1 ^ uint64(d>>63)
	c.Var(&u)
	if c.Reading() {
		*v = base + (int64(u>>1) ^ -int64(u&1))
	}
}

// clip hides the extents at or behind Off that are older than map version
// Version, until they are freed (data-path rule 13).
type clip struct{ Off, Version uint64 }

// Optional parts of an inode record.
const (
	inodeRdev = 1 << iota
	inodeClips
	inodeInline
	inodeSnap
	inodeXattrs
	inodeLayout
)

// inode is the record of spaceInode. Parent is, for a file, its home: the
// directory that it is charged to; zero for an orphan.
type inode struct {
	api.Attr
	Birth         ids.Epoch
	LastSnap, Pin ids.Epoch
	XattrBytes    uint32 // names of all extended attributes, one byte more for each
	Clips         []clip
	Inline        []byte // the whole content, or a symbolic link's target
}

// Code encodes or decodes the record.
func (n *inode) Code(c *codec.Coder) {
	shape := n.shape()
	c.U8(&shape)
	codec.VarInt(c, &n.Mode)
	codec.VarInt(c, &n.Nlink)
	codec.VarInt(c, &n.UID)
	codec.VarInt(c, &n.GID)
	c.U8(&n.Flags)
	codec.VarInt(c, &n.Size)
	codec.VarInt(c, &n.Stored)
	c.I64(&n.Btime)
	delta(c, &n.Atime, n.Btime)
	delta(c, &n.Mtime, n.Btime)
	delta(c, &n.Ctime, n.Mtime)
	codec.VarInt(c, &n.Change)
	codec.VarInt(c, &n.Generation)
	codec.VarInt(c, &n.MapVersion)
	codec.VarInt(c, &n.Parent)
	codec.VarInt(c, &n.Birth)
	n.optional(c, shape)
}

func (n *inode) shape() uint8 {
	var shape uint8
	for i, has := range [...]bool{
		n.Rdev != 0, len(n.Clips) > 0, len(n.Inline) > 0, n.LastSnap|n.Pin != 0, n.XattrBytes != 0, !n.Layout.IsZero(),
	} {
		if has {
			shape |= 1 << i
		}
	}
	return shape
}

func (n *inode) optional(c *codec.Coder, shape uint8) {
	if shape&inodeRdev != 0 {
		codec.VarInt(c, &n.Rdev)
	}
	if shape&inodeClips != 0 {
		codec.Slice(c, &n.Clips, func(c *codec.Coder, v *clip) {
			codec.VarInt(c, &v.Off)
			codec.VarInt(c, &v.Version)
		})
	}
	if shape&inodeInline != 0 {
		c.Bytes(&n.Inline)
	}
	if shape&inodeSnap != 0 {
		codec.VarInt(c, &n.LastSnap)
		codec.VarInt(c, &n.Pin)
	}
	if shape&inodeXattrs != 0 {
		codec.VarInt(c, &n.XattrBytes)
	}
	if shape&inodeLayout != 0 {
		c.Layout(&n.Layout)
	}
	if c.Reading() && c.Err() == nil && n.shape() != shape {
		c.Fail("inode of shape %d has shape %d", shape, n.shape())
	}
}

// dirent is the record of spaceName.
type dirent struct {
	Ino   ids.Ino
	Type  uint8 // mode >> 12
	Birth ids.Epoch
}

// Code encodes or decodes the record.
func (d *dirent) Code(c *codec.Coder) {
	codec.VarInt(c, &d.Ino)
	c.U8(&d.Type)
	codec.VarInt(c, &d.Birth)
}

// xattr is the record of spaceXattr.
type xattr struct {
	Birth ids.Epoch
	Value []byte
}

// Code encodes or decodes the record.
func (x *xattr) Code(c *codec.Coder) {
	codec.VarInt(c, &x.Birth)
	c.Bytes(&x.Value)
}

// extent is the record of spaceExtent; Off is in the key.
type extent struct {
	ids.Extent
	Version uint64 // the file's map version at which it was placed
	Birth   ids.Epoch
}

// Code encodes or decodes the record.
func (e *extent) Code(c *codec.Coder) {
	codec.U8As(c, &e.Kind)
	codec.VarInt(c, &e.Version)
	codec.VarInt(c, &e.Birth)
	switch e.Kind {
	case ids.ExtentBlock:
		codec.VarInt(c, &e.Len)
		c.BlockID(&e.Block)
		codec.VarInt(c, &e.BlockOff)
	case ids.ExtentInline:
		c.Bytes(&e.Data)
		e.Len = uint64(len(e.Data))
	default:
		c.Fail("extent kind %d", e.Kind)
	}
	if e.Len == 0 {
		c.Fail("extent of no bytes")
	}
}

// holder is one file that refers to a block, with the bytes that its extents
// cover.
type holder struct {
	Ino  ids.Ino
	Live uint64
}

// Optional parts of a block record.
const (
	blockCoded = 1 << iota
	blockPins
)

// block is the record of spaceBlock; the id is in the key.
type block struct {
	ids.Block
	Birth   ids.Epoch
	Pins    uint64   // snapshots' references; zero until there are snapshots
	Holders []holder // ordered by inode
}

// Code encodes or decodes the record.
func (b *block) Code(c *codec.Coder) {
	var shape uint8
	if b.Codec != ids.CodecNone || b.Logical != b.Length || len(b.Frames) > 0 {
		shape |= blockCoded
	}
	if b.Pins != 0 {
		shape |= blockPins
	}
	c.U8(&shape)
	c.Layout(&b.Layout)
	if b.Layout.IsZero() {
		c.Fail("block without a layout")
	}
	codec.VarInt(c, &b.Length)
	if shape&blockCoded != 0 {
		codec.VarInt(c, &b.Logical)
		codec.U8As(c, &b.Codec)
		codec.Slice(c, &b.Frames, func(c *codec.Coder, f *ids.Frame) {
			codec.VarInt(c, &f.Logical)
			codec.VarInt(c, &f.Stored)
			c.U64(&f.Sum)
		})
	} else if c.Reading() {
		b.Logical = b.Length
	}
	c.U8(&b.Granule)
	if c.Reading() && c.Err() == nil {
		b.Disks = make([]ids.DiskID, b.Layout.Width())
		b.Digests = make([]uint64, b.Layout.Width())
	}
	for i := range b.Disks {
		codec.VarInt(c, &b.Disks[i])
	}
	for i := range b.Digests {
		c.U64(&b.Digests[i])
	}
	codec.VarInt(c, &b.Version)
	codec.VarInt(c, &b.Birth)
	if shape&blockPins != 0 {
		codec.VarInt(c, &b.Pins)
	}
	codec.Slice(c, &b.Holders, func(c *codec.Coder, h *holder) {
		codec.VarInt(c, &h.Ino)
		codec.VarInt(c, &h.Live)
	})
}

// live is the number of bytes that extents cover.
func (b *block) live() uint64 {
	var n uint64
	for _, h := range b.Holders {
		n += h.Live
	}
	return n
}

// sum is the record of spaceSum: what lies below a directory, itself not counted.
type sum struct{ Bytes, Inodes, Dirs uint64 }

// Code encodes or decodes the record.
func (s *sum) Code(c *codec.Coder) {
	codec.VarInt(c, &s.Bytes)
	codec.VarInt(c, &s.Inodes)
	codec.VarInt(c, &s.Dirs)
}

// number is a record that is one number.
type number uint64

// Code encodes or decodes the record.
func (n *number) Code(c *codec.Coder) { codec.VarInt(c, n) }

// repair is the record of spaceRepair.
type repair struct {
	Disk   ids.DiskID // that holds the damaged or misplaced chunk; zero: missing
	Since  int64
	Reason string
}

// Code encodes or decodes the record.
func (r *repair) Code(c *codec.Coder) {
	codec.VarInt(c, &r.Disk)
	c.I64(&r.Since)
	c.String(&r.Reason)
}

// lock is one granted lock.
type lock struct {
	Space      api.LockSpace
	Type       api.LockType
	Session    ids.Session
	Owner      uint64
	PID        uint32
	Start, End uint64
}

// locks is the record of spaceLock, in the order of lockOrder.
type locks struct{ List []lock }

// Code encodes or decodes the record.
func (l *locks) Code(c *codec.Coder) {
	codec.Slice(c, &l.List, func(c *codec.Coder, v *lock) {
		codec.U8As(c, &v.Space)
		codec.U8As(c, &v.Type)
		codec.VarInt(c, &v.Session)
		codec.VarInt(c, &v.Owner)
		codec.VarInt(c, &v.PID)
		codec.VarInt(c, &v.Start)
		codec.VarInt(c, &v.End)
	})
}

// session is the record of spaceSession.
type session struct {
	State   SessionState
	Name    string
	Host    string
	Secret  ids.UUID
	Floor   uint64 // lowest block counter that it may still commit
	Created int64
}

// Code encodes or decodes the record.
func (s *session) Code(c *codec.Coder) {
	codec.U8As(c, &s.State)
	c.String(&s.Name)
	c.String(&s.Host)
	c.UUID(&s.Secret)
	codec.VarInt(c, &s.Floor)
	c.I64(&s.Created)
}

// window is the record of spaceWindow: the last answer given in a place.
type window struct {
	Seq   uint64
	Reply []byte
}

// Code encodes or decodes the record.
func (w *window) Code(c *codec.Coder) {
	codec.VarInt(c, &w.Seq)
	c.Bytes(&w.Reply)
}

// server is the record of spaceServer.
type server struct {
	UUID             ids.UUID
	Addr, Host, Rack string
}

// Code encodes or decodes the record.
func (s *server) Code(c *codec.Coder) {
	c.UUID(&s.UUID)
	c.String(&s.Addr)
	c.String(&s.Host)
	c.String(&s.Rack)
}

// disk is the record of spaceDisk. Host repeats the server's, so that the
// domains of a block are found without reading the servers.
type disk struct {
	UUID           ids.UUID
	Server         ids.ServerID
	Host           string
	State          cluster.DiskState
	Capacity, Free uint64
}

// Code encodes or decodes the record.
func (d *disk) Code(c *codec.Coder) {
	c.UUID(&d.UUID)
	codec.VarInt(c, &d.Server)
	c.String(&d.Host)
	codec.U8As(c, &d.State)
	codec.VarInt(c, &d.Capacity)
	codec.VarInt(c, &d.Free)
}

// identity is the record of keyCluster.
type identity struct {
	Cluster     ids.UUID
	Incarnation ids.Incarnation
	Epoch       ids.Epoch // raised by snapshots only; starts at 1
	NewestSnap  ids.Epoch // zero: no snapshot
	Feature     uint32
	Layout      ids.Layout // the root directory's at founding
	Hosts       uint32     // distinct hosts of registered servers
	MapVersion  uint64     // of the cluster map
}

// Code encodes or decodes the record.
func (i *identity) Code(c *codec.Coder) {
	c.UUID(&i.Cluster)
	codec.VarInt(c, &i.Incarnation)
	codec.VarInt(c, &i.Epoch)
	codec.VarInt(c, &i.NewestSnap)
	codec.VarInt(c, &i.Feature)
	c.Layout(&i.Layout)
	codec.VarInt(c, &i.Hosts)
	codec.VarInt(c, &i.MapVersion)
}

// alloc is the record of keyAlloc: the last ids given.
type alloc struct {
	Session ids.Session
	Server  ids.ServerID
	Disk    ids.DiskID
	Slot    ids.Slot // the last directory's
}

// Code encodes or decodes the record.
func (a *alloc) Code(c *codec.Coder) {
	codec.VarInt(c, &a.Session)
	codec.VarInt(c, &a.Server)
	codec.VarInt(c, &a.Disk)
	codec.VarInt(c, &a.Slot)
}

// Counts are the numbers of records that Status shows.
type Counts struct {
	Sessions uint64 // not ended
	Orphans  uint64
	Dead     uint64 // chunks that wait to be deleted
	Repairs  uint64 // chunks that wait to be made anew
	Blocks   uint64
	Freeing  uint64 // entries of the queue of things to free
}

// Code encodes or decodes the record.
func (n *Counts) Code(c *codec.Coder) {
	codec.VarInt(c, &n.Sessions)
	codec.VarInt(c, &n.Orphans)
	codec.VarInt(c, &n.Dead)
	codec.VarInt(c, &n.Repairs)
	codec.VarInt(c, &n.Blocks)
	codec.VarInt(c, &n.Freeing)
}
