package replica

import (
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// maxPack bounds the bytes proposed at once, and with them an append.
const maxPack = 8 << 20

// loop is what only the loop's task touches.
type loop struct {
	node      *Node
	applied   state
	flushed   state
	led       uint64 // term announced to OnLeader; zero while not leading
	packs     []*pack
	token     uint64
	barriers  []waiting
	appending int // appends of our own proposals that the disk has

	flushing   bool
	lastFlush  time.Duration
	sweeping   bool
	lastSweep  time.Duration
	sweepFrom  []byte
	installing bool
	incoming   *incoming
	watch      watch
}

// pack is one proposed log entry and whom to answer.
type pack struct {
	token, index, term uint64
	cmds               []proposal
}

// waiting is a barrier on its way: token until leadership is checked, then index.
type waiting struct {
	barrier
	token uint64
	index uint64
	known bool
}

type inputs struct {
	events   []func()
	messages []*pb.Message
	barriers []barrier
	closing  bool
	dead     bool
}

// run is the loop: it waits for inputs and feeds the node.
func (r *Replica) run() {
	defer r.endLoop()
	defer func() {
		if p := recover(); p != nil {
			r.fail(errkind.Internal.Wrap("the consensus loop: %v\n%s", p, debug.Stack()))
		}
	}()
	next := r.cfg.Sched.Now() + r.cfg.Tick
	if len(r.loop.applied.voters) == 1 {
		r.loop.node.Tick() // nobody to wait for
	}
	r.workOff()
	for {
		in := r.take(next)
		if in.dead {
			return
		}
		for _, fn := range in.events {
			fn()
		}
		for _, m := range in.messages {
			if err := r.loop.node.Step(m); err != nil {
				r.cfg.Log.Debug("raft message dropped", "from", m.GetFrom(), "error", err)
			}
		}
		if now := r.cfg.Sched.Now(); now >= next {
			// A late tick is one tick: after a pause the others come first.
			next = max(next+r.cfg.Tick, now+r.cfg.Tick/2)
			r.loop.node.Tick()
			r.everyTick(now)
		}
		r.takeBarriers(in.barriers)
		r.propose()
		r.workOff()
		if in.closing && !r.loop.flushing && !r.loop.installing {
			r.lastWrite()
			return
		}
		r.publish()
	}
}

// take waits for something to do, at most until next.
func (r *Replica) take(next time.Duration) inputs {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		m := &r.mu
		idle := len(m.events) == 0 && len(m.inbox) == 0 && len(m.barriers) == 0 && (len(m.queue) == 0 || m.hold)
		now := r.cfg.Sched.Now()
		if !idle || m.closing || m.dead || now >= next {
			in := inputs{m.events, m.inbox, m.barriers, m.closing, m.dead}
			if m.closing && idle && !m.dead && now < next && (r.loop.flushing || r.loop.installing) {
				r.wake.WaitFor(next - now)
				continue
			}
			m.events, m.inbox, m.barriers, m.inboxBytes = nil, nil, nil, 0
			return in
		}
		r.wake.WaitFor(next - now)
	}
}

func (r *Replica) takeBarriers(in []barrier) {
	l := &r.loop
	for _, b := range in {
		l.token++
		l.barriers = append(l.barriers, waiting{barrier: b, token: l.token})
		l.node.ReadBarrier(l.token)
	}
}

// propose packs what waits into entries, once the previous append is done.
func (r *Replica) propose() {
	l := &r.loop
	leads := l.node.leads()
	held := leads && (!l.node.Ready() || l.appending > 0 || l.watch.split || r.over.Bytes() > 4*r.cfg.FlushBytes)
	r.mu.Lock()
	r.mu.hold = held
	var batch []proposal
	if !held {
		batch = r.takeQueue()
		r.mu.hold = leads && len(batch) > 0
	}
	r.mu.Unlock()
	if !leads {
		for _, p := range batch {
			p.done(nil, r.notLeader())
		}
		return
	}
	for len(batch) > 0 {
		batch = r.proposePack(batch)
	}
}

// takeQueue takes at most maxPack bytes of commands. mu is held.
func (r *Replica) takeQueue() []proposal {
	size, n := 0, 0
	for n < len(r.mu.queue) && (n == 0 || size+len(r.mu.queue[n].cmd) <= maxPack) {
		size += len(r.mu.queue[n].cmd)
		n++
	}
	batch := r.mu.queue[:n:n]
	r.mu.queue = r.mu.queue[n:]
	r.mu.queued -= size + n*proposalOverhead
	if len(r.mu.queue) == 0 {
		r.mu.queue = nil
	}
	return batch
}

