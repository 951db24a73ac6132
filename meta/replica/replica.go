package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// Bounds of what waits for the loop.
const (
	maxInbox      = 4096
	maxInboxBytes = 64 << 20
	maxBarriers   = 1 << 20
)

// Replica is one member of the group. All methods are safe for concurrent use.
type Replica struct {
	cfg     Config
	log     *log.Log
	storage *log.Storage
	over    *kv.Overlay
	loop    loop       // belongs to the loop's task
	wake    sched.Cond // of the loop
	work    sched.Cond // of the disk task
	ended   sched.Cond // of Close
	mu      struct {
		sync.Mutex
		queue      []proposal
		queued     int  // bytes in queue
		hold       bool // the queue waits for the append under way
		barriers   []barrier
		inbox      []*pb.Message
		inboxBytes int
		events     []func() // to run in the loop
		disk       []diskJob
		receiving  bool
		flushing   bool // a flush writes to the store
		status     Status
		newborn    bool // as of the last round
		closing    bool
		dead       bool
		tasks      int
	}
}

type proposal struct {
	cmd  []byte
	done func([]byte, error)
	at   time.Duration
}

type barrier struct {
	done func(error)
	at   time.Duration
}

// Open recovers the state and starts the replica's tasks. It refuses a log and
// a store that do not fit together, and damaged ones.
func Open(cfg Config) (*Replica, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	l, err := log.Open(cfg.FS, "log", log.Options{SegmentSize: cfg.SegmentSize})
	if err != nil {
		return nil, err
	}
	r := &Replica{cfg: cfg, log: l, storage: l.Storage(onlyGroup)}
	if err := r.start(); err != nil {
		l.Abandon()
		return nil, err
	}
	return r, nil
}

func (r *Replica) start() error {
	st, err := recoverState(&r.cfg, r.log)
	if err != nil {
		return err
	}
	r.over = kv.NewOverlay(r.cfg.Store, st.hash)
	r.storage.SetSnapshot(st.marker())
	node, err := NewNode(NodeConfig{
		ID: r.cfg.ID, Voters: st.voters, Storage: r.storage, Applied: st.index, Newborn: st.newborn,
		ElectionTicks: r.cfg.ElectionTicks,
		StallTicks:    r.cfg.StallTicks, Random: r.cfg.Sched.Uint64, Log: r.cfg.Log,
	})
	if err != nil {
		return err
	}
	r.loop = loop{node: node, applied: *st, flushed: *st, lastFlush: r.cfg.Sched.Now()}
	r.loop.watch.init(len(st.voters))
	r.wake = r.cfg.Sched.NewCond(&r.mu.Mutex)
	r.work = r.cfg.Sched.NewCond(&r.mu.Mutex)
	r.ended = r.cfg.Sched.NewCond(&r.mu.Mutex)
	r.publish()
	r.task("raft loop", r.run)
	r.task("raft disk", r.runDisk)
	return nil
}

// task starts a task that Close waits for.
func (r *Replica) task(name string, fn func()) {
	r.mu.Lock()
	r.mu.tasks++
	r.mu.Unlock()
	r.cfg.Sched.Go(name, func() {
		defer func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.mu.tasks--
			r.ended.Broadcast()
		}()
		fn()
	})
}

// Propose asks for cmd, which is kept and must not change, to be applied, and
// calls done exactly once with Apply's reply, or with an error of kind
// NotLeader (nothing happened; the text names the leader when it is known),
// Busy (queue full), TooBig, Internal (Apply panicked), Unavailable
// (leadership was lost or the replica closed) or Timeout. After the last two
// the command may or may not be applied.
func (r *Replica) Propose(cmd []byte, done func(reply []byte, err error)) {
	if err := r.enqueue(cmd, done); err != nil {
		done(nil, err)
	}
}

func (r *Replica) enqueue(cmd []byte, done func([]byte, error)) error {
	if len(cmd) > MaxCommand {
		return errkind.TooBig.Wrap("metadata command of %d bytes: at most %d", len(cmd), MaxCommand)
	}
	now := r.cfg.Sched.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.mu.closing || r.mu.dead:
		return r.stopped()
	case r.mu.queued+len(cmd) > r.cfg.QueueBytes:
		return errkind.Busy.Wrap("metadata server %d: %d bytes of commands wait already", r.cfg.ID, r.mu.queued)
	}
	r.mu.queue = append(r.mu.queue, proposal{cmd, done, now})
	r.mu.queued += len(cmd) + proposalOverhead
	if !r.mu.hold && len(r.mu.queue) == 1 {
		r.wake.Signal()
	}
	return nil
}

