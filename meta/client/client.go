// Package client speaks to the metadata service over one stream: it follows
// the leader, keeps the session alive, retries mutations in their place of the
// session's window until they are answered, and keeps the cluster map.
//
// Lock order: Client.mu is the only lock; callbacks run with it released.
package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// Times of the client.
const (
	renewEvery   = 2 * time.Second
	renewLimit   = 3 * time.Second // then another renewal is sent
	silenceLimit = 5 * time.Second // a connection that answers nothing for so long is given up
	helloLimit   = 3 * time.Second
	tick         = 500 * time.Millisecond
	minBackoff   = 20 * time.Millisecond
	maxBackoff   = time.Second
	cancelGrace  = 2 * time.Second // for the answer to a cancelled lock
)

// maxQueries bounds the queries under way; more wait.
const maxQueries = 1024

// Config says whom to reach, and as whom.
type Config struct {
	Addrs   []string // metadata servers, host:port; any of them will do
	Cluster ids.UUID // refuse any other; zero when unknown
	// Name, Host, Secret and Replaces describe the session: see
	// api.CreateSession. A zero Secret is chosen at random.
	Name, Host string
	Secret     ids.UUID
	Replaces   ids.UUID
	Sched      sched.Sched
	Log        *slog.Logger
	// OpTimeout bounds every Do; 0 means for ever (until its context ends).
	OpTimeout time.Duration
	// Transport reaches the servers; stream.GRPC{} when nil.
	Transport stream.Transport
	// NoSession opens no session and keeps no map: for commands that only ask,
	// and for a chunk server's registration.
	NoSession bool
	// OnLost is called when the session has ended without Close: everything
	// that it held is gone, the client opens another by itself. OnSession is
	// called for each session opened after the first. OnPush is called for
	// each push, PushClusterChanged after Map has followed. All are optional
	// and run in a task of the client: they must not wait for it.
	OnLost    func(old ids.Session)
	OnSession func(now ids.Session)
	OnPush    func(k api.Kind, p api.Pushed)
}

// identity is one session as NextBlockID needs it; immutable.
type identity struct {
	session     ids.Session
	incarnation ids.Incarnation
	cluster     ids.UUID
	secret      ids.UUID
}

// Client is a connection to the metadata service. All methods are safe for
// concurrent use.
type Client struct {
	cfg Config
	// counter numbers blocks. It goes on across sessions, so that a floor that
	// was computed for an earlier session never covers a block of a later one.
	counter  atomic.Uint64
	identity atomic.Pointer[identity]
	cmap     atomic.Pointer[cluster.Map]
	floor    atomic.Pointer[func() uint64]
	valid    atomic.Int64 // sched time in ns until which the session is known to live
	// dialing ends with the client, and with it a connection attempt.
	dialing context.Context
	stop    context.CancelFunc

	mu struct {
		sync.Mutex
		state
	}
	// wake is signalled for the tasks: the end, a lost connection.
	wake sched.Cond
	// ready is signalled for Dial and Close: a session, a map, the end of a task.
	ready sched.Cond
}

// state is what Client.mu guards.
type state struct {
	closing  bool // no new call is admitted
	closed   bool // tasks end
	tasks    int
	fatal    error // version or cluster mismatch before the first session
	lastErr  error // of the connection, for people
	calls    map[uint64]*call
	nextID   uint64
	order    uint64
	free     []*call // for reuse
	win      *window // nil without a session
	waitMut  []*call // for a session or a place
	waitQry  []*call
	queries  int
	epoch    ids.Epoch
	opens    map[ids.Ino]struct{}
	link     *link
	hint     string
	addr     int // next address to try
	opening  bool
	secret   ids.UUID
	replaces ids.UUID
	renew    renewal
	lease    lease
	cache    cache
	// mapStale says that a newer map is known of, mapAsking that it was asked for.
	mapStale, mapAsking bool
	pushed              []pushed
}

type pushed struct {
	kind api.Kind
	body api.Pushed
}

// Dial connects, opens a session and fetches the cluster map (neither with
// NoSession). It returns errors of kind Unavailable or Timeout when no leader
// answers in time, Version and WrongCluster at once.
func Dial(ctx context.Context, cfg Config) (*Client, error) {
	if len(cfg.Addrs) == 0 {
		return nil, errkind.Invalid.Wrap("dial the metadata service: no address given")
	}
	if cfg.Transport == nil {
		cfg.Transport = stream.GRPC{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	c := &Client{cfg: cfg}
	c.dialing, c.stop = context.WithCancel(context.Background())
	c.wake, c.ready = cfg.Sched.NewCond(&c.mu), cfg.Sched.NewCond(&c.mu)
	c.mu.calls = make(map[uint64]*call)
	c.mu.opens = make(map[ids.Ino]struct{})
	c.mu.cache = newCache()
	c.mu.secret, c.mu.replaces = cfg.Secret, cfg.Replaces
	if c.mu.secret.IsZero() {
		c.mu.secret = sched.NewUUID(c.cfg.Sched)
	}
	c.mu.mapStale = !cfg.NoSession
	c.start("meta-link", c.runLinks)
	c.start("meta-session", c.runSession)
	if err := c.awaitReady(ctx); err != nil {
		c.shutdown()
		return nil, err
	}
	return c, nil
}

// start runs fn as a task that Close waits for.
func (c *Client) start(name string, fn func()) {
	c.mu.Lock()
	c.mu.tasks++
	c.mu.Unlock()
	c.cfg.Sched.Go(name, func() {
		defer func() {
			c.mu.Lock()
			c.mu.tasks--
			c.ready.Broadcast()
			c.mu.Unlock()
		}()
		fn()
	})
}

// awaitReady waits until the client can be used.
func (c *Client) awaitReady(ctx context.Context) error {
	stop := c.onCancel(ctx, c.ready.Broadcast)
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	start := c.cfg.Sched.Now()
	for {
		switch {
		case c.mu.fatal != nil:
			return c.mu.fatal
		case c.cfg.NoSession && c.mu.link != nil, c.mu.win != nil && c.cmap.Load() != nil:
			return nil
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return c.failure("connect", errkind.Timeout)
		case ctx.Err() != nil:
			return c.failure("connect", errkind.Interrupted)
		}
		if !c.waitUntil(c.ready, start) {
			return c.failure("connect", errkind.Timeout)
		}
	}
}

// onCancel arranges for fn to be called when ctx ends.
func (c *Client) onCancel(ctx context.Context, fn func()) (stop func() bool) {
	return sched.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		fn()
	})
}

