package replica

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine records every command at its position and chains them, so that a
// command that is lost, doubled or moved shows.
type machine struct{}

var chainKey = []byte("chain")

func positionKey(p uint64) []byte { return binary.BigEndian.AppendUint64([]byte("p"), p) }

func (machine) Apply(t kv.Txn, index uint64, cmd []byte) ([]byte, error) {
	chain, err := t.Get(chainKey)
	if err != nil {
		return nil, err
	}
	next := binary.BigEndian.AppendUint64(nil, kv.RecordHash(cmd, chain))
	t.Set(chainKey, next)
	t.Set(positionKey(index), cmd)
	if bytes.HasPrefix(cmd, []byte("panic")) {
		panic("as asked")
	}
	if old, err := t.Get(positionKey(index / 2)); err != nil || old != nil {
		t.Delete(append([]byte("x"), cmd...))
	}
	return binary.BigEndian.AppendUint64(nil, index), nil
}

// member is one server of the simulated group.
type member struct {
	id      uint64
	disk    *vfs.Mem
	store   *kv.Mem
	replica *Replica // nil while down
	leading bool
}

type group struct {
	t       *testing.T
	world   *sim.World
	rng     *rand.Rand
	members []*member
	cut     map[[2]uint64]bool
	loss    float64
	acked   map[string]uint64 // command → position
	tweak   func(*Config)
}

func newGroup(t *testing.T, seed uint64, n int, tweak func(*Config)) *group {
	w := sim.NewWorld(seed)
	t.Cleanup(w.Close)
	g := &group{t: t, world: w, rng: w.Rand(), cut: map[[2]uint64]bool{}, acked: map[string]uint64{}, tweak: tweak}
	for i := range n {
		g.members = append(g.members, &member{id: uint64(i + 1), disk: vfs.NewMem(), store: kv.NewMem()})
	}
	for _, m := range g.members {
		require.NoError(t, g.start(m))
	}
	return g
}

func (g *group) start(m *member) error {
	peers := map[uint64]string{}
	for _, p := range g.members {
		peers[p.id] = fmt.Sprintf("meta%d", p.id)
	}
	var r *Replica
	cfg := Config{
		ID: m.id, Peers: peers, FS: m.disk, Store: m.store, Machine: machine{}, Sched: g.world,
		Transport: &wire{g, m.id}, SegmentSize: 32 << 10, RetainLog: 64 << 10,
		Fatal: func(err error) {
			if m.replica == r && !errors.Is(err, errPowerCut) {
				g.t.Errorf("member %d: %v", m.id, err)
			}
			g.down(m, r)
		},
		OnLeader: func(leading bool, term uint64) {
			if m.replica != r {
				return // the end of a killed one
			}
			require.NotEqual(g.t, m.leading, leading)
			m.leading = leading
			g.world.Trace("member %d leads: %v term %d", m.id, leading, term)
		},
	}
	if g.tweak != nil {
		g.tweak(&cfg)
	}
	m.leading = false
	r, err := Open(cfg)
	if err == nil {
		m.replica = r
	}
	return err
}

var errPowerCut = errors.New("power cut")

// down marks a member as gone: its disks lose what was not synced.
func (g *group) down(m *member, r *Replica) {
	if m.replica != r || r == nil {
		return
	}
	g.world.Trace("member %d goes down", m.id)
	m.replica = nil
	r.Kill()
	m.disk.SetHook(nil)
	m.disk.Crash(g.world)
	m.store = m.store.Crash()
	m.leading = false
}

func (g *group) crash(m *member) { g.down(m, m.replica) }

// crashAt cuts the power at one of the next operations of the disk.
func (g *group) crashAt(m *member, operations int) {
	r := m.replica
	m.disk.SetHook(func(vfs.Call) error {
		if operations--; operations > 0 {
			return nil
		}
		g.down(m, r)
		return errPowerCut
	})
}

// wire is the network as seen by one member.
type wire struct {
	g    *group
	from uint64
}

func (w *wire) target(to uint64) *Replica {
	if w.g.cut[[2]uint64{w.from, to}] {
		return nil
	}
	return w.g.members[to-1].replica
}

func (w *wire) Send(to uint64, msgs [][]byte) {
	for _, data := range msgs {
		copies := 1
		if p := w.g.rng.Float64(); p < w.g.loss {
			copies = 0
		} else if p > 1-w.g.loss/2 {
			copies = 2
		}
		for range copies {
			delay := time.Duration(w.g.rng.IntN(5_000_000))
			if w.g.rng.Float64() < w.g.loss {
				delay *= 40
			}
			w.g.world.AfterFunc(delay, func() {
				if r := w.target(to); r != nil {
					require.NoError(w.g.t, r.StepMessage(w.from, data))
				}
			})
		}
	}
}