// proposalOverhead is about what a waiting command costs beside its bytes.
const proposalOverhead = 100

func (r *Replica) stopped() error {
	return errkind.Unavailable.Wrap("metadata server %d is stopping", r.cfg.ID)
}

// Barrier calls done once everything that was acknowledged anywhere before the
// call is applied here; errors as Propose's.
func (r *Replica) Barrier(done func(err error)) {
	now := r.cfg.Sched.Now()
	err := func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case r.mu.closing || r.mu.dead:
			return r.stopped()
		case len(r.mu.barriers) >= maxBarriers:
			return errkind.Busy.Wrap("metadata server %d: too many reads wait", r.cfg.ID)
		}
		r.mu.barriers = append(r.mu.barriers, barrier{done, now})
		r.wake.Signal()
		return nil
	}()
	if err != nil {
		done(err)
	}
}

// View calls fn with a consistent view of everything applied. It does not hold
// up Apply. fn must be short (well under a second) and must not wait.
func (r *Replica) View(fn func(kv.Reader) error) error {
	r.mu.Lock()
	dead := r.mu.dead
	r.mu.Unlock()
	if dead {
		return r.stopped()
	}
	return r.over.View(fn)
}

// Status returns the replica's progress.
func (r *Replica) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.status
}

// Kinds of what members send each other: the first byte of a message.
const (
	messageRaft   = 1
	messageReport = 2 // of a follower's hash
	messageStop   = 3 // the receiver's state differs from the majority's
	messageReborn = 4 // the sender lost its log behind the index
)

// StepMessage takes a message that member from sent with Transport.Send. The
// bytes are kept. Messages are dropped when too many wait.
func (r *Replica) StepMessage(from uint64, data []byte) error {
	if len(data) == 0 {
		return errkind.Invalid.Wrap("empty message from metadata server %d", from)
	}
	switch data[0] {
	case messageRaft:
		return r.stepRaft(from, data[1:])
	case messageReport, messageStop, messageReborn:
		return r.stepReport(from, data)
	}
	return errkind.Version.Wrap("message of kind %d from metadata server %d", data[0], from)
}

func (r *Replica) stepRaft(from uint64, data []byte) error {
	m := &pb.Message{}
	if err := proto.Unmarshal(data, m); err != nil {
		return errkind.Invalid.Wrap("raft message from metadata server %d: %v", from, err)
	}
	if m.GetFrom() != from || m.GetTo() != r.cfg.ID || m.GetType() == pb.MsgSnap || m.GetType() == pb.MsgProp {
		return errkind.Invalid.Wrap("raft message %s from %d to %d arrived at %d from %d",
			m.GetType(), m.GetFrom(), m.GetTo(), r.cfg.ID, from)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.inbox) >= maxInbox || r.mu.inboxBytes+len(data) > maxInboxBytes || r.mu.dead {
		return nil // raft sends again
	}
	r.mu.inbox = append(r.mu.inbox, m)
	r.mu.inboxBytes += len(data)
	r.wake.Signal()
	return nil
}

// post runs fn in the loop.
func (r *Replica) post(fn func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.events = append(r.mu.events, fn)
	r.wake.Signal()
}

// fail ends the replica: it serves nothing any more and tells the process.
func (r *Replica) fail(err error) {
	r.mu.Lock()
	first := !r.mu.dead
	r.mu.dead = true
	r.wake.Broadcast()
	r.work.Broadcast()
	r.mu.Unlock()
	if first {
		r.cfg.Fatal(fmt.Errorf("metadata server %d: %w", r.cfg.ID, err))
	}
}

// Kill ends the tasks at once, as the death of the process would: nothing is
// flushed. For simulations.
func (r *Replica) Kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.dead = true
	r.wake.Broadcast()
	r.work.Broadcast()
}

// Close flushes, stops the tasks and fails what waits with Unavailable. The
// store stays open: it belongs to the caller. It returns ctx's error when the
// tasks (a write to a hung disk) do not end in time.
func (r *Replica) Close(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.closing = true
	r.wake.Broadcast()
	for r.mu.tasks > 0 {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("close metadata replica %d: %w", r.cfg.ID, err)
		}
		r.ended.WaitFor(50 * time.Millisecond)
	}
	return nil
}