// proposePack makes one entry of the first commands and returns the rest.
func (r *Replica) proposePack(batch []proposal) []proposal {
	l := &r.loop
	size, n := 0, 0
	for n < len(batch) && (n == 0 || size+len(batch[n].cmd) <= MaxEntry) {
		size += len(batch[n].cmd) + 5
		n++
	}
	data := make([]byte, 0, size+8)
	for _, p := range batch[:n] {
		data = appendCommand(data, p.cmd)
	}
	l.token++
	if err := l.node.Propose(data, l.token); err != nil {
		for _, p := range batch[:n] {
			p.done(nil, errkind.Unavailable.Wrap("propose to metadata server %d: %v", r.cfg.ID, err))
		}
		return batch[n:]
	}
	l.packs = append(l.packs, &pack{token: l.token, cmds: batch[:n]})
	return batch[n:]
}

// workOff does what the node asks for until nothing is left.
func (r *Replica) workOff() {
	l := &r.loop
	for {
		w := l.node.Work()
		for _, a := range w.Assigned {
			for _, p := range l.packs {
				if p.token == a.Token {
					p.index, p.term = a.Index, a.Term
				}
			}
		}
		for _, a := range w.Append {
			r.store(a, len(w.Assigned) > 0)
		}
		r.send(w.Messages)
		r.apply(&w)
		r.readPoints(&w)
		r.announce()
		r.passBarriers()
		if len(w.Append)+len(w.Messages)+len(w.Committed)+len(w.Reads)+len(w.Refused) == 0 {
			return
		}
	}
}

func (r *Replica) readPoints(w *Work) {
	l := &r.loop
	for _, p := range w.Reads {
		if i := slices.IndexFunc(l.barriers, func(b waiting) bool { return b.token == p.Token }); i >= 0 {
			l.barriers[i].index, l.barriers[i].known = p.Index, true
		}
	}
	for _, t := range w.Refused {
		if i := slices.IndexFunc(l.barriers, func(b waiting) bool { return b.token == t }); i >= 0 {
			b := l.barriers[i]
			l.barriers = slices.Delete(l.barriers, i, i+1)
			b.done(r.notLeader())
		}
	}
}

// passBarriers answers the barriers whose read point is applied.
func (r *Replica) passBarriers() {
	l := &r.loop
	ready := l.barriers[:0:0]
	rest := l.barriers[:0]
	for _, b := range l.barriers {
		if b.known && b.index <= l.applied.index {
			ready = append(ready, b)
		} else {
			rest = append(rest, b)
		}
	}
	clear(l.barriers[len(rest):])
	l.barriers = rest
	for _, b := range ready {
		b.done(nil)
	}
}

// announce tells the start and the end of leadership, in order.
func (r *Replica) announce() {
	l := &r.loop
	term := uint64(0)
	if l.node.Ready() {
		_, term = l.node.Leader()
	}
	if term == l.led {
		return
	}
	if l.led != 0 {
		r.cfg.Log.Info("this metadata server leads no more", "id", r.cfg.ID, "term", l.led)
		r.cfg.OnLeader(false, l.led)
		r.dropPacks(errkind.Unavailable.Wrap("metadata server %d lost its leadership: "+
			"whether the command will be applied is unknown", r.cfg.ID))
	}
	l.led = term
	l.watch.reset()
	if term != 0 {
		r.mu.Lock()
		r.mu.hold = false // what waited for the first entry can be proposed now
		r.mu.Unlock()
		r.cfg.Log.Info("this metadata server leads", "id", r.cfg.ID, "term", term)
		r.cfg.OnLeader(true, term)
	}
}

func (r *Replica) dropPacks(err error) {
	l := &r.loop
	packs := l.packs
	l.packs, l.appending = nil, 0
	for _, p := range packs {
		for _, c := range p.cmds {
			c.done(nil, err)
		}
	}
}

func (r *Replica) notLeader() error {
	id, _ := r.loop.node.Leader()
	if addr := r.cfg.Peers[id]; id != 0 && id != r.cfg.ID {
		return errkind.NotLeader.Wrap("metadata server %d does not lead; server %d at %s does", r.cfg.ID, id, addr)
	}
	return errkind.NotLeader.Wrap("metadata server %d does not lead, and no leader is known", r.cfg.ID)
}