func (w *wire) SendSnapshot(to uint64, produce func(send func([]byte) error) error) {
	w.g.world.Go("copy", func() {
		var in *Receiver
		var at *Replica
		err := produce(func(chunk []byte) error {
			w.g.world.Sleep(time.Millisecond)
			r := w.target(to)
			if r == nil || (at != nil && r != at) || w.g.rng.Float64() < w.g.loss/4 {
				return errkind.Unavailable.Wrap("no route to %d", to)
			}
			if in == nil {
				var err error
				if in, err = r.ReceiveSnapshot(w.from); err != nil {
					return err
				}
				at = r
			}
			return in.Chunk(bytes.Clone(chunk))
		})
		switch {
		case in == nil:
		case err != nil:
			in.Abort()
		default:
			require.NoError(w.g.t, in.Finish())
		}
	})
}

func (g *group) leader() *member {
	for _, m := range g.members {
		if m.replica != nil && m.leading && m.replica.Status().Leading {
			return m
		}
	}
	return nil
}

func (g *group) run(limit time.Duration, done func() bool) {
	g.t.Helper()
	require.NoError(g.t, g.world.Run(limit, done))
}

// sleep lets virtual time pass.
func (g *group) sleep(d time.Duration) {
	over := false
	g.world.AfterFunc(d, func() { over = true })
	g.run(d+time.Minute, func() bool { return over })
}

// propose sends cmd to m and notes its acknowledgement; after may be nil.
func (g *group) propose(m *member, cmd string, after func(error)) {
	m.replica.Propose([]byte(cmd), func(reply []byte, err error) {
		if err == nil {
			_, twice := g.acked[cmd]
			require.False(g.t, twice, "%s was answered twice", cmd)
			g.acked[cmd] = binary.BigEndian.Uint64(reply)
			g.world.Trace("acknowledged %s at %d", cmd, g.acked[cmd])
		}
		if after != nil {
			after(err)
		}
	})
}

// load proposes n commands from several clients, each to who leads just then.
// It returns a condition that holds once all have their answer.
func (g *group) load(name string, n int) (done func() bool) {
	left := n
	const clients = 5
	for c := range clients {
		g.world.Go("client", func() {
			for i := c; i < n; i += clients {
				m := g.leader()
				for m == nil {
					g.world.Sleep(20 * time.Millisecond)
					m = g.leader()
				}
				g.propose(m, fmt.Sprintf("%s-%d", name, i), func(error) { left-- })
				g.world.Sleep(time.Duration(g.rng.IntN(10_000_000)))
			}
		})
	}
	return func() bool { return left == 0 }
}

// settle heals everything and waits until all members agree.
func (g *group) settle() {
	g.t.Helper()
	g.loss = 0
	clear(g.cut)
	for _, m := range g.members {
		m.disk.SetHook(nil)
		if m.replica == nil {
			require.NoError(g.t, g.start(m))
		}
	}
	g.run(2*time.Minute, func() bool {
		first := g.members[0].replica.Status()
		for _, m := range g.members {
			s := m.replica.Status()
			if s.Applied != first.Applied || s.Applied != s.LogLast || s.Applied == 0 || s.Flushed != s.Applied {
				return false
			}
		}
		return g.leader() != nil
	})
	g.check()
}

// check compares the members and looks for everything that was acknowledged.
func (g *group) check() {
	g.t.Helper()
	want := g.members[0].replica.Status()
	for _, m := range g.members {
		s := m.replica.Status()
		require.Equal(g.t, want.Position, s.Position)
		require.Equal(g.t, want.Hash, s.Hash, "hash of member %d", m.id)
		require.NoError(g.t, m.replica.View(func(r kv.Reader) error {
			seen := map[string]int{}
			require.NoError(g.t, r.Ascend([]byte("p"), []byte("q"), func(_, v []byte) bool {
				seen[string(v)]++
				return true
			}))
			for cmd, n := range seen {
				require.Equal(g.t, 1, n, "%s was applied %d times", cmd, n)
			}
			for cmd, position := range g.acked {
				v, err := r.Get(positionKey(position))
				require.NoError(g.t, err)
				require.Equal(g.t, cmd, string(v), "member %d at %d", m.id, position)
			}
			return nil
		}))
	}
}

func (g *group) close() {
	for _, m := range g.members {
		if m.replica != nil {
			over := false
			g.world.Go("close", func() { over = m.replica.Close(context.Background()) == nil })
			g.run(time.Minute, func() bool { return over })
		}
	}
}

func (g *group) up() (n int) {
	for _, m := range g.members {
		if m.replica != nil {
			n++
		}
	}
	return n
}

func (g *group) followers() []*member {
	lead := g.leader()
	return slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool { return m == lead })
}
