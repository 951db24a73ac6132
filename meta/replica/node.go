package replica

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

// NodeConfig is what a Node needs.
type NodeConfig struct {
	ID            uint64
	Voters        []uint64
	Storage       raft.Storage
	Applied       uint64 // log index that the store holds
	Newborn       bool   // see Node.newborn
	ElectionTicks int
	StallTicks    int
	Random        func() uint64
	Log           *slog.Logger
}

// Node is the consensus of one member as a stepper: inputs in, work out. It has
// no clock, no goroutine and no choice but Random's. Not safe for concurrent use.
//
// raft draws its election time-outs from the operating system, which no seed
// reproduces. So a member that does not lead never ticks raft: the Node counts
// itself, ends the follower's lease and calls the election.
type Node struct {
	cfg     NodeConfig
	raw     *raft.RawNode
	elapsed int // ticks since the leader was heard
	timeout int // ticks at which to campaign

	unstored int // appends handed out whose Stored is due
	stall    int // ticks since one of them came back

	ready    uint64 // term of the last entry applied here
	proposed []uint64
	reads    []uint64 // barriers that wait for the next check of leadership
	checks   []check  // under way
	lastRead uint64

	// newborn: the member started with an empty disk and may have acknowledged,
	// in an earlier life, entries that it does not have now. Until it has
	// everything that a leader says is committed it votes only for a member
	// that no other voter's log is ahead of, as far as it has heard from all of
	// them: else an entry of which the lost disk held one of the two copies
	// could be voted away.
	newborn bool
	commit  uint64 // highest commit that a leader told
	heard   map[uint64]position

	out  []*pb.Message
	work Work
}

// position is the end of a log.
type position struct{ term, index uint64 }

func (p position) ahead(o position) bool {
	return p.term > o.term || p.term == o.term && p.index > o.index
}

type check struct {
	id     uint64
	tokens []uint64
}

// Append is a change of the log to make durable, in order; then call Stored.
type Append struct {
	Entries  []*pb.Entry
	Hard     *pb.HardState // nil: unchanged
	Snapshot *pb.Snapshot  // nil, or: the store is replaced by the copy at this position
	Sync     bool          // Stored must wait for it to be durable
	answers  []*pb.Message
}

// Assigned says which log position a proposal got.
type Assigned struct{ Token, Index, Term uint64 }

// ReadPoint is a barrier that is passed once Index is applied.
type ReadPoint struct{ Token, Index uint64 }

// Work is what there is to do after some inputs, in this order.
type Work struct {
	Assigned  []Assigned
	Append    []*Append
	Messages  []*pb.Message // to other members; a MsgSnap asks for a streamed copy
	Committed []*pb.Entry   // to apply, then call Applied
	Reads     []ReadPoint
	Refused   []uint64 // tokens of barriers: this member does not lead
	applying  []*pb.Message
}

// NewNode starts from what the storage holds.
func NewNode(cfg NodeConfig) (*Node, error) {
	n := &Node{cfg: cfg, newborn: cfg.Newborn, heard: map[uint64]position{}}
	raw, err := raft.NewRawNode(&raft.Config{
		ID:                        cfg.ID,
		ElectionTick:              cfg.ElectionTicks,
		HeartbeatTick:             1,
		Storage:                   cfg.Storage,
		Applied:                   cfg.Applied,
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             MaxEntry,
		MaxCommittedSizePerReady:  4 << 20,
		MaxUncommittedEntriesSize: 64 << 20,
		MaxInflightMsgs:           64,
		MaxInflightBytes:          16 << 20,
		CheckQuorum:               true,
		PreVote:                   true,
		ReadOnlyOption:            raft.ReadOnlySafe,
		DisableProposalForwarding: true,
		Logger:                    raftLogger{cfg.Log},
	})
	if err != nil {
		return nil, fmt.Errorf("start raft of metadata server %d: %w", cfg.ID, err)
	}
	n.raw = raw
	n.restart()
	if len(cfg.Voters) == 1 && cfg.Voters[0] == cfg.ID {
		n.timeout = 0 // nobody to wait for
	}
	return n, nil
}

func (n *Node) restart() {
	n.elapsed = 0
	n.timeout = n.cfg.ElectionTicks + int(n.cfg.Random()%uint64(n.cfg.ElectionTicks))
}

func (n *Node) leads() bool { return n.raw.BasicStatus().RaftState == raft.StateLeader }

// Ready reports that this member leads and has applied an entry of its term.
func (n *Node) Ready() bool {
	s := n.raw.BasicStatus()
	return s.RaftState == raft.StateLeader && n.ready == s.GetTerm()
}

// Leader returns the leader, zero when unknown, and the term.
func (n *Node) Leader() (id, term uint64) {
	s := n.raw.BasicStatus()
	return s.Lead, s.GetTerm()
}

