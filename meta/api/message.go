package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Version is the highest version of the metadata protocol that this code speaks.
const Version = 1

// Kind names a request. Part of the protocol and of the log: only ever append.
type Kind uint16

// Mutations go through the log.
const (
	KindFound Kind = iota + 1
	KindCreateSession
	KindSuspectSessions
	KindEndSessions
	KindCreate
	KindLink
	KindUnlink
	KindRename
	KindSetAttr
	KindSetXattr
	KindRemoveXattr
	KindCommit
	KindSetLayout
	KindLock
	KindReap
	KindFreeStep
	KindChunksFreed
	KindPlaceChunk
	KindQueueRepair
	KindRegisterServer
	KindUpdateDisks
	KindSetFeature
	lastMutation
)

// Queries are answered from the state, or from the leader's memory.
const (
	KindLookup Kind = iota + 256
	KindGetAttr
	KindReadDir
	KindOpen
	KindRelease
	KindGetMap
	KindGetBlocks
	KindReadlink
	KindGetXattr
	KindListXattr
	KindStatFS
	KindGetCluster
	KindTestLock
	KindGetLayout
	KindStatus
	KindRenew
	KindHeartbeat
	KindVerdicts
	KindCancel
	KindLease
	lastQuery
)

// Pushes are sent by the server on its own.
const (
	PushClusterChanged Kind = iota + 512
	PushSessionEnded
	PushRecall
)

// Mutation reports whether requests of the kind go through the log.
func (k Kind) Mutation() bool { return k > 0 && k < lastMutation }

// ChangesTree reports whether requests of the kind may change what Lookup or
// GetAttr answer: what leases are there for.
func (k Kind) ChangesTree() bool {
	switch k {
	case KindCreate, KindLink, KindUnlink, KindRename, KindSetAttr, KindSetXattr, KindRemoveXattr, KindCommit, KindSetLayout:
		return true
	}
	return false
}

// Request is a message that a client sends.
type Request interface {
	codec.Message
	Kind() Kind
}

// Header precedes every request. For a mutation, header and body are the log
// entry; Time is filled in by the leader in place.
type Header struct {
	Version uint8 // of the protocol
	Kind    Kind
	// Time is the leader's clock in ns since 1970, never going back; zero from clients.
	Time    int64
	Slot    ids.Slot
	Session ids.Session
	// Place and Seq make a mutation idempotent: the state keeps the last Seq
	// and reply of each of the session's Places. Seq starts at 1; 0 means "not
	// from a session window" (leader's own commands).
	Place uint8
	Seq   uint64
	Epoch ids.Epoch // highest snapshot epoch that the client has seen
}

// TimeOffset is where Time lies in an encoded header, 8 bytes little-endian,
// so that the leader can stamp a command without decoding it.
const TimeOffset = 3

// Code encodes or decodes the header.
func (h *Header) Code(c *codec.Coder) {
	c.U8(&h.Version)
	k := uint16(h.Kind)
	c.U16(&k)
	if c.Reading() {
		h.Kind = Kind(k)
	}
	c.I64(&h.Time)
	codec.VarInt(c, &h.Slot)
	codec.VarInt(c, &h.Session)
	c.U8(&h.Place)
	codec.VarInt(c, &h.Seq)
	codec.VarInt(c, &h.Epoch)
}

// Reply precedes every reply body; the body is there only when Err is OK.
type Reply struct {
	Err   errkind.Kind
	Text  string    // what failed, for people; empty when OK
	Epoch ids.Epoch // highest snapshot epoch
}

// Code encodes or decodes the reply header.
func (r *Reply) Code(c *codec.Coder) {
	codec.VarInt(c, &r.Err)
	if r.Err != errkind.OK {
		c.String(&r.Text)
	}
	codec.VarInt(c, &r.Epoch)
}

// Empty is the body of replies that say nothing more.
type Empty struct{}

// Code does nothing.
func (*Empty) Code(*codec.Coder) {}

// Entry is the reply that describes one inode.
type Entry struct {
	Attr    Attr
	Existed bool // Create without Exclusive: the name was there before
	// Dir is the directory as Create or Unlink left it; nil from others, and
	// where nothing changed.
	Dir *Attr
}

// Code encodes or decodes the message.
func (m *Entry) Code(c *codec.Coder) {
	m.Attr.Code(c)
	c.Bool(&m.Existed)
	has := m.Dir != nil
	c.Bool(&has)
	if has && c.Reading() {
		m.Dir = new(Attr)
	}
	if has {
		m.Dir.Code(c)
	}
}
