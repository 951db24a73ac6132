package server

import (
	"crypto/subtle"
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// ErrCredit is returned for a payload that was not granted. The connection
// must be closed.
var ErrCredit = errkind.Invalid.Wrap("data without credit")

// Conn is the logic of one connection. Accept and Submit are called in turn by
// one task; Close by any.
type Conn struct {
	srv   *Server
	peer  string
	files bool // replies may be sent from files

	// Guarded by srv.mu.
	closed  bool
	items   map[uint64]*item      // accepted and not answered
	granted map[uint64]*openChunk // opens answered on this connection, nothing put yet
	pending int                   // accepted and not released
	stores  int64                 // bytes of OpStore payload in flight
	reads   int64                 // bytes of read buffers held
}

// NewConn begins a connection. With files, replies to reads may name a file
// section instead of holding bytes.
func (s *Server) NewConn(peer string, files bool) *Conn {
	return &Conn{srv: s, peer: peer, files: files, items: make(map[uint64]*item), granted: make(map[uint64]*openChunk)}
}

// Welcome is the server's side of the handshake.
func (s *Server) Welcome(h *wire.Hello) wire.Welcome {
	w := wire.Answer(h, wire.Welcome{Cluster: s.cfg.Cluster, Boot: s.cfg.Boot, StoreCredit: uint32(s.lim.StoreCredit)})
	if w.Status == errkind.OK && len(s.cfg.Token) > 0 && subtle.ConstantTimeCompare(h.Token, s.cfg.Token) != 1 {
		w.Status, w.Text = errkind.Access, "the access token is not this cluster's"
	}
	return w
}

// itemState says where a request is.
type itemState uint8

const (
	itemAccepted itemState = iota
	itemWaiting            // an open without buffers
	itemQueued             // on a disk's queue
	itemRunning
	itemDone
)

// item is one request inside the server. Its state is guarded by Server.mu.
type item struct {
	conn    *Conn // nil for the server's own work
	id      uint64
	req     *wire.Request
	disk    *disk
	reply   func(*Reply)
	arrived time.Duration
	due     time.Duration // zero: no bound

	buf    []byte
	held   int64   // bytes of budget that buf counts against
	from   *budget // which one
	refuse error   // decided by Accept

	state     itemState
	cancelled bool
	chunk     *openChunk
}

// Incoming is an accepted request. When Buffer is not nil the payload must be
// read into it before Submit; otherwise the payload is to be thrown away.
type Incoming struct {
	Buffer []byte
	it     *item
}

// Accept decides about a request whose payload of n bytes is still to be read.
// An error, which wraps errkind.Invalid, means that the connection must be closed.
func (c *Conn) Accept(id uint64, req *wire.Request, n int) (*Incoming, error) {
	s := c.srv
	it := &item{conn: c, id: id, req: req, arrived: s.clock.Now()}
	if req.Left > 0 {
		it.due = it.arrived + req.Left
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.closed {
		return nil, errkind.Invalid.Wrap("request %d on a closed connection", id)
	}
	if _, dup := c.items[id]; dup {
		return nil, errkind.Invalid.Wrap("request id %d is used twice", id)
	}
	if c.pending >= 2*s.lim.ConnPending {
		return nil, errkind.Invalid.Wrap("%d requests of one connection are under way", c.pending)
	}
	if req.Op != wire.OpCancel && req.Op != wire.OpPing {
		d, ok := s.disks[diskOf(req)]
		switch {
		case s.mu.closing:
			it.refuse = errShutdown
		case !ok:
			it.refuse = errkind.NotFound.Wrap("disk %d is not on this server", diskOf(req))
		case c.pending >= s.lim.ConnPending:
			it.refuse = s.busy(20*time.Millisecond, fmt.Sprintf("%d requests of this connection are under way", c.pending))
		}
		it.disk = d
	}
	if it.refuse == nil && n > 0 {
		if err := s.admit(it, int64(n)); err != nil {
			return nil, err
		}
	}
	if it.held > 0 {
		buf, err := s.pool.get(n)
		if err != nil {
			s.giveHeld(it)
			it.refuse = s.busy(100*time.Millisecond, fmt.Sprintf("no memory for %d bytes: %v", n, err))
		} else {
			it.buf = buf
		}
	}
	c.items[id] = it
	c.pending++
	s.mu.pending++
	return &Incoming{Buffer: it.buf, it: it}, nil
}

// admit takes budget for a payload of n bytes, or sets refuse.
func (s *Server) admit(it *item, n int64) error {
	switch m := it.req.Body.(type) {
	case *wire.Put:
		return s.admitPut(it, m, n)
	case *wire.Store:
		if it.conn.stores+n > s.lim.StoreCredit {
			return fmt.Errorf("%d bytes of small chunks in flight on one connection, granted were %d: %w", it.conn.stores+n, s.lim.StoreCredit, ErrCredit)
		}
		if !s.mu.stores.take(n) {
			it.refuse = s.busy(20*time.Millisecond, "no buffers for small chunks")
			return nil
		}
		it.conn.stores += n
		it.held, it.from = n, &s.mu.stores
		return nil
	}
	return fmt.Errorf("payload of %d bytes with a request of op %s: %w", n, it.req.Op, ErrCredit)
}

// giveHeld returns an item's budget; s.mu is held.
func (s *Server) giveHeld(it *item) {
	if it.held == 0 {
		return
	}
	it.from.give(it.held)
	switch it.from {
	case &s.mu.stores:
		it.conn.stores -= it.held
	case &s.mu.puts:
		it.disk.puts -= it.held
	}
	it.held = 0
}

// Drop gives up an accepted request whose payload could not be read.
func (c *Conn) Drop(in *Incoming) {
	in.it.reply = func(r *Reply) { r.Release() }
	c.srv.finish(in.it, fail(errkind.Interrupted.Wrap("the payload was cut off")))
}

// Submit carries on with an accepted request. reply is called exactly once,
// perhaps before Submit returns; it must not block, and must Release the reply.
// OpCancel has no reply.
func (c *Conn) Submit(in *Incoming, reply func(*Reply)) {
	s, it := c.srv, in.it
	it.reply = reply
	if it.refuse != nil {
		s.finish(it, fail(it.refuse))
		return
	}
	switch m := it.req.Body.(type) {
	case nil: // ping
		s.finish(it, &Reply{})
	case *wire.Cancel:
		it.reply = func(r *Reply) { r.Release() }
		c.cancel(m.Request)
		s.finish(it, &Reply{})
	case *wire.Open:
		s.submitOpen(it, m)
	case *wire.ChunkRef:
		if it.req.Op == wire.OpAbort {
			s.submitAbort(it, m)
		} else {
			s.submit(it)
		}
	default:
		s.submit(it)
	}
}

// Call is Accept and Submit for a caller that has the whole request in memory,
// as the simulation has. The response owns its payload.
func (c *Conn) Call(id uint64, req *wire.Request, reply func(*wire.Response)) error {
	in, err := c.Accept(id, req, req.PayloadLen())
	if err != nil {
		return err
	}
	if in.Buffer != nil {
		n := 0
		for _, p := range req.Payload {
			n += copy(in.Buffer[n:], p)
		}
	}
	c.Submit(in, func(r *Reply) {
		resp := r.Response
		if len(r.Payload) > 0 {
			resp.Payload = append([]byte(nil), r.Payload...)
		}
		r.Release()
		reply(&resp)
	})
	return nil
}

// cancel gives up on a request: one that waits is dropped, a granted chunk
// that nothing was put to is aborted; what runs already is finished.
func (c *Conn) cancel(id uint64) {
	s := c.srv
	s.mu.Lock()
	var drop *item
	if it, ok := c.items[id]; ok {
		it.cancelled = true
		if it.state == itemWaiting || it.state == itemQueued {
			s.unqueue(it)
			drop = it
		}
	} else if oc, ok := c.granted[id]; ok {
		s.beginAbort(oc)
	}
	s.mu.Unlock()
	if drop != nil {
		s.finish(drop, fail(errCancelled))
	}
}

var errCancelled = errkind.Interrupted.Wrap("cancelled")

// Close ends the connection: what waits is dropped, what runs is finished.
func (c *Conn) Close() {
	s := c.srv
	s.mu.Lock()
	c.closed = true
	for _, it := range c.items {
		it.cancelled = true // dropped when a worker comes to it, in the queue's order
	}
	s.mu.Unlock()
}

// finish answers an item once and gives back what it holds.
func (s *Server) finish(it *item, r *Reply) {
	if it.conn == nil {
		return
	}
	if it.buf != nil {
		s.pool.put(it.buf) // before its budget is given to another
		it.buf = nil
	}
	s.mu.Lock()
	it.state = itemDone
	freed := it.held
	s.giveHeld(it)
	if oc := it.chunk; oc != nil && it.req.Op == wire.OpPut {
		s.extend(oc, r, freed)
	}
	delete(it.conn.items, it.id)
	if it.disk != nil {
		r.QueueDelay = it.disk.delay(s.clock.Now())
	}
	s.mu.Unlock()
	s.admitWaiting()
	r.Op, r.ID = it.req.Op, it.id
	inner := r.release
	r.release = func() {
		if inner != nil {
			inner()
		}
		s.mu.Lock()
		it.conn.pending--
		s.mu.pending--
		if s.mu.pending == 0 {
			s.drained.Broadcast()
		}
		s.mu.Unlock()
	}
	it.reply(r)
}

func diskOf(req *wire.Request) ids.DiskID {
	switch m := req.Body.(type) {
	case *wire.Open:
		return m.Disk
	case *wire.Put:
		return m.Disk
	case *wire.Seal:
		return m.Disk
	case *wire.Store:
		return m.Disk
	case *wire.ChunkRef:
		return m.Disk
	case *wire.Read:
		return m.Disk
	}
	return 0
}
