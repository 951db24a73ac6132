// Package api is the vocabulary of the metadata service: requests, replies and
// the values in them, with their encoding. Clients, the server and the state
// machine share it. Mutations are encoded once, by the client: the bytes that
// travel are the bytes in the log. See docs/protocol.md.
package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// File type bits and the mode bits that the state machine must know; the
// values are those of Linux's stat(2), and part of the format.
const (
	ModeType    = 0o170000
	ModeDir     = 0o040000
	ModeRegular = 0o100000
	ModeSymlink = 0o120000
	ModeFIFO    = 0o010000
	ModeSocket  = 0o140000
	ModeChar    = 0o020000
	ModeBlock   = 0o060000
	ModeSetuid  = 0o4000
	ModeSetgid  = 0o2000
	ModeSticky  = 0o1000
	ModePerm    = 0o7777
)

// Limits of the name space.
const (
	MaxName       = 255  // bytes
	MaxTarget     = 4095 // bytes of a symbolic link
	MaxInline     = 4096 // a file up to this size lives in its inode
	MaxXattrName  = 255  // bytes, prefix included
	MaxXattrValue = 64 << 10
	MaxOps        = 500     // operations in one commit
	MaxCommit     = 1 << 20 // encoded bytes of one commit
	MaxRecords    = 4096    // records that one command may touch
	MaxFileSize   = 1<<63 - 1
	MaxLinks      = 65000
	Places        = 128 // places in a session's window
)

// Attribute flags.
const (
	FlagXattrs uint8 = 1 << iota // has extended attributes
	FlagACL                      // has a POSIX ACL
	FlagCaps                     // has security.capability
)

// Attr is what stat shows of an inode, and a little more. Times are
// nanoseconds since 1970.
type Attr struct {
	Ino        ids.Ino
	Mode       uint32 // type and permissions
	Nlink      uint32
	UID, GID   uint32
	Rdev       uint32
	Flags      uint8
	Layout     ids.Layout // regular file: of new blocks; directory: its own, or none
	Size       uint64
	Stored     uint64 // bytes that extents cover, before redundancy
	Atime      int64
	Mtime      int64
	Ctime      int64
	Btime      int64
	Change     uint64  // raised by every change; validates caches
	Generation uint64  // content generation; raised by truncation to zero
	MapVersion uint64  // raised by every change of the extent map
	Parent     ids.Ino // directories: the parent; else zero
}

// IsDir reports whether the inode is a directory.
func (a *Attr) IsDir() bool { return a.Mode&ModeType == ModeDir }

// IsRegular reports whether the inode is a regular file.
func (a *Attr) IsRegular() bool { return a.Mode&ModeType == ModeRegular }

// Code encodes or decodes the attributes.
func (a *Attr) Code(c *codec.Coder) {
	codec.VarInt(c, &a.Ino)
	codec.VarInt(c, &a.Mode)
	codec.VarInt(c, &a.Nlink)
	codec.VarInt(c, &a.UID)
	codec.VarInt(c, &a.GID)
	codec.VarInt(c, &a.Rdev)
	c.U8(&a.Flags)
	c.Layout(&a.Layout)
	codec.VarInt(c, &a.Size)
	codec.VarInt(c, &a.Stored)
	c.I64(&a.Atime)
	c.I64(&a.Mtime)
	c.I64(&a.Ctime)
	c.I64(&a.Btime)
	codec.VarInt(c, &a.Change)
	codec.VarInt(c, &a.Generation)
	codec.VarInt(c, &a.MapVersion)
	codec.VarInt(c, &a.Parent)
}
