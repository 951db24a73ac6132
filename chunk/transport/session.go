package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

const (
	sendBuffer    = 2 << 20
	receiveBuffer = 2 << 20
	writeBound    = 30 * time.Second // for a batch of frames
	frameBound    = 30 * time.Second // for the rest of a frame once its header has come
	batchCalls    = 64
	batchBytes    = 256 << 10 // of payload; a single larger one goes alone
)

// session is one connection. The fields up to dead are set before its
// goroutines start; the others are guarded by peer.mu.
type session struct {
	link   *link
	nc     net.Conn // plain or TLS
	boot   uint64
	credit int // bytes of OpStore payload that may be in flight
	wake   chan struct{}

	dead    bool
	nextID  uint64
	pending map[uint64]*call // handed over and not answered
	cancels []uint64         // requests to cancel
	stores  int              // bytes of OpStore payload in flight
	heard   time.Duration    // when the server last sent something, or the first pending request was sent
	used    time.Duration    // when the last request was sent
	pinged  bool
}

// connect dials and shakes hands; bounded by DialTimeout.
func connect(l *link) (*session, error) {
	t := l.peer.t
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.DialTimeout)
	defer cancel()
	dial := t.cfg.Dial
	if dial == nil {
		dial = dialTCP
	}
	nc, err := dial(ctx, l.peer.addr)
	if err != nil {
		return nil, errkind.Unavailable.Wrap("%v", err)
	}
	s, err := shake(ctx, l, nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return s, nil
}

func dialTCP(ctx context.Context, addr string) (net.Conn, error) {
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	tc := nc.(*net.TCPConn)
	rc, err := tc.SyscallConn()
	if err == nil {
		err = errors.Join(tc.SetNoDelay(true), tc.SetWriteBuffer(sendBuffer), tc.SetReadBuffer(receiveBuffer))
		err = errors.Join(err, rc.Control(func(fd uintptr) {
			// An answer to a lost peer: unacknowledged bytes end the connection.
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(writeBound/time.Millisecond))
		}))
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return nc, nil
}

func shake(ctx context.Context, l *link, nc net.Conn) (*session, error) {
	t := l.peer.t
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	if t.cfg.TLS != nil {
		cfg := t.cfg.TLS.Clone()
		if cfg.ServerName == "" {
			cfg.ServerName, _, _ = net.SplitHostPort(l.peer.addr)
		}
		tc := tls.Client(nc, cfg)
		if err := tc.HandshakeContext(ctx); err != nil {
			return nil, errkind.Unavailable.Wrap("tls: %v", err)
		}
		nc = tc
	}
	hello := wire.Hello{
		MinVersion: wire.Version, MaxVersion: wire.Version, Cluster: t.cfg.Cluster,
		Client: t.client, Kind: l.kind, MaxPayload: wire.MaxPayload, Token: t.cfg.Token,
	}
	if err := wire.WriteHello(nc, &hello); err != nil {
		return nil, errkind.Unavailable.Wrap("%v", err)
	}
	var welcome wire.Welcome
	if err := wire.ReadHello(nc, &welcome); err != nil {
		return nil, errkind.Unavailable.Wrap("%v", err)
	}
	if err := welcome.Check(&hello); err != nil {
		return nil, err
	}
	if !stop() {
		return nil, errkind.Unavailable.Wrap("the handshake took longer than %v", t.cfg.DialTimeout)
	}
	return &session{
		link: l, nc: nc, boot: welcome.Boot, credit: int(welcome.StoreCredit),
		wake: make(chan struct{}, 1), pending: make(map[uint64]*call),
	}, nil
}

func (s *session) wakeWriter() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// batch is what one writev sends.
type batch struct {
	calls []*call
	heads []byte
	ends  []int // where each head in heads ends
	bufs  net.Buffers
}

// write sends what is queued, until the session is dead.
func (s *session) write() {
	p := s.link.peer
	var b batch
	for {
		p.mu.Lock()
		if s.dead {
			p.mu.Unlock()
			return
		}
		tell := s.gather(&b)
		if len(b.heads) > 0 {
			_ = s.nc.SetWriteDeadline(time.Now().Add(writeBound))
		}
		p.mu.Unlock()
		tell()
		if len(b.heads) == 0 {
			<-s.wake
			continue
		}
		err := s.send(&b)
		p.mu.Lock()
		for _, c := range b.calls {
			c.writing = false
		}
		tell = p.settle(b.calls)
		fail := func() {}
		if err != nil {
			fail = p.endSession(s, errkind.Unavailable.Wrap("send to chunk server %s: %v", p.addr, err))
		}
		p.mu.Unlock()
		tell()
		fail()
	}
}

// gather takes the next frames off the queue; the lock is held. The returned
// function tells the calls that can never be sent.
func (s *session) gather(b *batch) (tell func()) {
	l, p := s.link, s.link.peer
	b.calls, b.heads, b.ends = b.calls[:0], b.heads[:0], b.ends[:0]
	for _, id := range s.cancels {
		s.nextID++
		req := &wire.Request{Op: wire.OpCancel, Body: &wire.Cancel{Request: id}}
		b.heads, _ = wire.AppendRequest(b.heads, s.nextID, req) // of fixed size, always fits
	}
	s.cancels = s.cancels[:0]
	var unfit []*call
	kept, bytes := l.queue[:0], 0
	for i, c := range l.queue {
		full := len(b.calls) >= batchCalls || bytes > 0 && bytes+c.payload > batchBytes || len(s.pending) >= p.t.cfg.MaxPending
		if full {
			kept = append(kept, l.queue[i:]...)
			break
		}
		store := c.req.Op == wire.OpStore
		if store && c.payload <= s.credit && s.stores+c.payload > s.credit {
			kept = append(kept, c)
			continue
		}
		if err := s.take(b, c); err != nil {
			c.over, c.err = true, err
			unfit = append(unfit, c)
			continue
		}
		bytes += c.payload
		if store {
			s.stores += c.payload
		}
	}
	clear(l.queue[len(kept):])
	l.queue = kept
	s.used = p.t.clock.Now()
	return p.settle(unfit)
}

