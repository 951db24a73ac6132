// Package replica keeps one metadata state machine on several servers: commands
// go in, are agreed on by raft and applied in the same order everywhere. One
// voter is the default and runs the same code. The log is the durability; the
// store holds the state as of the last flush.
//
// Lock order: Replica.mu before nothing. Callbacks (done functions, OnLeader,
// Fatal) run in the replica's own task with no lock held; they must not block.
package replica

import (
	"errors"
	"log/slog"
	"sort"
	"time"

	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Transport carries messages to the other members. Its methods never block.
type Transport interface {
	// Send queues messages for a member, in order; it may drop, duplicate or
	// reorder them. The slices are not changed afterwards by either side.
	Send(to uint64, msgs [][]byte)
	// SendSnapshot calls produce in a task of its own; produce calls send once
	// per chunk (at most SnapshotChunk and a little more, not kept after send
	// returns), which waits for room. The receiving side passes the chunks in
	// order to the Receiver that its Replica.ReceiveSnapshot returns, then
	// calls Finish. produce, and so the transport, reports an error of send.
	SendSnapshot(to uint64, produce func(send func(chunk []byte) error) error)
}

// Limits.
const (
	// MaxCommand is the largest command in bytes.
	MaxCommand = 2 << 20
	// MaxEntry is the size in bytes at which a log entry takes no further command.
	MaxEntry = 1 << 20
	// SnapshotChunk is the size in bytes at which a chunk of a copy is sent.
	SnapshotChunk = 256 << 10
)

// Config is what a replica needs.
type Config struct {
	ID    uint64
	Peers map[uint64]string // id → address, this server included
	FS    vfs.FS            // the log lies in its directory "log"
	Store kv.Store
	// Machine turns commands into writes. Required.
	Machine   kv.StateMachine
	Sched     sched.Sched
	Transport Transport // nil with one voter
	Log       *slog.Logger
	// Fatal is called once, when the disk failed or the state diverged: the
	// process must end. Nothing is served afterwards.
	Fatal func(error)
	// OnLeader is called in order when this server starts to lead (an entry of
	// its own term is applied) and when it stops.
	OnLeader func(leading bool, term uint64)

	Tick          time.Duration // raft's clock; default 100 ms
	ElectionTicks int           // default 10; the time-out is random in [1, 2) times that
	StallTicks    int           // a log write that takes longer costs leadership; default 20
	FlushEvery    time.Duration // default 1 s
	FlushBytes    int           // default 64 MiB of overlay
	RetainLog     int64         // bytes of flushed log kept for followers; default 128 MiB
	SegmentSize   int64         // bytes of a log segment; default 16 MiB
	ProposeLimit  time.Duration // a proposal fails with Timeout after this; default 10 s
	QueueBytes    int           // waiting commands; default 64 MiB, then Busy
}

func (c *Config) setDefaults() {
	def(&c.Tick, 100*time.Millisecond)
	def(&c.ElectionTicks, 10)
	def(&c.StallTicks, 20)
	def(&c.FlushEvery, time.Second)
	def(&c.FlushBytes, 64<<20)
	def(&c.RetainLog, 128<<20)
	def(&c.SegmentSize, 16<<20)
	def(&c.ProposeLimit, 10*time.Second)
	def(&c.QueueBytes, 64<<20)
	if c.OnLeader == nil {
		c.OnLeader = func(bool, uint64) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (c *Config) validate() error {
	switch {
	case c.ID == 0:
		return errors.New("metadata server id 0: ids start at 1")
	case c.FS == nil || c.Store == nil || c.Machine == nil || c.Sched == nil || c.Fatal == nil:
		return errors.New("replica: FS, Store, Machine, Sched and Fatal are required")
	case c.Peers[c.ID] == "" && len(c.Peers) > 0:
		return errors.New("the list of metadata servers does not name this server's own id")
	case len(c.Peers) > 1 && c.Transport == nil:
		return errors.New("replica: several members need a transport")
	}
	return nil
}

// voters lists the configured members in ascending order.
func (c *Config) voters() []uint64 {
	ids := make([]uint64, 0, len(c.Peers)+1)
	for id := range c.Peers {
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		ids = append(ids, c.ID)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids
}

// Member is one server of the group.
type Member struct {
	ID     uint64
	Addr   string
	Leader bool
}

// Status is a snapshot of a replica's progress. Indices are positions of the raft log.
type Status struct {
	ID         uint64
	Leader     uint64 // zero when unknown
	LeaderAddr string
	Leading    bool // this server leads and an entry of its own term is applied
	Term       uint64
	Applied    uint64
	Flushed    uint64
	LogFirst   uint64
	LogLast    uint64
	Position   uint64 // commands applied since the founding
	Hash       uint64 // over all records at Applied
	Members    []Member
}
