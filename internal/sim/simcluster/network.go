package simcluster

import (
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/sim"
)

// network decides what happens to messages between the nodes, which are named
// by their addresses.
type network struct {
	world    *sim.World
	maxDelay time.Duration
	conns    []*conn // that have not ended, oldest first
	cut      map[[2]string]bool
	up       map[string]bool
	slow     map[string]time.Duration // added to what such a node sends or gets
}

func newNetwork(w *sim.World, maxDelay time.Duration) *network {
	return &network{
		world: w, maxDelay: maxDelay,
		cut: map[[2]string]bool{}, up: map[string]bool{}, slow: map[string]time.Duration{},
	}
}

// Times of the network.
const (
	stallCheck  = 20 * time.Millisecond // how often a message that cannot pass looks again
	dialLimit   = 2 * time.Second       // a connection attempt that nobody answers
	silentLimit = 15 * time.Second      // a chunk server that answers nothing is given up
)

func pair(a, b string) [2]string {
	if b < a {
		a, b = b, a
	}
	return [2]string{a, b}
}

// partitioned reports whether nothing passes between a and b now.
func (n *network) partitioned(a, b string) bool { return n.cut[pair(a, b)] }

// delay is how long the next message between a and b takes: mostly short, now
// and then much longer.
func (n *network) delay(a, b string) time.Duration {
	rng := n.world.Rand()
	d := 20*time.Microsecond + time.Duration(rng.Int64N(int64(n.maxDelay)))
	if rng.IntN(200) == 0 {
		d *= 20
	}
	return d + n.slow[a] + n.slow[b]
}

// conn is one connection. Messages in one direction arrive in order, or not at
// all once the connection has ended.
type conn struct {
	net   *network
	nodes [2]string
	ways  [2]way    // by the sending end
	lost  [2]func() // called once when an end learns that the connection has ended
	over  bool
}

// way is one direction of a connection.
type way struct {
	queue   []parcel
	last    time.Duration // when the newest message arrives
	running bool          // a timer for the head of the queue is set
}

type parcel struct {
	at time.Duration
	fn func()
}

// connect opens a connection from a to b: false when nobody listens there, or
// nothing passes for too long. It waits.
func (n *network) connect(a, b string) (*conn, bool) {
	n.world.Sleep(2 * n.delay(a, b))
	for end := n.world.Now() + dialLimit; n.partitioned(a, b); n.world.Sleep(stallCheck) {
		if n.world.Now() > end {
			return nil, false
		}
	}
	if !n.up[a] || !n.up[b] {
		return nil, false
	}
	c := &conn{net: n, nodes: [2]string{a, b}}
	n.conns = append(n.conns, c)
	return c, true
}

// deliver runs fn when a message that end sends now has arrived.
func (c *conn) deliver(end int, fn func()) {
	if c.over {
		return
	}
	w := &c.ways[end]
	w.last = max(w.last, c.net.world.Now()+c.net.delay(c.nodes[0], c.nodes[1]))
	w.queue = append(w.queue, parcel{w.last, fn})
	c.wind(w)
}

func (c *conn) wind(w *way) {
	if !w.running {
		w.running = true
		c.net.world.AfterFunc(w.queue[0].at-c.net.world.Now(), func() { c.arrive(w) })
	}
}

func (c *conn) arrive(w *way) {
	w.running = false
	for len(w.queue) > 0 && !c.over && w.queue[0].at <= c.net.world.Now() {
		if c.net.partitioned(c.nodes[0], c.nodes[1]) {
			w.queue[0].at = c.net.world.Now() + stallCheck
			break
		}
		fn := w.queue[0].fn
		w.queue = w.queue[1:]
		fn()
	}
	if len(w.queue) > 0 && !c.over {
		c.wind(w)
	}
}

// end ends the connection. Each end learns of it: the one at fault at once, the
// other after a while, and not before a partition has healed.
func (c *conn) end(fault int) {
	if c.over {
		return
	}
	c.over = true
	c.net.conns = slices.DeleteFunc(c.net.conns, func(x *conn) bool { return x == c })
	c.tell(fault)
	c.net.world.AfterFunc(c.net.delay(c.nodes[0], c.nodes[1]), func() { c.tellLater(1 - fault) })
}

func (c *conn) tellLater(end int) {
	if c.net.partitioned(c.nodes[0], c.nodes[1]) {
		c.net.world.AfterFunc(stallCheck, func() { c.tellLater(end) })
		return
	}
	c.tell(end)
}

func (c *conn) tell(end int) {
	if fn := c.lost[end]; fn != nil {
		c.lost[end] = nil
		fn()
	}
}

// finish closes the connection from one end; what was sent before arrives.
func (c *conn) finish(end int) { c.deliver(end, func() { c.end(end) }) }

// crash ends all connections of a node, which then listens no more.
func (n *network) crash(node string) {
	n.up[node] = false
	for _, c := range slices.Clone(n.conns) {
		if i := slices.Index(c.nodes[:], node); i >= 0 {
			c.end(i)
		}
	}
}

// drop ends the connections between two nodes.
func (n *network) drop(a, b string) {
	for _, c := range slices.Clone(n.conns) {
		if pair(c.nodes[0], c.nodes[1]) == pair(a, b) {
			c.end(0)
		}
	}
}