// take encodes a call into the batch.
func (s *session) take(b *batch, c *call) error {
	if c.req.Op == wire.OpStore && c.payload > s.credit {
		return errkind.TooBig.Wrap("store of %d bytes: chunk server %s takes %d", c.payload, s.link.peer.addr, s.credit)
	}
	s.nextID++
	heads, err := wire.AppendRequest(b.heads, s.nextID, c.req)
	if err != nil {
		return err
	}
	b.heads = heads
	b.ends = append(b.ends, len(heads))
	c.id, c.sess, c.writing = s.nextID, s, true
	if len(s.pending) == 0 {
		s.heard = s.link.peer.t.clock.Now()
	}
	s.pending[c.id] = c
	b.calls = append(b.calls, c)
	return nil
}

// send writes a batch. Cancels stand before the first call's head.
func (s *session) send(b *batch) error {
	b.bufs = b.bufs[:0]
	from := 0
	for i, c := range b.calls {
		if c.payload == 0 && i+1 < len(b.calls) {
			continue // its head goes out with the next one
		}
		b.bufs = append(b.bufs, b.heads[from:b.ends[i]])
		from = b.ends[i]
		for _, part := range c.req.Payload {
			if len(part) > 0 {
				b.bufs = append(b.bufs, part)
			}
		}
	}
	if len(b.calls) == 0 {
		b.bufs = append(b.bufs, b.heads)
	}
	all := b.bufs
	_, err := b.bufs.WriteTo(s.nc)
	clear(all)
	b.bufs = all[:0]
	return err
}

// read takes replies off the connection until it ends.
func (s *session) read() {
	err := s.readFrames()
	p := s.link.peer
	p.mu.Lock()
	tell := p.endSession(s, errkind.Unavailable.Wrap("connection to chunk server %s: %v", p.addr, err))
	p.mu.Unlock()
	tell()
}

func (s *session) readFrames() error {
	r := wire.NewReader(s.nc)
	for {
		if err := s.nc.SetReadDeadline(time.Now().Add(s.link.peer.t.cfg.tick)); err != nil {
			return err
		}
		h, err := r.Header()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if err := s.quiet(); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := s.nc.SetReadDeadline(time.Now().Add(frameBound)); err != nil {
			return err
		}
		body, err := r.Body(&h)
		if err != nil {
			return err
		}
		resp, err := wire.DecodeReply(&h, body)
		if err != nil {
			return err
		}
		if err := s.deliver(r, &h, resp); err != nil {
			return err
		}
	}
}

var errIdle = errors.New("closed after being idle")

// quiet looks after a connection on which nothing arrives.
func (s *session) quiet() error {
	p := s.link.peer
	p.mu.Lock()
	defer p.mu.Unlock()
	now, cfg := p.t.clock.Now(), &p.t.cfg
	if len(s.pending) == 0 && len(s.link.queue) == 0 {
		s.heard = now
		if now-s.used >= cfg.IdleTimeout {
			p.endSession(s, errIdle) // before a new request can be handed to it
			return errIdle
		}
		return nil
	}
	silent := now - s.heard
	if silent >= cfg.DeadTimeout {
		return fmt.Errorf("the server has been silent for %v", silent)
	}
	if silent >= cfg.DeadTimeout/3 && !s.pinged {
		s.pinged = true
		c := &call{req: &wire.Request{Op: wire.OpPing}, done: func(*wire.Response, error) {}, link: s.link}
		s.link.queue = append(s.link.queue, c)
		s.wakeWriter()
	}
	return nil
}

// deliver takes a reply's payload and gives the reply to its call.
func (s *session) deliver(r *wire.Reader, h *wire.Header, resp *wire.Response) error {
	p := s.link.peer
	p.mu.Lock()
	s.heard, s.pinged = p.t.clock.Now(), false
	c := s.pending[h.Request]
	if c == nil {
		p.mu.Unlock()
		return fmt.Errorf("reply to request %d, which was not sent: %w", h.Request, wire.ErrFrame)
	}
	if c.req.Op != h.Op {
		p.mu.Unlock()
		return fmt.Errorf("reply of %s to request %d of %s: %w", h.Op, h.Request, c.req.Op, wire.ErrFrame)
	}
	wanted := !c.over
	c.receiving = wanted && h.PayloadLen > 0
	p.mu.Unlock()
	var err error
	if n := int(h.PayloadLen); wanted && n > 0 {
		dst := c.req.Dst
		if len(dst) < n {
			dst = make([]byte, n)
		}
		resp.Payload = dst[:n:n]
		err = r.Payload(resp.Payload)
	} else {
		err = r.Discard(n)
	}
	p.mu.Lock()
	c.receiving = false
	if err == nil {
		delete(s.pending, h.Request)
		if c.req.Op == wire.OpStore {
			s.stores -= c.payload
		}
		if !c.over {
			c.over, c.resp = true, resp
		}
		s.wakeWriter()
	}
	tell := p.settle([]*call{c})
	p.mu.Unlock()
	tell()
	return err
}
