package stream

import (
	"fmt"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// The protocol versions that this code speaks.
const (
	MinVersion = 1
	MaxVersion = api.Version
)

// Hello opens a connection: the caller says what it speaks.
type Hello struct {
	MinVersion uint16
	MaxVersion uint16
	Cluster    ids.UUID // zero when the caller does not know it yet
	Features   uint64   // bits that the caller understands; none are defined
	Name       string   // who calls, for people
}

// Code encodes or decodes the message.
func (m *Hello) Code(c *codec.Coder) {
	codec.VarInt(c, &m.MinVersion)
	codec.VarInt(c, &m.MaxVersion)
	c.UUID(&m.Cluster)
	c.U64(&m.Features)
	c.String(&m.Name)
}

// HelloReply answers Hello.
type HelloReply struct {
	Err      errkind.Kind // OK, Version or WrongCluster
	Text     string       // what is wrong, for people
	Version  uint16       // the version that both speak from here on
	Cluster  ids.UUID     // zero when this server does not know it yet
	Features uint64       // bits that both understand
	Leading  bool         // this server leads
	Leader   string       // address of the leader, empty when unknown
}

// Code encodes or decodes the message.
func (m *HelloReply) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Err)
	c.String(&m.Text)
	codec.VarInt(c, &m.Version)
	c.UUID(&m.Cluster)
	c.U64(&m.Features)
	c.Bool(&m.Leading)
	c.String(&m.Leader)
}

// Failure returns the error that the reply holds, or nil.
func (m *HelloReply) Failure() error {
	if m.Err == errkind.OK {
		return nil
	}
	return m.Err.Wrap("%s", m.Text)
}

// Refusal is the body of TypeRefuse.
type Refusal struct {
	Err    errkind.Kind // NotLeader, Busy, Unavailable
	Text   string
	Leader string // address of the leader, with NotLeader, when it is known
}

// Code encodes or decodes the message.
func (m *Refusal) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Err)
	c.String(&m.Text)
	c.String(&m.Leader)
}

// Answer decides on a caller's Hello. cluster is this server's, zero when it
// does not know one yet.
func Answer(h *Hello, cluster ids.UUID) HelloReply {
	switch {
	case h.MinVersion > h.MaxVersion || h.MaxVersion < MinVersion || h.MinVersion > MaxVersion:
		return HelloReply{Err: errkind.Version, Text: fmt.Sprintf(
			"%s speaks metadata protocol %d to %d, this server %d to %d; upgrade the older of the two",
			h.Name, h.MinVersion, h.MaxVersion, MinVersion, MaxVersion)}
	case !h.Cluster.IsZero() && !cluster.IsZero() && h.Cluster != cluster:
		return HelloReply{Err: errkind.WrongCluster, Cluster: cluster, Text: fmt.Sprintf(
			"%s belongs to cluster %s, this server to %s; check the address", h.Name, h.Cluster, cluster)}
	}
	return HelloReply{Version: min(h.MaxVersion, MaxVersion), Cluster: cluster}
}

// Greet sends the caller's Hello and waits for the answer. The caller bounds
// the wait by closing the connection.
func Greet(c Conn, h *Hello) (HelloReply, error) {
	var r HelloReply
	if err := c.Send(Append(nil, TypeHello, 0, codec.Encode(nil, h))); err != nil {
		return r, errkind.Unavailable.Wrap("send hello: %v", err)
	}
	msg, err := c.Recv()
	if err != nil {
		return r, errkind.Unavailable.Wrap("wait for the answer to hello: %v", err)
	}
	f, rest, err := Next(msg)
	if err != nil {
		return r, err
	}
	if f.Type != TypeHello || len(rest) > 0 {
		return r, errkind.Corrupt.Wrap("answer to hello: a frame of type %d and %d bytes more", f.Type, len(rest))
	}
	if err := codec.Decode(f.Body, &r); err != nil {
		return r, errkind.Corrupt.Wrap("answer to hello: %v", err)
	}
	return r, r.Failure()
}

// Welcome waits for the caller's Hello and answers it; decide makes the
// answer. The server bounds the wait by closing the connection.
func Welcome(c Conn, decide func(*Hello) HelloReply) (Hello, error) {
	var h Hello
	msg, err := c.Recv()
	if err != nil {
		return h, errkind.Unavailable.Wrap("wait for hello: %v", err)
	}
	f, rest, err := Next(msg)
	if err != nil {
		return h, err
	}
	if f.Type != TypeHello || len(rest) > 0 {
		return h, errkind.Invalid.Wrap("first frame: type %d and %d bytes more, want one hello", f.Type, len(rest))
	}
	if err := codec.Decode(f.Body, &h); err != nil {
		return h, errkind.Corrupt.Wrap("read hello: %v", err)
	}
	r := decide(&h)
	if err := c.Send(Append(nil, TypeHello, 0, codec.Encode(nil, &r))); err != nil {
		return h, errkind.Unavailable.Wrap("answer hello: %v", err)
	}
	return h, r.Failure()
}