// waitUntil waits on cond, within what OpTimeout leaves of a wait that began
// at start; false when the time is up.
func (c *Client) waitUntil(cond sched.Cond, start time.Duration) bool {
	if c.cfg.OpTimeout <= 0 {
		cond.Wait()
		return true
	}
	left := c.cfg.OpTimeout - (c.cfg.Sched.Now() - start)
	if left <= 0 {
		return false
	}
	cond.WaitFor(left)
	return true
}

// failure is the error of a call that nobody answered; mu is held.
func (c *Client) failure(what string, k errkind.Kind) error {
	switch {
	case c.mu.closing:
		return errkind.Unavailable.Wrap("%s: the metadata client is closed", what)
	case c.mu.lastErr != nil:
		return k.Wrap("%s: no answer from the metadata service %v (last trouble: %v)", what, c.cfg.Addrs, c.mu.lastErr)
	}
	return k.Wrap("%s: no answer from the metadata service %v", what, c.cfg.Addrs)
}

// Session is the current session, zero before the first.
func (c *Client) Session() ids.Session {
	if id := c.identity.Load(); id != nil {
		return id.session
	}
	return 0
}

// Incarnation is the cluster's, as of when the session was opened.
func (c *Client) Incarnation() ids.Incarnation {
	if id := c.identity.Load(); id != nil {
		return id.incarnation
	}
	return 0
}

// Cluster is the id of the cluster, zero before the first session.
func (c *Client) Cluster() ids.UUID {
	if id := c.identity.Load(); id != nil {
		return id.cluster
	}
	return ids.UUID{}
}

// Secret proves ownership of the current session to a successor (Config.Replaces).
func (c *Client) Secret() ids.UUID {
	if id := c.identity.Load(); id != nil {
		return id.secret
	}
	return ids.UUID{}
}

// NextBlockID returns a block id that was never returned before.
func (c *Client) NextBlockID(slot ids.Slot) ids.BlockID {
	var id identity
	if p := c.identity.Load(); p != nil {
		id = *p
	}
	return ids.MakeBlockID(slot, id.incarnation, id.session, c.counter.Add(1))
}

// SetFloor installs the function that tells the lowest block counter that may
// still be committed, ids handed out by NextBlockID and not yet given up
// included; blocks below it that no file has are garbage. Without it nothing
// of a living session is. It must not wait.
func (c *Client) SetFloor(fn func() uint64) { c.floor.Store(&fn) }

// Valid reports whether the session is known to live at this moment: past it
// nothing cached may be served (data-path rule 34).
func (c *Client) Valid() bool { return int64(c.cfg.Sched.Now()) < c.valid.Load() }

// Map is the newest cluster map that is known; do not change it. Nil with NoSession.
func (c *Client) Map() *cluster.Map { return c.cmap.Load() }

// Close ends the session, as far as ctx and OpTimeout allow, and releases
// everything. Calls that are under way fail. Further calls do nothing.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	session, again := c.sessionLocked(), c.mu.closing
	c.mu.closing = true
	c.mu.Unlock()
	var err error
	if session != 0 && !again {
		err = c.do(ctx, &api.EndSessions{Sessions: []ids.Session{session}}, &api.Empty{}, true)
		if errkind.Of(err) == errkind.Expired {
			err = nil // it had ended already, or this is the answer to a retry
		}
	}
	c.shutdown()
	return err
}

func (c *Client) sessionLocked() ids.Session {
	if c.mu.win == nil {
		return 0
	}
	return c.mu.win.session
}

// shutdown fails what waits and waits for the tasks.
func (c *Client) shutdown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.closing, c.mu.closed = true, true
	c.stop()
	if c.mu.link != nil {
		c.mu.link.conn.Close()
	}
	for _, k := range c.ordered() {
		c.finish(k, nil, errkind.Unavailable.Wrap("%s: the metadata client was closed", k.kind))
	}
	for _, k := range append(c.mu.waitMut, c.mu.waitQry...) {
		k.err = errkind.Unavailable.Wrap("%s: the metadata client was closed", k.kind)
		k.done = true
		k.cond.Signal()
	}
	c.mu.waitMut, c.mu.waitQry = nil, nil
	c.wake.Broadcast()
	for c.mu.tasks > 0 {
		c.ready.Wait()
	}
}
