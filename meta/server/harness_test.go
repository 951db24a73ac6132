package server_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/client"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica"
	"github.com/ckptfs/ckptfs/meta/server"
	"github.com/ckptfs/ckptfs/meta/stream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// group is a replicated state machine in memory: one state, members that can
// be made leader, commands applied by one task.
type group struct {
	sched sched.Sched
	over  *kv.Overlay
	mu    struct {
		sync.Mutex
		leader  int // index of the member that leads, −1: none
		term    uint64
		index   uint64
		applied int // commands
		queue   []queued
		closed  bool
		paused  bool  // nothing is applied
		broken  error // of every Barrier
	}
	wake    sched.Cond
	members []*member
}

type queued struct {
	from *member
	cmd  []byte
	done func([]byte, error)
}

type member struct {
	g    *group
	n    int
	addr string
	srv  *server.Server
}

func newGroup(s sched.Sched, n int) *group {
	g := &group{sched: s, over: kv.NewOverlay(kv.NewMem(), 0)}
	g.wake = s.NewCond(&g.mu)
	g.mu.leader = -1
	for i := range n {
		m := &member{g: g, n: i, addr: fmt.Sprintf("meta%d", i)}
		m.srv = server.New(server.Config{Replica: m, Sched: s, Layout: ids.RS(4, 2)})
		g.members = append(g.members, m)
	}
	s.Go("apply", g.run)
	return g
}

func (g *group) run() {
	for {
		batch := g.take()
		if batch == nil {
			return
		}
		for _, q := range batch {
			reply, err := g.apply(&q)
			q.done(reply, err)
		}
	}
}

func (g *group) take() []queued {
	g.mu.Lock()
	defer g.mu.Unlock()
	for (len(g.mu.queue) == 0 || g.mu.paused) && !g.mu.closed {
		g.wake.Wait()
	}
	batch := g.mu.queue
	g.mu.queue = nil
	return batch
}

func (g *group) apply(q *queued) (reply []byte, err error) {
	g.mu.Lock()
	leads := g.mu.leader == q.from.n
	g.mu.index++
	g.mu.applied++
	index := g.mu.index
	g.mu.Unlock()
	if !leads {
		return nil, errkind.Unavailable.Wrap("leadership was lost")
	}
	err = g.over.Apply(func(b *kv.Batch) error {
		return b.Do(func(t kv.Txn) error {
			reply, err = meta.New().Apply(t, index, q.cmd)
			return err
		})
	})
	return reply, err
}

// lead makes member n the leader, −1 none.
func (g *group) lead(n int) {
	g.mu.Lock()
	old := g.mu.leader
	g.mu.leader = n
	g.mu.term++
	term := g.mu.term
	g.mu.Unlock()
	if old >= 0 {
		g.members[old].srv.OnLeader(false, term)
	}
	if n >= 0 {
		g.members[n].srv.OnLeader(true, term)
	}
}

func (g *group) pause(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.paused = on
	g.wake.Broadcast()
}

func (g *group) close() {
	for _, m := range g.members {
		m.srv.Close()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.closed = true
	g.wake.Broadcast()
}

func (g *group) view(t *testing.T, fn func(kv.Reader) error) {
	t.Helper()
	require.NoError(t, g.over.View(fn))
}

// Propose queues a command.
func (m *member) Propose(cmd []byte, done func([]byte, error)) {
	m.g.mu.Lock()
	leads := m.g.mu.leader == m.n && !m.g.mu.closed
	if leads {
		m.g.mu.queue = append(m.g.mu.queue, queued{m, cmd, done})
		m.g.wake.Signal()
	}
	m.g.mu.Unlock()
	if !leads {
		done(nil, errkind.NotLeader)
	}
}

// Barrier checks the leadership.
func (m *member) Barrier(done func(error)) {
	m.g.mu.Lock()
	err := m.g.mu.broken
	if m.g.mu.leader != m.n {
		err = errkind.NotLeader
	}
	m.g.mu.Unlock()
	done(err)
}

// View reads the state.
func (m *member) View(fn func(kv.Reader) error) error { return m.g.over.View(fn) }

// Status tells who leads.
func (m *member) Status() replica.Status {
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	st := replica.Status{ID: uint64(m.n + 1), Term: m.g.mu.term, Applied: m.g.mu.index}
	for _, x := range m.g.members {
		st.Members = append(st.Members, replica.Member{ID: uint64(x.n + 1), Addr: x.addr, Leader: x.n == m.g.mu.leader})
	}
	if l := m.g.mu.leader; l >= 0 {
		st.Leader, st.LeaderAddr = uint64(l+1), m.g.members[l].addr
	}
	return st
}

// network connects clients to the members in memory, and can be made to fail.
type network struct {
	g  *group
	mu struct {
		sync.Mutex
		down  map[string]bool
		drop  func(msg []byte) bool // whether a message to a client is lost, with its connection
		conns []stream.Conn
	}
}

// Connect opens a pipe to the member.
func (n *network) Connect(_ context.Context, addr string) (stream.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.down[addr] {
		return nil, errkind.Unavailable.Wrap("%s is down", addr)
	}
	for _, m := range n.g.members {
		if m.addr == addr {
			cl, sv := stream.Pipe(n.g.sched)
			n.g.sched.Go("serve", func() { m.srv.Serve(sv) })
			n.mu.conns = append(n.mu.conns, cl)
			return &lossy{Conn: cl, net: n}, nil
		}
	}
	return nil, errkind.Unavailable.Wrap("no server at %s", addr)
}

// cut closes all connections.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.mu.conns {
		c.Close()
	}
	n.mu.conns = nil
}

