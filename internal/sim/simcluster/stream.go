package simcluster

import (
	"context"
	"sync"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// streams reaches metadata servers from one node: a stream.Transport.
type streams struct {
	c    *Cluster
	from string
}

// Connect opens a stream to the metadata server at addr.
func (s *streams) Connect(ctx context.Context, addr string) (stream.Conn, error) {
	m := s.c.metaAt(addr)
	if m == nil {
		return nil, errkind.Unavailable.Wrap("no metadata server at %s", addr)
	}
	c, ok := s.c.net.connect(s.from, addr)
	if !ok || ctx.Err() != nil {
		return nil, errkind.Unavailable.Wrap("connect %s to %s: refused", s.from, addr)
	}
	ends := [2]*streamEnd{newStreamEnd(s.c.World, c, 0), newStreamEnd(s.c.World, c, 1)}
	ends[0].peer, ends[1].peer = ends[1], ends[0]
	srv := m.life.server
	s.c.World.Go("meta serve "+s.from, func() { srv.Serve(ends[1]) })
	return ends[0], nil
}

// streamDepth is how many messages may be under way in one direction.
const streamDepth = 64

// streamEnd is one end of a stream.
type streamEnd struct {
	conn *conn
	end  int
	peer *streamEnd
	cond sched.Cond
	mu   struct {
		sync.Mutex
		inbox  [][]byte
		sent   int // messages that the peer has not taken
		closed bool
	}
}

func newStreamEnd(s sched.Sched, c *conn, end int) *streamEnd {
	e := &streamEnd{conn: c, end: end}
	e.cond = s.NewCond(&e.mu)
	c.lost[end] = e.shut
	return e
}

func (e *streamEnd) shut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.closed = true
	e.cond.Broadcast()
}

// Send puts a message on its way, waiting while too many are.
func (e *streamEnd) Send(msg []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.mu.sent >= streamDepth && !e.mu.closed {
		e.cond.Wait()
	}
	if e.mu.closed {
		return errkind.Unavailable.Wrap("send: the connection is closed")
	}
	e.mu.sent++
	e.conn.deliver(e.end, func() { e.peer.take(msg) })
	return nil
}

func (e *streamEnd) take(msg []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.inbox = append(e.mu.inbox, msg)
	e.cond.Broadcast()
}

// Recv waits for the oldest message that has arrived.
func (e *streamEnd) Recv() ([]byte, error) {
	msg, err := e.next()
	if err == nil {
		e.peer.mu.Lock()
		defer e.peer.mu.Unlock()
		e.peer.mu.sent--
		e.peer.cond.Broadcast()
	}
	return msg, err
}

func (e *streamEnd) next() ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.mu.inbox) == 0 && !e.mu.closed {
		e.cond.Wait()
	}
	if len(e.mu.inbox) == 0 {
		return nil, errkind.Unavailable.Wrap("receive: the connection is closed")
	}
	msg := e.mu.inbox[0]
	e.mu.inbox = e.mu.inbox[1:]
	return msg, nil
}

// Close ends the stream; the peer still gets what was sent.
func (e *streamEnd) Close() {
	e.shut()
	e.conn.finish(e.end)
}
