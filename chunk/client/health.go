package client

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Bounds of the health table.
const (
	minSilence   = 50 * time.Millisecond // rule 23
	pingInterval = 100 * time.Millisecond
	maxPingPause = 2 * time.Second
	sampleCount  = 33
)

// samples keeps the last few durations of one kind and their median.
type samples struct {
	ring [sampleCount]time.Duration
	n    int
}

func (s *samples) add(d time.Duration) {
	s.ring[s.n%sampleCount] = d
	s.n++
}

func (s *samples) median() time.Duration {
	k := min(s.n, sampleCount)
	if k == 0 {
		return 0
	}
	sorted := slices.Clone(s.ring[:k])
	slices.Sort(sorted)
	return sorted[k/2]
}

// health is what this mount knows of the servers: which are out (rule 23), how
// long requests wait at each, and how long grants, small stores and reads take.
type health struct {
	c  *Client
	mu struct {
		sync.Mutex
		servers map[ids.ServerID]*serverHealth
		grants  samples
		stores  samples
		reads   samples
		closed  bool
		tasks   int // pings in flight
	}
	cond sched.Cond // broadcast when a server comes back, and as pings end
}

type serverHealth struct {
	out     bool
	probing bool // a ping decides whether it is out
	pause   time.Duration
	delay   time.Duration // queue delay that it reported last
	cancel  func()
	timer   sched.Timer
}

func newHealth(c *Client) *health {
	h := &health{c: c}
	h.mu.servers = make(map[ids.ServerID]*serverHealth)
	h.cond = c.sched.NewCond(&h.mu)
	return h
}

// get is called with the lock held.
func (h *health) get(id ids.ServerID) *serverHealth {
	s := h.mu.servers[id]
	if s == nil {
		s = &serverHealth{}
		h.mu.servers[id] = s
	}
	return s
}

func (h *health) isOut(id ids.ServerID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.mu.servers[id]
	return s != nil && s.out
}

// observe notes the queue delay that came with a reply.
func (h *health) observe(id ids.ServerID, delay time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.get(id).delay = delay
}

func (h *health) delay(id ids.ServerID) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.get(id).delay
}

// silence is how long a grant may take before its server is out.
func (h *health) silence() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(minSilence, 3*h.mu.grants.median())
}

func (h *health) granted(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.grants.add(d)
}

func (h *health) stored(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.stores.add(d)
}

func (h *health) storeSilence() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(minSilence, 3*h.mu.stores.median())
}

func (h *health) fetched(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.reads.add(d)
}

func (h *health) readMedian() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.reads.median()
}

// fail marks a server out; pings go on in the background until it answers one.
func (h *health) fail(p peer, why string) {
	h.mu.Lock()
	s := h.get(p.server)
	if s.out || h.mu.closed {
		s.out = true
		h.mu.Unlock()
		return
	}
	s.out, s.pause = true, pingInterval
	start := !s.probing
	h.mu.Unlock()
	h.c.log.Info("chunk server is out", "server", p.server, "addr", p.addr, "why", why)
	if start {
		h.ping(p, time.Second)
	}
}

// probe asks a suspect whether it is there: it is out if no answer comes in time.
func (h *health) probe(p peer) {
	limit := h.silence()
	h.mu.Lock()
	s := h.get(p.server)
	if s.out || s.probing || h.mu.closed {
		h.mu.Unlock()
		return
	}
	s.probing, s.pause = true, pingInterval
	h.mu.Unlock()
	h.ping(p, limit)
}

// ping sends one ping; its outcome decides about the next.
func (h *health) ping(p peer, limit time.Duration) {
	h.mu.Lock()
	if h.mu.closed {
		h.mu.Unlock()
		return
	}
	h.mu.tasks++
	h.mu.Unlock()
	cancel := h.c.send(p, &wire.Request{Op: wire.OpPing}, limit, func(r reply) { h.pinged(p, r) })
	h.mu.Lock()
	h.get(p.server).cancel = cancel
	h.mu.Unlock()
}

func (h *health) pinged(p peer, r reply) {
	alive := r.Response != nil // any answer will do
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.tasks--
	s := h.get(p.server)
	was := s.out
	s.probing, s.out, s.cancel = false, !alive, nil
	h.cond.Broadcast()
	if alive {
		if was {
			h.c.log.Info("chunk server is back", "server", p.server, "addr", p.addr)
		}
		return
	}
	if h.mu.closed {
		return
	}
	s.probing = true
	s.timer = h.c.sched.AfterFunc(s.pause, func() { h.again(p) })
	s.pause = min(2*s.pause, maxPingPause)
}

// again pings once more, at the address that the newest map gives; a server
// that has left the map is forgotten.
func (h *health) again(p peer) {
	if m := h.c.cfg.Map(); m != nil {
		s := m.Server(p.server)
		if s == nil {
			h.mu.Lock()
			delete(h.mu.servers, p.server)
			h.mu.Unlock()
			return
		}
		p.addr = s.Addr
	}
	h.ping(p, time.Second)
}

// waitChange waits until some server comes back, at most d; false when the
// client is closed: then none will be asked any more.
func (h *health) waitChange(d time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.mu.closed {
		h.cond.WaitFor(d)
	}
	return !h.mu.closed
}

// close ends the pings and waits for those in flight.
func (h *health) close() {
	h.mu.Lock()
	h.mu.closed = true
	cancels := make([]func(), 0, len(h.mu.servers))
	for _, id := range slices.Sorted(maps.Keys(h.mu.servers)) {
		s := h.mu.servers[id]
		if s.timer != nil {
			s.timer.Stop()
		}
		if s.cancel != nil {
			cancels = append(cancels, s.cancel)
		}
	}
	h.cond.Broadcast()
	h.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.mu.tasks > 0 {
		h.cond.Wait()
	}
}