type lossy struct {
	stream.Conn
	net *network
}

// Recv loses the messages that the network drops.
func (l *lossy) Recv() ([]byte, error) {
	msg, err := l.Conn.Recv()
	if err != nil {
		return nil, err
	}
	l.net.mu.Lock()
	drop := l.net.mu.drop
	l.net.mu.Unlock()
	if drop != nil && drop(msg) {
		l.Close()
		return nil, errors.New("the reply was lost")
	}
	return msg, nil
}

// simulated is a group with clients in a simulated world.
type simulated struct {
	t *testing.T
	*sim.World
	g   *group
	net *network
}

// simulate runs fn as a task of a world with n members, the first leading.
func simulate(t *testing.T, n int, fn func(c *simulated)) {
	t.Helper()
	runWorld(t, uint64(len(t.Name())), n, fn)
}

// runWorld is simulate with a seed; it returns the hash of the trace.
func runWorld(t *testing.T, seed uint64, n int, fn func(c *simulated)) uint64 {
	t.Helper()
	w := sim.NewWorld(seed)
	defer w.Close()
	done := false
	w.Go("test", func() {
		defer func() { done = true }()
		c := &simulated{t: t, World: w, g: newGroup(w, n)}
		c.net = &network{g: c.g}
		c.net.mu.down = make(map[string]bool)
		c.g.lead(0)
		fn(c)
		c.g.close()
	})
	require.NoError(t, w.Run(2*time.Hour, func() bool { return done }))
	return w.TraceHash()
}

func (c *simulated) config(name string) client.Config {
	cfg := client.Config{Name: name, Host: "host", Sched: c.World, Transport: c.net, OpTimeout: time.Minute}
	for _, m := range c.g.members {
		cfg.Addrs = append(cfg.Addrs, m.addr)
	}
	return cfg
}

func (c *simulated) dial(name string) *client.Client {
	c.t.Helper()
	cl, err := client.Dial(context.Background(), c.config(name))
	require.NoError(c.t, err)
	return cl
}

// all runs n tasks and waits for them.
func (c *simulated) all(n int, fn func(i int)) {
	var mu sync.Mutex
	cond := c.NewCond(&mu)
	left := n
	for i := range n {
		c.Go("one", func() {
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				left--
				cond.Broadcast()
			}()
			fn(i)
		})
	}
	mu.Lock()
	defer mu.Unlock()
	for left > 0 {
		cond.Wait()
	}
}

func create(cl *client.Client, name string, open bool) (ids.Ino, error) {
	var e api.Entry
	err := cl.Do(context.Background(), &api.Create{
		Parent: ids.RootIno, Name: []byte(name), Mode: api.ModeRegular | 0o644, Exclusive: true, Open: open,
	}, &e)
	return e.Attr.Ino, err
}

func unlink(cl *client.Client, name string) error {
	return cl.Do(context.Background(), &api.Unlink{Parent: ids.RootIno, Name: []byte(name)}, nil)
}

func listing(t *testing.T, cl *client.Client) []string {
	t.Helper()
	var names []string
	var l api.Listing
	for cookie := uint64(0); !l.EOF; {
		require.NoError(t, cl.Do(context.Background(), &api.ReadDir{Ino: ids.RootIno, Cookie: cookie, Max: 1000}, &l))
		for _, e := range l.Entries {
			names = append(names, string(e.Name))
			cookie = e.Cookie
		}
	}
	return names
}
