package stream

import (
	"context"
	"sync"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Conn is one connection, seen from either end. Messages arrive whole and in
// order or not at all. Send and Recv may be called from two tasks at once, but
// each from one task only; Close from any, any number of times.
type Conn interface {
	// Send hands a message over; the caller must not touch it afterwards. It
	// may wait for the peer, and fails once the connection is closed.
	Send(msg []byte) error
	// Recv waits for the next message. The caller owns it.
	Recv() ([]byte, error)
	Close()
}

// Transport reaches metadata servers.
type Transport interface {
	// Connect returns a connection to the server at addr, or an error of kind
	// errkind.Unavailable. Whether anyone answers there may show only at Recv.
	Connect(ctx context.Context, addr string) (Conn, error)
}

// pipeDepth is how many messages a pipe holds in each direction.
const pipeDepth = 64

// Pipe returns the two ends of a connection in memory, for tests and the
// simulation: waits go through s.
func Pipe(s sched.Sched) (client, server Conn) {
	p := &pipe{}
	p.cond = s.NewCond(&p.mu)
	return &pipeEnd{pipe: p, out: 0}, &pipeEnd{pipe: p, out: 1}
}

type pipe struct {
	mu struct {
		sync.Mutex
		queue  [2][][]byte
		closed [2]bool // by which end
	}
	cond sched.Cond
}

type pipeEnd struct {
	*pipe
	out int // queue that this end fills
}

// Send queues the message, waiting while the queue is full.
func (e *pipeEnd) Send(msg []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.mu.queue[e.out]) >= pipeDepth && !e.over() {
		e.cond.Wait()
	}
	if e.over() {
		return errkind.Unavailable.Wrap("send: the connection is closed")
	}
	e.mu.queue[e.out] = append(e.mu.queue[e.out], msg)
	e.cond.Broadcast()
	return nil
}

// Recv takes the oldest message of the other end.
func (e *pipeEnd) Recv() ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	in := 1 - e.out
	for len(e.mu.queue[in]) == 0 && !e.over() {
		e.cond.Wait()
	}
	if len(e.mu.queue[in]) == 0 {
		return nil, errkind.Unavailable.Wrap("receive: the connection is closed")
	}
	msg := e.mu.queue[in][0]
	e.mu.queue[in] = e.mu.queue[in][1:]
	e.cond.Broadcast()
	return msg, nil
}

// over reports whether either end has closed.
func (e *pipeEnd) over() bool { return e.mu.closed[0] || e.mu.closed[1] }

// Close ends both directions. The other end still receives what was sent.
func (e *pipeEnd) Close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.closed[e.out] = true
	e.mu.queue[1-e.out] = nil
	e.cond.Broadcast()
}
