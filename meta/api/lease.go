package api

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Lease asks for the right to answer Lookup and GetAttr from memory; Leased
// answers, behind a leadership check like any query. With Return the session
// gives up what it has, after a PushRecall or unasked.
type Lease struct {
	// Ino is the directory; zero, all that this version grants, is the whole tree.
	Ino    ids.Ino
	Return bool
}

// Kind returns KindLease.
func (*Lease) Kind() Kind { return KindLease }

// Code encodes or decodes the message.
func (m *Lease) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Ino)
	c.Bool(&m.Return)
}

// Leased answers Lease. No other session's change of what is leased is applied
// before the lease has been returned or has run out.
type Leased struct {
	// Millis is how long the lease holds, counted by the client from when it
	// sent the request; zero: it is not granted.
	Millis uint32
}

// Code encodes or decodes the message.
func (m *Leased) Code(c *codec.Coder) { codec.VarInt(c, &m.Millis) }
