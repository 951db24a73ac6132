package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Which fields of SetAttr count.
const (
	SetMode uint8 = 1 << iota
	SetUID
	SetGID
	SetAtime
	SetMtime
	SetKillPriv // clear set-uid, and set-gid where the group may execute
)

// SetAttr changes attributes other than the size (that is a Commit); Entry
// answers. Changing the owner of a regular file clears its set-id bits.
type SetAttr struct {
	Ino   ids.Ino
	Valid uint8
	Mode  uint32
	UID   uint32
	GID   uint32
	Atime int64
	Mtime int64
}

// Kind returns KindSetAttr.
func (*SetAttr) Kind() Kind { return KindSetAttr }

// Code encodes or decodes the message.
func (m *SetAttr) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.U8(&m.Valid)
	codec.VarInt(c, &m.Mode)
	codec.VarInt(c, &m.UID)
	codec.VarInt(c, &m.GID)
	c.I64(&m.Atime)
	c.I64(&m.Mtime)
}

// Flags of SetXattr.
const (
	XattrCreate   uint8 = 1 // fail when it exists
	XattrReplace  uint8 = 2 // fail when it does not
	XattrKillSgid uint8 = 4 // an ACL was set by one who is not in the group
)

// SetXattr sets an extended attribute; Entry answers.
type SetXattr struct {
	Ino   ids.Ino
	Name  []byte
	Value []byte
	Flags uint8
}

// Kind returns KindSetXattr.
func (*SetXattr) Kind() Kind { return KindSetXattr }

// Code encodes or decodes the message.
func (m *SetXattr) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.Bytes(&m.Name)
	c.Bytes(&m.Value)
	c.U8(&m.Flags)
}

// RemoveXattr removes an extended attribute; Entry answers.
type RemoveXattr struct {
	Ino  ids.Ino
	Name []byte
}

// Kind returns KindRemoveXattr.
func (*RemoveXattr) Kind() Kind { return KindRemoveXattr }

// Code encodes or decodes the message.
func (m *RemoveXattr) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.Bytes(&m.Name)
}

// GetXattr reads an extended attribute; Bytes answers.
type GetXattr struct {
	Ino  ids.Ino
	Name []byte
}

// Kind returns KindGetXattr.
func (*GetXattr) Kind() Kind { return KindGetXattr }

// Code encodes or decodes the message.
func (m *GetXattr) Code(c *codec.Coder) { (*RemoveXattr)(m).Code(c) }

// ListXattr names all extended attributes; Names answers.
type ListXattr struct{ Ino ids.Ino }

// Kind returns KindListXattr.
func (*ListXattr) Kind() Kind { return KindListXattr }

// Code encodes or decodes the message.
func (m *ListXattr) Code(c *codec.Coder) { (*inoRequest)(m).Code(c) }

// Names answers ListXattr.
type Names struct{ Names [][]byte }

// Code encodes or decodes the message.
func (m *Names) Code(c *codec.Coder) {
	codec.Slice(c, &m.Names, func(c *codec.Coder, n *[]byte) { c.Bytes(n) })
}

// SetLayout gives a directory a layout for files created below it from now on;
// the zero layout makes it inherit again. Entry answers.
type SetLayout struct {
	Ino    ids.Ino
	Layout ids.Layout
}

// Kind returns KindSetLayout.
func (*SetLayout) Kind() Kind { return KindSetLayout }

// Code encodes or decodes the message.
func (m *SetLayout) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.Layout(&m.Layout)
}

// GetLayout asks for a directory's or file's layout; LayoutOf answers.
type GetLayout struct{ Ino ids.Ino }

// Kind returns KindGetLayout.
func (*GetLayout) Kind() Kind { return KindGetLayout }

// Code encodes or decodes the message.
func (m *GetLayout) Code(c *codec.Coder) { (*inoRequest)(m).Code(c) }

// LayoutOf answers GetLayout.
type LayoutOf struct {
	Own       ids.Layout // none when inherited
	Effective ids.Layout
	From      ids.Ino // the directory that it comes from
}

// Code encodes or decodes the message.
func (m *LayoutOf) Code(c *codec.Coder) {
	c.Layout(&m.Own)
	c.Layout(&m.Effective)
	codec.VarInt(c, &m.From)
}

// LockSpace separates the three families of lock, which do not see each other.
type LockSpace uint8

// The lock spaces. POSIX locks and open-file-description locks conflict with
// each other; flock is on its own.
const (
	LockFlock LockSpace = iota
	LockPOSIX
	LockOFD
)

// LockType is shared, exclusive or none.
type LockType uint8

// The lock types.
const (
	Unlock LockType = iota
	ReadLock
	WriteLock
)

// Lock takes, changes or releases a byte-range lock for (session, Owner). It
// answers Empty, or WouldBlock. With Wait the leader holds the request until
// it can be granted, proposing again each time a lock goes; Wait is not part
// of what the state machine decides on.
type Lock struct {
	Ino   ids.Ino
	Space LockSpace
	Type  LockType
	Owner uint64
	PID   uint32
	Start uint64
	End   uint64 // inclusive; 1<<63−1 for "to the end"
	Wait  bool
}

// Kind returns KindLock.
func (*Lock) Kind() Kind { return KindLock }

// Code encodes or decodes the message.
func (m *Lock) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	codec.VarInt(c, &m.Space)
	codec.VarInt(c, &m.Type)
	codec.VarInt(c, &m.Owner)
	codec.VarInt(c, &m.PID)
	codec.VarInt(c, &m.Start)
	codec.VarInt(c, &m.End)
	c.Bool(&m.Wait)
}

// TestLock asks which lock would conflict; LockInfo answers.
type TestLock Lock

// Kind returns KindTestLock.
func (*TestLock) Kind() Kind { return KindTestLock }

// Code encodes or decodes the message.
func (m *TestLock) Code(c *codec.Coder) { (*Lock)(m).Code(c) }

// LockInfo answers TestLock: Type Unlock means that nothing conflicts.
type LockInfo struct {
	Type    LockType
	Start   uint64
	End     uint64
	PID     uint32
	Session ids.Session // whose lock it is: PID means something on that mount only
}

// Code encodes or decodes the message.
func (m *LockInfo) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Type)
	codec.VarInt(c, &m.Start)
	codec.VarInt(c, &m.End)
	codec.VarInt(c, &m.PID)
	codec.VarInt(c, &m.Session)
}
