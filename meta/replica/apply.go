package replica

import (
	"errors"
	"fmt"
	"runtime/debug"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// answer is a reply that is due.
type answer struct {
	done  func([]byte, error)
	reply []byte
	err   error
}

// apply runs the committed entries of w and answers their proposers.
func (r *Replica) apply(w *Work) {
	if len(w.Committed) == 0 {
		return
	}
	var answers []answer
	err := r.over.Apply(func(b *kv.Batch) error {
		for _, e := range w.Committed {
			if err := r.applyEntry(b, e, &answers); err != nil {
				return fmt.Errorf("apply log entry %d: %w", e.GetIndex(), err)
			}
		}
		return nil
	})
	if err != nil {
		r.fail(err)
		// What is merged stays in memory only; nothing is answered or flushed.
		panic(errStopped)
	}
	r.loop.node.Applied(w)
	// OnLeader comes before the first answer of a term.
	r.announce()
	for _, a := range answers {
		a.done(a.reply, a.err)
	}
}

// errStopped unwinds the loop after fail.
var errStopped = errors.New("the replica has stopped")

func (r *Replica) applyEntry(b *kv.Batch, e *pb.Entry, answers *[]answer) error {
	l := &r.loop
	if e.GetIndex() <= l.applied.index {
		return nil
	}
	if e.GetType() != pb.EntryNormal {
		return errkind.Unsupported.Wrap("entry of type %s", e.GetType())
	}
	cmds, err := decodeCommands(e.GetData())
	if err != nil {
		return err
	}
	waiters := r.proposers(e)
	for i, cmd := range cmds {
		l.applied.position++
		a := answer{}
		a.reply, err = r.applyCommand(b, l.applied.position, cmd)
		if errors.Is(err, errPanicked) {
			a.reply, a.err = nil, errPanicked
		} else if err != nil {
			return err
		}
		if i < len(waiters) {
			a.done = waiters[i].done
			*answers = append(*answers, a)
		}
	}
	l.applied.index, l.applied.term = e.GetIndex(), e.GetTerm()
	l.applied.hash = r.over.Hash()
	l.watch.note(l.applied.index, l.applied.hash)
	return nil
}

// proposers returns who waits for the commands of e: nobody when another
// leader's entry took the place of ours, or the wait has timed out.
func (r *Replica) proposers(e *pb.Entry) []proposal {
	l := &r.loop
	for len(l.packs) > 0 && l.packs[0].index != 0 && l.packs[0].index <= e.GetIndex() {
		p := l.packs[0]
		l.packs = l.packs[1:]
		if p.index == e.GetIndex() && p.term == e.GetTerm() {
			return p.cmds
		}
		for _, c := range p.cmds {
			c.done(nil, errkind.Unavailable.Wrap("metadata server %d: another leader's entry took the command's place", r.cfg.ID))
		}
	}
	return nil
}

// applyCommand runs one command. A panic drops its writes and yields
// errPanicked, on every member alike; any other error is one of the view, and
// stops the node.
func (r *Replica) applyCommand(b *kv.Batch, position uint64, cmd []byte) (reply []byte, err error) {
	err = b.Do(func(t kv.Txn) (err error) {
		defer func() {
			if p := recover(); p != nil {
				r.cfg.Log.Error("a metadata command panicked; its changes are dropped",
					"position", position, "panic", p, "stack", string(debug.Stack()))
				err = errPanicked
			}
		}()
		reply, err = r.cfg.Machine.Apply(t, position, cmd)
		return err
	})
	return reply, err
}

var errPanicked = errkind.Internal.Wrap("the metadata command failed inside the state machine; nothing was changed")
