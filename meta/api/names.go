package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Create makes an inode under a name; Entry answers. Mode holds type and
// permissions before the umask: the state machine applies Umask where the
// parent has no default ACL, inherits the group and the set-gid bit of a
// set-gid parent, and the layout of the nearest ancestor that has one.
type Create struct {
	Parent ids.Ino
	Name   []byte // empty for Orphan
	Mode   uint32
	Umask  uint32
	UID    uint32
	GID    uint32
	Rdev   uint32
	Target []byte // symbolic links
	Time   int64  // client's wall clock, becomes atime, mtime, btime
	// Exclusive refuses an existing name; without it an existing entry is
	// returned with Existed (open with O_CREAT).
	Exclusive bool
	Orphan    bool // O_TMPFILE: no name, link count 0
	// Open registers the inode as open by the session, as the Open query does,
	// before the reply is sent. Orphan implies it.
	Open bool
}

// Kind returns KindCreate.
func (*Create) Kind() Kind { return KindCreate }

// Code encodes or decodes the message.
func (m *Create) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Parent)
	c.Bytes(&m.Name)
	codec.VarInt(c, &m.Mode)
	codec.VarInt(c, &m.Umask)
	codec.VarInt(c, &m.UID)
	codec.VarInt(c, &m.GID)
	codec.VarInt(c, &m.Rdev)
	c.Bytes(&m.Target)
	c.I64(&m.Time)
	c.Bool(&m.Exclusive)
	c.Bool(&m.Orphan)
	c.Bool(&m.Open)
}

// Link gives an inode one more name; Entry answers.
type Link struct {
	Ino    ids.Ino
	Parent ids.Ino
	Name   []byte
}

// Kind returns KindLink.
func (*Link) Kind() Kind { return KindLink }

// Code encodes or decodes the message.
func (m *Link) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	codec.VarInt(c, &m.Parent)
	c.Bytes(&m.Name)
}

// Unlink removes a name; with Dir it is rmdir. Entry answers with the
// attributes that the inode has then (link count 0: an orphan).
type Unlink struct {
	Parent ids.Ino
	Name   []byte
	Dir    bool
	Time   int64 // client's wall clock: the parent's mtime
}

// Kind returns KindUnlink.
func (*Unlink) Kind() Kind { return KindUnlink }

// Code encodes or decodes the message.
func (m *Unlink) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Parent)
	c.Bytes(&m.Name)
	c.Bool(&m.Dir)
	c.I64(&m.Time)
}

// Flags of Rename, as renameat2(2) has them.
const (
	RenameNoReplace uint32 = 1
	RenameExchange  uint32 = 2
)

// Rename moves a name. Renamed answers.
type Rename struct {
	OldParent ids.Ino
	OldName   []byte
	NewParent ids.Ino
	NewName   []byte
	Flags     uint32
	Time      int64 // client's wall clock: the parents' mtime
}

// Kind returns KindRename.
func (*Rename) Kind() Kind { return KindRename }

// Code encodes or decodes the message.
func (m *Rename) Code(c *codec.Coder) {
	codec.VarInt(c, &m.OldParent)
	c.Bytes(&m.OldName)
	codec.VarInt(c, &m.NewParent)
	c.Bytes(&m.NewName)
	codec.VarInt(c, &m.Flags)
	c.I64(&m.Time)
}

// Renamed answers Rename.
type Renamed struct {
	Moved    Attr
	Replaced ids.Ino // the inode that lost the new name, or zero
}

// Code encodes or decodes the message.
func (m *Renamed) Code(c *codec.Coder) {
	m.Moved.Code(c)
	codec.VarInt(c, &m.Replaced)
}

// Lookup resolves a name; Entry answers. The names "." and ".." work too
// (by inode number, for file handles that survive a remount).
type Lookup struct {
	Parent ids.Ino
	Name   []byte
}

// Kind returns KindLookup.
func (*Lookup) Kind() Kind { return KindLookup }

// Code encodes or decodes the message.
func (m *Lookup) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Parent)
	c.Bytes(&m.Name)
}

// ReadDir lists a directory from behind Cookie, which is the hash of a name
// (63 bits; entries of equal hash always come in one reply); 0 starts. The
// names "." and ".." are not in it.
type ReadDir struct {
	Ino    ids.Ino
	Cookie uint64
	Max    uint32 // entries wanted, at least 1
	Plus   bool   // with attributes
}

// Kind returns KindReadDir.
func (*ReadDir) Kind() Kind { return KindReadDir }

// Code encodes or decodes the message.
func (m *ReadDir) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	codec.VarInt(c, &m.Cookie)
	codec.VarInt(c, &m.Max)
	c.Bool(&m.Plus)
}

// DirEntry is one name of a directory.
type DirEntry struct {
	Name   []byte
	Ino    ids.Ino
	Mode   uint32 // type bits
	Cookie uint64 // pass to ReadDir to go on behind this entry
	Attr   *Attr  // with Plus
}

// Listing answers ReadDir.
type Listing struct {
	Entries []DirEntry
	EOF     bool
	Change  uint64 // the directory's change counter
}

// Code encodes or decodes the message.
func (m *Listing) Code(c *codec.Coder) {
	codec.Slice(c, &m.Entries, func(c *codec.Coder, e *DirEntry) {
		c.Bytes(&e.Name)
		codec.VarInt(c, &e.Ino)
		codec.VarInt(c, &e.Mode)
		codec.VarInt(c, &e.Cookie)
		has := e.Attr != nil
		c.Bool(&has)
		if has {
			if c.Reading() {
				e.Attr = new(Attr)
			}
			e.Attr.Code(c)
		}
	})
	c.Bool(&m.EOF)
	codec.VarInt(c, &m.Change)
}

// inoRequest is the body of queries that name only an inode.
type inoRequest struct{ Ino ids.Ino }

// Code encodes or decodes the message.
func (m *inoRequest) Code(c *codec.Coder) { codec.VarInt(c, &m.Ino) }

// GetAttr asks for an inode's attributes; Entry answers.
type GetAttr struct{ Ino ids.Ino }

// Kind returns KindGetAttr.
func (*GetAttr) Kind() Kind { return KindGetAttr }

// Code encodes or decodes the message.
func (m *GetAttr) Code(c *codec.Coder) { (*inoRequest)(m).Code(c) }

// Readlink asks for a symbolic link's target; Bytes answers.
type Readlink struct{ Ino ids.Ino }

// Kind returns KindReadlink.
func (*Readlink) Kind() Kind { return KindReadlink }

// Code encodes or decodes the message.
func (m *Readlink) Code(c *codec.Coder) { (*inoRequest)(m).Code(c) }

// Bytes is a reply of one byte string.
type Bytes struct{ Value []byte }

// Code encodes or decodes the message.
func (m *Bytes) Code(c *codec.Coder) { c.Bytes(&m.Value) }
