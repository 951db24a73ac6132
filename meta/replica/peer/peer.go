// Package peer carries the messages of metadata servers to each other over
// gRPC: one stream per direction, opened with a greeting that keeps strangers
// out, and one more for each streamed copy. See docs/protocol.md.
//
// Each peer has one goroutine, which Close ends; copies have one each.
package peer

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/replica"
)

// Bounds.
const (
	maxQueue      = 16 << 20 // bytes that wait for one peer; more are dropped
	maxBatch      = 1 << 20  // bytes after which a batch takes no further message
	maxRetry      = time.Second
	firstRetry    = 50 * time.Millisecond
	helloLimit    = 5 * time.Second
	progressLimit = 30 * time.Second // for one chunk of a copy
)

// Config is what the transport needs.
type Config struct {
	ID    uint64
	Peers map[uint64]string // id → host:port
	// Cluster returns the cluster's id, zero before the founding. Two servers
	// that both know one and differ refuse each other.
	Cluster func() ids.UUID
	Log     *slog.Logger
	Dial    []grpc.DialOption // credentials, at least
}

// Handler takes what arrives; *replica.Replica does.
type Handler interface {
	StepMessage(from uint64, data []byte) error
	ReceiveSnapshot(from uint64) (*replica.Receiver, error)
}

// Transport is one server's side. Safe for concurrent use.
type Transport struct {
	cfg    Config
	ctx    context.Context //nolint:containedctx // ended by Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	mu     struct {
		sync.Mutex
		handler Handler // nil until Serve
		closed  bool
	}
	links map[uint64]*link // fixed by New
}

// New returns a transport that queues; Serve starts it.
func New(cfg Config) *Transport {
	t := &Transport{cfg: cfg, links: map[uint64]*link{}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	for id, addr := range cfg.Peers {
		if id != cfg.ID {
			t.links[id] = newLink(t, id, addr)
		}
	}
	return t
}

// Serve connects to the peers and passes what arrives to h. Called once.
func (t *Transport) Serve(h Handler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return
	}
	t.mu.handler = h
	for _, l := range t.links {
		t.tasks.Go(l.run)
	}
}

// Close ends all streams and waits for the goroutines. Call it after the
// replica is closed and before the gRPC server is.
func (t *Transport) Close() {
	t.mu.Lock()
	t.mu.closed = true
	t.mu.Unlock()
	t.cancel()
	t.tasks.Wait()
}

// start runs fn in a goroutine that Close waits for; false after Close.
func (t *Transport) start(fn func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.tasks.Go(fn)
	return true
}

// Send queues messages for a peer and drops them when the queue is full or the
// peer unknown.
func (t *Transport) Send(to uint64, msgs [][]byte) {
	if l := t.links[to]; l != nil {
		l.enqueue(msgs)
	}
}

// SendSnapshot streams a copy in a goroutine of its own.
func (t *Transport) SendSnapshot(to uint64, produce func(send func(chunk []byte) error) error) {
	fail := func(err error) {
		_ = produce(func([]byte) error { return err }) // it reports the error itself
	}
	l := t.links[to]
	if l == nil {
		fail(errkind.NotFound.Wrap("no metadata server %d", to))
		return
	}
	if !t.start(func() { l.copy(produce) }) {
		fail(errkind.Unavailable.Wrap("the transport to metadata server %d is closed", to))
	}
}

func (t *Transport) hello(to uint64, purpose uint8) *hello {
	return &hello{
		magic: helloMagic, min: version, max: version, cluster: t.cfg.Cluster(),
		from: t.cfg.ID, to: to, purpose: purpose,
	}
}

// link is the connection to one peer.
type link struct {
	t    *Transport
	id   uint64
	addr string
	wake chan struct{}
	mu   struct {
		sync.Mutex
		queue [][]byte
		bytes int
	}
	conn struct {
		sync.Mutex
		*grpc.ClientConn
	}
}

func newLink(t *Transport, id uint64, addr string) *link {
	return &link{t: t, id: id, addr: addr, wake: make(chan struct{}, 1)}
}

