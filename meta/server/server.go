// Package server is the metadata service's leader logic: it takes requests off
// streams, proposes mutations, answers queries behind a leadership check, and
// keeps in memory what need not be logged: sessions' terms, open inodes, lock
// waiters, heartbeats, jobs. It is a stepper over internal/sched: the gRPC
// shell and the simulation drive the same code through Serve.
//
// Lock order: order.Mutex, then Server.mu, then Stream.mu. Propose is called
// with order alone held (so that logged time and log order agree), Barrier and
// View with none.
package server

import (
	"log/slog"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica"
)

// Replica is what the server needs of meta/replica. Propose and Barrier never
// wait; their callbacks run in any task, perhaps before the call returns.
type Replica interface {
	Propose(cmd []byte, done func(reply []byte, err error))
	Barrier(done func(err error))
	View(fn func(kv.Reader) error) error
	Status() replica.Status
}

// Times of the leader.
const (
	term           = meta.TermMillis * time.Millisecond // of a session
	endAfter       = 10 * time.Minute                   // a suspect session ends
	downAfter      = 5 * time.Second                    // a chunk server without heartbeat
	deadAfter      = 10 * time.Minute                   // a disk without server
	lateAfter      = 3 * time.Second                    // a missing chunk is its writer's to finish
	deleteAfter    = 10 * time.Second                   // a chunk after its last reference
	tickEvery      = time.Second
	helloLimit     = 5 * time.Second
	stallLimit     = 30 * time.Second // a stream that takes none of its replies
	jobLimit       = 5 * time.Minute
	jobBackoff     = 30 * time.Second
	jobUnsupported = time.Hour        // until a job is tried again that no server could do
	usageEvery     = 30 * time.Second // at most so often free space alone is logged
	workers        = 4                // that answer queries
	maxParked      = 1 << 16          // requests that wait for a new leader to be ready
	maxParkedBytes = 256 << 20
	maxInflight    = 2048 // requests of one stream before no more is read
	maxStreams     = 1 << 16
	maxStreamOut   = 8 << 20 // bytes of replies a stream may leave before no more is read
)

// Config is what a server needs.
type Config struct {
	Replica Replica
	Sched   sched.Sched
	Log     *slog.Logger
	// Cluster is the id that a new cluster gets; random when zero. An existing
	// cluster keeps its own.
	Cluster ids.UUID
	// Layout is the root's when the cluster is founded.
	Layout   ids.Layout
	UID, GID uint32 // of the root directory
}

// Server serves one metadata server's streams. All methods are safe for
// concurrent use.
type Server struct {
	cfg   Config
	order struct {
		sync.Mutex
		last int64 // time of the last proposed command
	}
	mu struct {
		sync.Mutex
		closed  bool
		tasks   int
		streams map[uint64]*Stream
		nextNum uint64
		cluster ids.UUID // known once founded
		lead    *leader  // nil while following
		reads   reads
	}
	readable sched.Cond // reads.ready is not empty
	wake     sched.Cond // the background task: something to do, or the end
	idle     sched.Cond // a task ended
}

// New starts a server. The caller passes the replica's OnLeader on to the
// method of the same name.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg}
	s.readable, s.wake, s.idle = cfg.Sched.NewCond(&s.mu), cfg.Sched.NewCond(&s.mu), cfg.Sched.NewCond(&s.mu)
	s.mu.streams = make(map[uint64]*Stream)
	s.start("meta-leader", s.runLeader)
	for range workers {
		s.start("meta-query", s.runQueries)
	}
	return s
}

// start runs fn as a task that Close waits for.
func (s *Server) start(name string, fn func()) {
	s.mu.Lock()
	s.mu.tasks++
	s.mu.Unlock()
	s.cfg.Sched.Go(name, func() {
		defer func() {
			s.mu.Lock()
			s.mu.tasks--
			s.idle.Broadcast()
			s.mu.Unlock()
		}()
		fn()
	})
}

// OnLeader tells that this server began to lead in term, or stopped.
func (s *Server) OnLeader(leading bool, raftTerm uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return
	}
	s.dropLeader()
	if leading {
		s.mu.lead = newLeader(raftTerm, s.cfg.Sched.Now())
		s.cfg.Log.Info("metadata: leading", "term", raftTerm)
	}
	s.wake.Broadcast()
}

// dropLeader refuses what waits for the leader that was; with mu held.
func (s *Server) dropLeader() {
	old := s.mu.lead
	if old == nil {
		return
	}
	s.mu.lead = nil
	for _, p := range old.parked {
		p.stream.refuse(p.id, errkind.NotLeader, "this server leads no longer", "")
	}
	for _, h := range old.leases.held {
		h.stream.refuse(h.id, errkind.NotLeader, "this server leads no longer", "")
	}
	for _, w := range old.locks.all() {
		w.stream.refuse(w.id, errkind.NotLeader, "this server leads no longer", "")
	}
}

// Close ends all streams and waits for the tasks. Callbacks of the replica that
// come later do nothing.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.dropLeader()
	for _, n := range sortedKeys(s.mu.streams) {
		s.mu.streams[n].kill("the server stops")
	}
	s.readable.Broadcast()
	s.wake.Broadcast()
	for s.mu.tasks > 0 || len(s.mu.streams) > 0 {
		s.idle.Wait()
	}
}

// proposal is a command on its way to the log; done is called without locks.
type proposal struct {
	cmd  []byte
	done func(reply []byte, err error)
}

// propose stamps a command with logged time and hands it to the replica.
func (s *Server) propose(p proposal) {
	s.order.Lock()
	defer s.order.Unlock()
	s.order.last = max(s.order.last+1, s.cfg.Sched.Wall().UnixNano())
	stamp(p.cmd, s.order.last)
	s.cfg.Replica.Propose(p.cmd, p.done)
}

// command proposes one of the leader's own; done, which may be nil, is called
// without locks with the body of the reply, or with the failure that it tells.
func (s *Server) command(req api.Request, done func(body []byte, err error)) {
	cmd := api.EncodeRequest(&api.Header{}, req)
	s.propose(proposal{cmd: cmd, done: func(reply []byte, err error) {
		var body []byte
		if err == nil {
			body, err = replyBody(reply)
		}
		if err != nil {
			s.cfg.Log.Debug("metadata: own command", "kind", req.Kind(), "err", err)
		}
		if done != nil {
			done(body, err)
		}
	}})
}
