package replica

import (
	"context"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Replica is one member of the group. All methods are safe for concurrent use.
type Replica struct{ cfg Config }

// Open recovers the state and starts the replica's tasks.
func Open(cfg Config) (*Replica, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Replica{cfg: cfg}, nil
}

// Propose asks for cmd, which is kept and must not change, to be applied, and
// calls done exactly once with Apply's reply, or with an error of kind
// NotLeader, Busy (queue full), TooBig, Unavailable (leadership was lost or the
// replica closed: the outcome is unknown) or Timeout (unknown too).
func (r *Replica) Propose(_ []byte, done func(reply []byte, err error)) {
	done(nil, errkind.Unsupported)
}

// Barrier calls done once everything that was acknowledged anywhere before the
// call is applied here; errors as Propose's.
func (r *Replica) Barrier(done func(err error)) { done(errkind.Unsupported) }

// View calls fn with a consistent view of everything applied. It does not hold
// up Apply. fn must be short (well under a second).
func (r *Replica) View(_ func(kv.Reader) error) error { return errkind.Unsupported }

// Status returns the replica's progress.
func (r *Replica) Status() Status { return Status{ID: r.cfg.ID} }

// StepMessage takes a message that member from sent with Transport.Send.
func (r *Replica) StepMessage(_ uint64, _ []byte) error { return errkind.Unsupported }

// Receiver takes one streamed copy of the leader's store. Not safe for
// concurrent use.
type Receiver struct{}

// ReceiveSnapshot starts to receive a copy from member from.
func (r *Replica) ReceiveSnapshot(_ uint64) (*Receiver, error) { return nil, errkind.Unsupported }

// Chunk takes the next chunk; an error ends the transfer.
func (c *Receiver) Chunk(_ []byte) error { return errkind.Unsupported }

// Finish verifies the copy and hands it over for installation.
func (c *Receiver) Finish() error { return errkind.Unsupported }

// Abort drops what was received. Harmless after Finish.
func (c *Receiver) Abort() {}

// Close flushes, stops the tasks and fails what waits with Unavailable. The
// store stays open: it belongs to the caller.
func (r *Replica) Close(_ context.Context) error { return nil }