func (l *link) enqueue(msgs [][]byte) {
	l.mu.Lock()
	for _, m := range msgs {
		if l.mu.bytes+len(m) > maxQueue {
			break // raft sends again
		}
		l.mu.queue = append(l.mu.queue, m)
		l.mu.bytes += len(m)
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// batch takes messages off the queue.
func (l *link) batch() (out []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for n < len(l.mu.queue) && (n == 0 || len(out)+len(l.mu.queue[n]) <= maxBatch) {
		out = appendMessage(out, l.mu.queue[n])
		l.mu.bytes -= len(l.mu.queue[n])
		n++
	}
	l.mu.queue = l.mu.queue[n:]
	return out
}

func (l *link) client() (*grpc.ClientConn, error) {
	l.conn.Lock()
	defer l.conn.Unlock()
	if l.conn.ClientConn != nil {
		return l.conn.ClientConn, nil
	}
	opts := append([]grpc.DialOption{grpc.WithDefaultCallOptions(
		grpc.CallContentSubtype(codecName), grpc.MaxCallRecvMsgSize(maxMessage),
		grpc.MaxCallSendMsgSize(maxMessage))}, l.t.cfg.Dial...)
	conn, err := grpc.NewClient(l.addr, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to metadata server %d at %s: %w", l.id, l.addr, err)
	}
	l.conn.ClientConn = conn
	return conn, nil
}

// run keeps a stream of messages open until Close.
func (l *link) run() {
	defer func() {
		l.conn.Lock()
		defer l.conn.Unlock()
		if l.conn.ClientConn != nil {
			l.conn.Close()
		}
	}()
	wait := firstRetry
	for l.t.ctx.Err() == nil {
		started := time.Now()
		err := l.messages()
		if l.t.ctx.Err() != nil {
			return
		}
		l.t.cfg.Log.Debug("stream to a metadata server ended", "server", l.id, "addr", l.addr, "error", err)
		if time.Since(started) > maxRetry {
			wait = firstRetry
		}
		select {
		case <-time.After(wait):
		case <-l.t.ctx.Done():
		}
		wait = min(2*wait, maxRetry)
		l.drop()
	}
}

// drop forgets what waited while there was no connection: by now it is stale.
func (l *link) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.queue, l.mu.bytes = nil, 0
}

func (l *link) messages() error {
	ctx, cancel := context.WithCancel(l.t.ctx)
	defer cancel()
	s, err := l.open(ctx, cancel, purposeMessages)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	if !l.t.start(func() { ended <- s.RecvMsg(&packet{}) }) {
		return l.t.ctx.Err()
	}
	for {
		select {
		case <-l.wake:
		case err := <-ended:
			return err
		}
		for b := l.batch(); len(b) > 0; b = l.batch() {
			if err := send(s, b); err != nil {
				return err
			}
		}
	}
}

// sender is the part of a gRPC stream that both sides have.
type sender interface{ SendMsg(any) error }

func send(s sender, p []byte) error { return s.SendMsg(&packet{p}) }

// open starts a stream and waits for the other side's welcome.
func (l *link) open(ctx context.Context, cancel func(), purpose uint8) (grpc.ClientStream, error) {
	conn, err := l.client()
	if err != nil {
		return nil, err
	}
	stop := time.AfterFunc(helloLimit, cancel)
	defer stop.Stop()
	s, err := conn.NewStream(ctx, &serviceDesc.Streams[0], method)
	if err != nil {
		return nil, fmt.Errorf("reach metadata server %d at %s: %w", l.id, l.addr, err)
	}
	if err := send(s, codec.Encode(nil, l.t.hello(l.id, purpose))); err != nil {
		return nil, fmt.Errorf("greet metadata server %d at %s: %w", l.id, l.addr, err)
	}
	return s, l.answer(s)
}

func (l *link) answer(s grpc.ClientStream) error {
	var raw packet
	if err := s.RecvMsg(&raw); err != nil {
		return fmt.Errorf("answer of metadata server %d at %s: %w", l.id, l.addr, err)
	}
	var w welcome
	if err := codec.Decode(raw.bytes, &w); err != nil {
		return fmt.Errorf("answer of metadata server %d at %s: %w", l.id, l.addr, err)
	}
	if err := w.err(); err != nil {
		l.t.cfg.Log.Warn("a metadata server refuses this one", "server", l.id, "addr", l.addr, "error", err)
		return err
	}
	return nil
}

// copy streams one copy. A chunk that does not get through in time ends it.
func (l *link) copy(produce func(send func(chunk []byte) error) error) {
	ctx, cancel := context.WithCancel(l.t.ctx)
	defer cancel()
	watchdog := time.AfterFunc(progressLimit, cancel)
	defer watchdog.Stop()
	s, err := l.open(ctx, cancel, purposeCopy)
	if err != nil {
		_ = produce(func([]byte) error { return err }) // it reports the error itself
		return
	}
	err = produce(func(chunk []byte) error {
		watchdog.Reset(progressLimit)
		return send(s, chunk)
	})
	if err != nil {
		return // cancelling tells the receiver
	}
	if s.CloseSend() == nil {
		if err := l.answer(s); err != nil {
			l.t.cfg.Log.Warn("a copy of the metadata was not taken", "server", l.id, "error", err)
		}
	}
}