// Tick is the passing of one unit of time.
func (n *Node) Tick() {
	if n.unstored > 0 {
		n.stall++
	}
	if n.leads() {
		n.raw.Tick()
		return
	}
	n.elapsed++
	if n.elapsed == n.cfg.ElectionTicks {
		_ = n.raw.ForgetLeader() // fails never: it is a local step
	}
	if n.elapsed >= n.timeout && !n.stalled() {
		n.restart()
		_ = n.raw.Campaign() // refused while a copy is being installed: try again later
	}
}

// stalled reports that the disk has kept a write for too long. Then the member
// falls silent: a leader loses its leadership by raft's quorum check, and the
// others elect one whose disk works.
func (n *Node) stalled() bool { return n.stall >= n.cfg.StallTicks }

// Step takes a message of another member.
func (n *Node) Step(m *pb.Message) error {
	if n.stalled() {
		return nil
	}
	if n.newborn && !n.admit(m) {
		return nil
	}
	before := n.raw.BasicStatus()
	if err := n.raw.Step(m); err != nil {
		return fmt.Errorf("raft message of type %s from %d: %w", m.GetType(), m.GetFrom(), err)
	}
	after := n.raw.BasicStatus()
	heard := false
	switch m.GetType() {
	case pb.MsgApp, pb.MsgHeartbeat, pb.MsgSnap:
		heard = after.Lead == m.GetFrom()
	}
	if heard || after.GetTerm() != before.GetTerm() || after.GetVote() != before.GetVote() {
		n.restart()
	}
	return nil
}

// admit filters what a newborn member takes.
func (n *Node) admit(m *pb.Message) bool {
	last, _ := n.cfg.Storage.LastIndex()
	switch m.GetType() {
	case pb.MsgVote, pb.MsgPreVote:
		return n.mayVote(m.GetFrom(), position{m.GetLogTerm(), m.GetIndex()}, last)
	case pb.MsgTimeoutNow:
		return false
	case pb.MsgApp, pb.MsgSnap:
		n.commit = max(n.commit, m.GetCommit(), m.GetSnapshot().GetMetadata().GetIndex())
	case pb.MsgHeartbeat:
		// The leader still counts on entries of the earlier life.
		m.Commit = new(min(m.GetCommit(), last))
	}
	return true
}

// mayVote decides for a newborn member. With nothing in either log it is the
// founding, which needs no more than a majority.
func (n *Node) mayVote(from uint64, at position, last uint64) bool {
	n.heard[from] = at
	if at.index <= 1 && last <= 1 {
		return true
	}
	for _, v := range n.cfg.Voters {
		other, ok := n.heard[v]
		if v != n.cfg.ID && (!ok || other.ahead(at)) {
			return false
		}
	}
	return true
}

// Newborn reports that this member must catch up before it counts, and up to
// where its log goes.
func (n *Node) Newborn() (last uint64, newborn bool) {
	last, _ = n.cfg.Storage.LastIndex()
	return last, n.newborn
}

// Reborn says that a member has lost its log behind last. While this leader
// believes in more, it would wait for ever for the member to acknowledge: so it
// hands over to another, which starts without beliefs.
func (n *Node) Reborn(id, last uint64) {
	var match, best, heir uint64
	n.raw.WithProgress(func(i uint64, _ raft.ProgressType, p tracker.Progress) {
		switch {
		case i == id:
			match = p.Match
		case i != n.cfg.ID && p.Match > best:
			best, heir = p.Match, i
		}
	})
	if n.leads() && match > last && heir != 0 {
		n.raw.TransferLeader(heir)
	}
}

// Propose asks for data to become a log entry; the next Work assigns its
// position. Only while this member leads.
func (n *Node) Propose(data []byte, token uint64) error {
	if err := n.raw.Propose(data); err != nil {
		return err
	}
	n.proposed = append(n.proposed, token)
	return nil
}

// ReadBarrier asks for a read point: leadership is checked after this call,
// once for all that ask before the next Work.
func (n *Node) ReadBarrier(token uint64) { n.reads = append(n.reads, token) }

// Stored says that an Append is done (durable, if Sync).
func (n *Node) Stored(a *Append) {
	if a.Sync {
		n.unstored--
		n.stall = 0
	}
	if last, _ := n.cfg.Storage.LastIndex(); n.newborn && n.commit > 1 && last >= n.commit {
		n.newborn = false
	}
	for _, m := range a.answers {
		if m.GetTo() == n.cfg.ID {
			_ = n.raw.Step(m) // an answer of an older term is ignored
		} else {
			n.out = append(n.out, m)
		}
	}
}

// Applied says that the committed entries of w are applied.
func (n *Node) Applied(w *Work) {
	for _, m := range w.applying {
		_ = n.raw.Step(m) // a local answer is never refused
	}
	if k := len(w.Committed); k > 0 {
		n.ready = w.Committed[k-1].GetTerm()
		n.newborn = n.newborn && !n.Ready()
	}
}

