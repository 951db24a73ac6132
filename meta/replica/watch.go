package replica

import (
	"encoding/binary"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// watchSize is how many entries back hashes can be compared.
const watchSize = 4096

// watch compares the members' hashes: equal log positions must mean equal
// records. It belongs to the loop's task.
type watch struct {
	ring    [watchSize]struct{ index, hash uint64 }
	voters  int
	verdict map[uint64]verdict // of each follower, in the leader
	split   bool               // neither side of a difference is a majority
}

type verdict struct{ index, theirs, ours uint64 }

func (w *watch) init(voters int) { w.voters, w.verdict = voters, map[uint64]verdict{} }

// reset forgets the followers: a new leader asks anew.
func (w *watch) reset() {
	clear(w.verdict)
	w.split = false
}

func (w *watch) note(index, hash uint64) {
	e := &w.ring[index%watchSize]
	e.index, e.hash = index, hash
}

func (w *watch) at(index uint64) (uint64, bool) {
	e := w.ring[index%watchSize]
	return e.hash, e.index == index && index != 0
}

// report sends this follower's hash to the leader.
func (r *Replica) report() {
	l := &r.loop
	leader, _ := l.node.Leader()
	if leader == 0 || leader == r.cfg.ID || l.applied.index == 0 {
		return
	}
	if last, newborn := l.node.Newborn(); newborn {
		r.cfg.Transport.Send(leader, [][]byte{encodeReport(messageReborn, last, 0)})
		return
	}
	r.cfg.Transport.Send(leader, [][]byte{encodeReport(messageReport, l.applied.index, l.applied.hash)})
}

func encodeReport(kind byte, index, hash uint64) []byte {
	p := binary.LittleEndian.AppendUint64([]byte{kind}, index)
	return binary.LittleEndian.AppendUint64(p, hash)
}

func (r *Replica) stepReport(from uint64, data []byte) error {
	if len(data) != 17 {
		return errkind.Invalid.Wrap("hash report of %d bytes from metadata server %d", len(data), from)
	}
	kind, index, hash := data[0], binary.LittleEndian.Uint64(data[1:]), binary.LittleEndian.Uint64(data[9:])
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.events) < maxInbox {
		r.mu.events = append(r.mu.events, func() {
			switch kind {
			case messageStop:
				r.inMinority(from, index, hash)
			case messageReborn:
				r.loop.node.Reborn(from, index)
			default:
				r.compare(from, index, hash)
			}
		})
		r.wake.Signal()
	}
	return nil
}

// inMinority takes the leader's word that this member is in the minority.
func (r *Replica) inMinority(from, index, hash uint64) {
	if mine, ok := r.loop.watch.at(index); ok && mine != hash {
		r.diverged(index, mine, hash, from)
	}
}

func (r *Replica) diverged(index, mine, theirs, from uint64) {
	r.fail(errkind.Corrupt.Wrap("the metadata at log entry %d has hash %016x here and %016x on the majority "+
		"(told by server %d): this server stops; move its directory aside and start it empty, "+
		"so that it copies the state anew", index, mine, theirs, from))
}

// compare judges a follower's hash.
func (r *Replica) compare(from, index, theirs uint64) {
	w := &r.loop.watch
	ours, ok := w.at(index)
	if r.loop.led == 0 || !ok {
		return
	}
	w.verdict[from] = verdict{index, theirs, ours}
	agree, differ := 1, 0
	for _, v := range w.verdict {
		if v.theirs == v.ours {
			agree++
		} else {
			differ++
		}
	}
	majority := w.voters/2 + 1
	w.split = differ > 0 && agree < majority
	switch {
	case theirs == ours:
	case agree >= majority:
		r.cfg.Log.Error("a metadata server's state differs from the majority's", "server", from, "index", index)
		r.cfg.Transport.Send(from, [][]byte{encodeReport(messageStop, index, ours)})
	case differ >= majority:
		r.diverged(index, ours, theirs, from)
	default:
		r.cfg.Log.Error("two metadata servers differ and no majority decides: no change is served",
			"server", from, "index", index)
	}
}
