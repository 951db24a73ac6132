package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Found creates the cluster: the first command of an empty log.
type Found struct {
	Cluster ids.UUID
	Layout  ids.Layout // of the root directory
	UID     uint32
	GID     uint32
}

// Kind returns KindFound.
func (*Found) Kind() Kind { return KindFound }

// Code encodes or decodes the message.
func (m *Found) Code(c *codec.Coder) {
	c.UUID(&m.Cluster)
	c.Layout(&m.Layout)
	codec.VarInt(c, &m.UID)
	codec.VarInt(c, &m.GID)
}

// CreateSession opens a session for a mount or a job. A mount that finds the
// secret of its predecessor at the same path passes it in Replaces, and the
// old session ends at once.
type CreateSession struct {
	Name     string // mount path, or the job's name; for people
	Host     string
	Secret   ids.UUID // chosen at random by the client: proves ownership
	Replaces ids.UUID // secret of the predecessor, or zero
}

// Kind returns KindCreateSession.
func (*CreateSession) Kind() Kind { return KindCreateSession }

// Code encodes or decodes the message.
func (m *CreateSession) Code(c *codec.Coder) {
	c.String(&m.Name)
	c.String(&m.Host)
	c.UUID(&m.Secret)
	c.UUID(&m.Replaces)
}

// SessionOpened answers CreateSession. A retry with the same secret gets the
// same session.
type SessionOpened struct {
	Session     ids.Session
	Incarnation ids.Incarnation
	Cluster     ids.UUID
	TermMillis  uint32 // length of the session term
}

// Code encodes or decodes the message.
func (m *SessionOpened) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Session)
	codec.VarInt(c, &m.Incarnation)
	c.UUID(&m.Cluster)
	codec.VarInt(c, &m.TermMillis)
}

// SuspectSessions marks sessions whose term passed: their locks may be taken.
// Resumed takes the mark from sessions that were heard of again; a mutation of
// the session itself does so too. Sessions that ended are ignored.
type SuspectSessions struct {
	Sessions []ids.Session
	Resumed  []ids.Session
}

// Kind returns KindSuspectSessions.
func (*SuspectSessions) Kind() Kind { return KindSuspectSessions }

// Code encodes or decodes the message.
func (m *SuspectSessions) Code(c *codec.Coder) {
	sessions(c, &m.Sessions)
	sessions(c, &m.Resumed)
}

// EndSessions ends sessions for good: locks go, later commands are refused.
type EndSessions struct{ Sessions []ids.Session }

// Kind returns KindEndSessions.
func (*EndSessions) Kind() Kind { return KindEndSessions }

// Code encodes or decodes the message.
func (m *EndSessions) Code(c *codec.Coder) { sessions(c, &m.Sessions) }

func sessions(c *codec.Coder, v *[]ids.Session) {
	codec.Slice(c, v, func(c *codec.Coder, s *ids.Session) { codec.VarInt(c, s) })
}

// Renew extends the session's term and says what it may still commit.
type Renew struct {
	// Floor is the lowest block counter that the session may still commit, or
	// of which a late chunk is still to be placed: chunks of lower blocks that
	// no record lists are deleted.
	Floor uint64
	// Opens, sent after a change of leader, lists every inode that the session
	// has open.
	Opens []ids.Ino
	// Full says that Opens is complete (and may be empty).
	Full bool
}

// Kind returns KindRenew.
func (*Renew) Kind() Kind { return KindRenew }

// Code encodes or decodes the message.
func (m *Renew) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Floor)
	inos(c, &m.Opens)
	c.Bool(&m.Full)
}

// Renewed answers Renew. The client counts the term from when it sent the request.
type Renewed struct {
	TermMillis     uint32
	ClusterVersion uint64
	Suspect        bool   // the session had been marked; it is no longer
	LeaderTerm     uint64 // changed: send Renew with Full
}

// Code encodes or decodes the message.
func (m *Renewed) Code(c *codec.Coder) {
	codec.VarInt(c, &m.TermMillis)
	codec.VarInt(c, &m.ClusterVersion)
	c.Bool(&m.Suspect)
	codec.VarInt(c, &m.LeaderTerm)
}

func inos(c *codec.Coder, v *[]ids.Ino) {
	codec.Slice(c, v, func(c *codec.Coder, i *ids.Ino) { codec.VarInt(c, i) })
}

// CancelRequest asks the server to give up on a waiting request (a lock) of
// the same stream. It has no reply; the cancelled one answers Interrupted.
type CancelRequest struct{ Request uint64 }

// Kind returns KindCancel.
func (*CancelRequest) Kind() Kind { return KindCancel }

// Code encodes or decodes the message.
func (m *CancelRequest) Code(c *codec.Coder) { codec.VarInt(c, &m.Request) }
