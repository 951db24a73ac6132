// Package transport is the client's end of the data protocol (chunk/wire): it
// keeps two connections to each chunk server, a small one so that a seal never
// waits behind megabytes, and one for bulk (data-path rule 26).
//
// Payloads leave by writev from the caller's memory, and replies to reads land
// in the caller's memory. A request is over only when neither goroutine of its
// connection can touch that memory any more (rule 25).
//
// Lock order: peer.mu, then Transport.mu. done and Config.OnRestart are called
// without a lock.
package transport

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Config is what a Transport works with. Zero numbers mean the defaults.
type Config struct {
	Cluster ids.UUID
	Sched   sched.Sched
	Log     *slog.Logger
	TLS     *tls.Config // nil: plain TCP
	Token   []byte      // access token of the handshake

	// OnRestart hears that a server has another boot id than before: what was
	// not sealed there is gone (rule 12). It is called before any reply of the
	// new life is delivered, and must not block.
	OnRestart func(addr string, boot uint64)
	// Dial opens a connection; nil means TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)

	DialTimeout time.Duration // for connecting and the handshake; default 2 s
	IdleTimeout time.Duration // a connection unused for so long is closed; default 60 s
	DeadTimeout time.Duration // a server silent for so long, although asked, is given up; default 15 s
	BackoffMax  time.Duration // the longest time that a dead server is not dialled again; default 2 s
	MaxQueued   int           // requests waiting to be sent on a connection; default 1,024
	MaxPending  int           // requests sent and not answered on a connection; default 768

	tick time.Duration // how often a quiet connection is looked after
}

func (c *Config) setDefaults() {
	wait := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	wait(&c.DialTimeout, 2*time.Second)
	wait(&c.IdleTimeout, time.Minute)
	wait(&c.DeadTimeout, 15*time.Second)
	wait(&c.BackoffMax, 2*time.Second)
	c.tick = min(max(min(c.IdleTimeout, c.DeadTimeout)/4, 10*time.Millisecond), 5*time.Second)
	if c.MaxQueued <= 0 {
		c.MaxQueued = 1024
	}
	if c.MaxPending <= 0 {
		c.MaxPending = 768
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// Transport carries requests to chunk servers. Safe for concurrent use.
type Transport struct {
	cfg    Config
	clock  sched.Sched
	client uint64
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	tasks  sync.WaitGroup
	mu     struct {
		sync.Mutex
		closed bool
		peers  map[string]*peer
	}
}

// New returns a transport. It dials only when there is something to send.
func New(cfg Config) *Transport {
	cfg.setDefaults()
	t := &Transport{cfg: cfg, clock: cfg.Sched, client: cfg.Sched.Uint64()}
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.mu.peers = make(map[string]*peer)
	return t
}

// spawn runs a task that Close waits for.
func (t *Transport) spawn(name string, fn func()) {
	t.tasks.Add(1)
	t.clock.Go(name, func() {
		defer t.tasks.Done()
		fn()
	})
}

// Send starts a request and returns at once. done is called exactly once,
// never on the caller's stack, and must not block: with the reply, or with an
// error that wraps Unavailable (no connection), Busy (too much is queued here),
// Timeout (req.Left is over), Interrupted (cancel), Version, WrongCluster or
// Access (the server refused the connection), Invalid (the request does not fit
// a frame). After cancel, which may be called at any time and more than once,
// done comes within about 50 ms. Once done has been called neither payload nor
// Dst is touched any more.
func (t *Transport) Send(addr string, req *wire.Request, done func(*wire.Response, error)) (cancel func()) {
	c := &call{req: req, done: done, payload: req.PayloadLen()}
	p := t.peer(addr)
	if p == nil {
		t.clock.Go("transport refused", func() { done(nil, errClosed) })
		return func() {}
	}
	c.link = p.links[kindOf(req, c.payload)-1]
	p.start(c)
	return func() { p.cancel(c, errCancelled) }
}

var (
	errClosed    = errkind.Unavailable.Wrap("the transport is closed")
	errCancelled = errkind.Interrupted.Wrap("cancelled")
)

func kindOf(req *wire.Request, payload int) wire.Kind {
	if req.Op == wire.OpPut || payload > wire.SmallPayload {
		return wire.KindBulk
	}
	if m, ok := req.Body.(*wire.Read); ok && m.Len > wire.SmallPayload {
		return wire.KindBulk
	}
	return wire.KindSmall
}

// peer returns the server at addr; nil when the transport is closed.
func (t *Transport) peer(addr string) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil
	}
	p := t.mu.peers[addr]
	if p == nil {
		p = newPeer(t, addr)
		t.mu.peers[addr] = p
	}
	return p
}

// BootID returns the boot id that the server at addr gave last.
func (t *Transport) BootID(addr string) (boot uint64, known bool) {
	t.mu.Lock()
	p := t.mu.peers[addr]
	t.mu.Unlock()
	if p == nil {
		return 0, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.boot, p.mu.boot != 0
}

// Close ends all connections and requests; it returns when every done has
// been called. Later requests fail.
func (t *Transport) Close() {
	t.mu.Lock()
	t.mu.closed = true
	peers := make([]*peer, 0, len(t.mu.peers))
	for _, p := range t.mu.peers {
		peers = append(peers, p)
	}
	t.mu.Unlock()
	t.stop()
	for _, p := range peers {
		p.close()
	}
	t.tasks.Wait()
}