// send marshals the messages, grouped by receiver in the order of first mention.
func (r *Replica) send(messages []*pb.Message) {
	var order []uint64
	for _, m := range messages {
		if !slices.Contains(order, m.GetTo()) {
			order = append(order, m.GetTo())
		}
	}
	for _, to := range order {
		var out [][]byte
		for _, m := range messages {
			if m.GetTo() != to {
				continue
			}
			if m.GetType() == pb.MsgSnap {
				r.sendCopy(m)
				continue
			}
			data, err := proto.MarshalOptions{}.MarshalAppend([]byte{messageRaft}, m)
			if err != nil {
				panic(fmt.Sprintf("marshal raft message: %v", err)) // it was made by raft
			}
			out = append(out, data)
		}
		if len(out) > 0 {
			r.cfg.Transport.Send(to, out)
		}
	}
}

// everyTick does what time asks for.
func (r *Replica) everyTick(now time.Duration) {
	r.expire(now)
	r.flushIfDue(now)
	r.sweepIfDue(now)
	r.report()
}

// expire answers what has waited too long.
func (r *Replica) expire(now time.Duration) {
	l := &r.loop
	old := now - r.cfg.ProposeLimit
	timeout := errkind.Timeout.Wrap("metadata server %d: no answer within %s; "+
		"whether the command will be applied is unknown", r.cfg.ID, r.cfg.ProposeLimit)
	r.mu.Lock()
	n := 0
	for n < len(r.mu.queue) && r.mu.queue[n].at < old {
		r.mu.queued -= len(r.mu.queue[n].cmd) + proposalOverhead
		n++
	}
	late := r.mu.queue[:n:n]
	r.mu.queue = r.mu.queue[n:]
	r.mu.Unlock()
	for _, p := range l.packs {
		if len(p.cmds) > 0 && p.cmds[len(p.cmds)-1].at < old {
			late = append(late, p.cmds...)
			p.cmds = nil
		}
	}
	for _, p := range late {
		p.done(nil, timeout)
	}
	for i := 0; i < len(l.barriers); {
		if b := l.barriers[i]; b.at < old {
			l.barriers = slices.Delete(l.barriers, i, i+1)
			b.done(timeout)
			continue
		}
		i++
	}
}

// publish makes the progress visible.
func (r *Replica) publish() {
	l := &r.loop
	leader, term := l.node.Leader()
	s := Status{
		ID: r.cfg.ID, Leader: leader, LeaderAddr: r.cfg.Peers[leader], Leading: l.led != 0, Term: term,
		Applied: l.applied.index, Flushed: l.flushed.index, Position: l.applied.position, Hash: l.applied.hash,
	}
	s.LogFirst, _ = r.storage.FirstIndex()
	s.LogLast, _ = r.storage.LastIndex()
	for _, id := range l.applied.voters {
		s.Members = append(s.Members, Member{ID: id, Addr: r.cfg.Peers[id], Leader: id == leader && id != raft.None})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.status = s
	_, r.mu.newborn = l.node.Newborn()
}

// endLoop answers everything that waits and lets the disk task end.
func (r *Replica) endLoop() {
	l := &r.loop
	if l.led != 0 {
		r.cfg.OnLeader(false, l.led)
		l.led = 0
	}
	r.mu.Lock()
	r.mu.closing = true
	queue, barriers := r.mu.queue, r.mu.barriers
	r.mu.queue, r.mu.barriers, r.mu.queued = nil, nil, 0
	r.mu.disk = append(r.mu.disk, diskJob{stop: true})
	r.work.Broadcast()
	r.mu.Unlock()
	r.dropPacks(r.stopped())
	for _, p := range queue {
		p.done(nil, r.stopped())
	}
	for _, b := range l.barriers {
		b.done(r.stopped())
	}
	for _, b := range barriers {
		b.done(r.stopped())
	}
	l.barriers = nil
	if l.incoming != nil {
		l.incoming.content.Abort()
	}
}

// snapshotMarker is the position that a raft snapshot names.
func snapshotMarker(s *pb.Snapshot) log.Marker {
	m := s.GetMetadata()
	return log.Marker{Index: m.GetIndex(), Term: m.GetTerm(), Voters: m.GetConfState().GetVoters()}
}