// SnapshotSent reports how the streaming of a copy ended.
func (n *Node) SnapshotSent(to uint64, ok bool) {
	status := raft.SnapshotFailure
	if ok {
		status = raft.SnapshotFinish
	}
	n.raw.ReportSnapshot(to, status)
}

// Transfer asks another member to lead.
func (n *Node) Transfer(to uint64) { n.raw.TransferLeader(to) }

// Work returns everything that the inputs so far ask for.
func (n *Node) Work() Work {
	n.checkLeadership()
	for n.raw.HasReady() {
		rd := n.raw.Ready()
		for i := range rd.ReadStates {
			n.readState(&rd.ReadStates[i])
		}
		for _, m := range rd.Messages {
			n.sort(m)
		}
	}
	if !n.leads() {
		n.proposed = nil
		n.refuseReads()
	}
	n.work.Messages = append(n.work.Messages, n.out...)
	n.out = nil
	if n.stalled() {
		n.work.Messages = nil
	}
	w := n.work
	n.work = Work{}
	return w
}

func (n *Node) sort(m *pb.Message) {
	switch {
	case m.GetTo() == raft.LocalAppendThread:
		n.append(m)
	case m.GetTo() == raft.LocalApplyThread:
		n.work.Committed = append(n.work.Committed, m.Entries...)
		n.work.applying = append(n.work.applying, m.Responses...)
	default:
		n.work.Messages = append(n.work.Messages, m)
	}
}

func (n *Node) append(m *pb.Message) {
	a := &Append{Entries: m.Entries, answers: m.Responses, Sync: len(m.Responses) > 0}
	if m.Term != nil {
		a.Hard = &pb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
	}
	if !raft.IsEmptySnap(m.Snapshot) {
		a.Snapshot = m.Snapshot
	}
	if a.Sync {
		n.unstored++
	}
	for _, e := range a.Entries {
		if len(n.proposed) > 0 && len(e.Data) > 0 {
			n.work.Assigned = append(n.work.Assigned, Assigned{n.proposed[0], e.GetIndex(), e.GetTerm()})
			n.proposed = n.proposed[1:]
		}
	}
	n.work.Append = append(n.work.Append, a)
}

// checkLeadership starts one check for all barriers that wait.
func (n *Node) checkLeadership() {
	if len(n.reads) == 0 || !n.Ready() {
		return
	}
	n.lastRead++
	n.checks = append(n.checks, check{n.lastRead, n.reads})
	n.reads = nil
	n.raw.ReadIndex(binary.BigEndian.AppendUint64(nil, n.lastRead))
}

func (n *Node) readState(s *raft.ReadState) {
	id := binary.BigEndian.Uint64(s.RequestCtx)
	for i, c := range n.checks {
		if c.id != id {
			continue
		}
		for _, t := range c.tokens {
			n.work.Reads = append(n.work.Reads, ReadPoint{t, s.Index})
		}
		n.checks = append(n.checks[:i:i], n.checks[i+1:]...)
		return
	}
}

func (n *Node) refuseReads() {
	for _, c := range n.checks {
		n.work.Refused = append(n.work.Refused, c.tokens...)
	}
	n.work.Refused = append(n.work.Refused, n.reads...)
	n.checks, n.reads = nil, nil
}

// raftLogger passes raft's own log on; what raft calls information is detail here.
type raftLogger struct{ log *slog.Logger }

func (l raftLogger) print(level slog.Level, format string, v []any) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, "raft: "+fmt.Sprintf(format, v...))
	}
}

func (l raftLogger) Debug(v ...any)              { l.print(slog.LevelDebug, "%s", []any{fmt.Sprint(v...)}) }
func (l raftLogger) Debugf(f string, v ...any)   { l.print(slog.LevelDebug, f, v) }
func (l raftLogger) Info(v ...any)               { l.print(slog.LevelDebug, "%s", []any{fmt.Sprint(v...)}) }
func (l raftLogger) Infof(f string, v ...any)    { l.print(slog.LevelDebug, f, v) }
func (l raftLogger) Warning(v ...any)            { l.print(slog.LevelWarn, "%s", []any{fmt.Sprint(v...)}) }
func (l raftLogger) Warningf(f string, v ...any) { l.print(slog.LevelWarn, f, v) }
func (l raftLogger) Error(v ...any)              { l.print(slog.LevelError, "%s", []any{fmt.Sprint(v...)}) }
func (l raftLogger) Errorf(f string, v ...any)   { l.print(slog.LevelError, f, v) }

// The core calls these when going on would break its promises: the caller of
// the Node recovers and ends the process.
func (l raftLogger) Fatal(v ...any)            { panic("raft: " + fmt.Sprint(v...)) }
func (l raftLogger) Fatalf(f string, v ...any) { panic("raft: " + fmt.Sprintf(f, v...)) }
func (l raftLogger) Panic(v ...any)            { panic("raft: " + fmt.Sprint(v...)) }
func (l raftLogger) Panicf(f string, v ...any) { panic("raft: " + fmt.Sprintf(f, v...)) }
