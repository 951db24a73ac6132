package replica

import (
	"bytes"
	"time"

	"github.com/ckptfs/ckptfs/meta/kv"
)

// The background check of the store's records: a million records take three hours.
const (
	sweepEvery = 10 * time.Second
	sweepStep  = 1000
)

// sweepIfDue reads the next records, which verifies them: what nobody asks for
// must not rot unseen.
func (r *Replica) sweepIfDue(now time.Duration) {
	l := &r.loop
	if l.sweeping || l.installing || now-l.lastSweep < sweepEvery {
		return
	}
	l.sweeping, l.lastSweep = true, now
	from := l.sweepFrom
	r.task("metadata sweep", func() {
		next, err := sweep(r.cfg.Store, from)
		if err != nil {
			r.cfg.Log.Error("the check of the metadata store found damage", "id", r.cfg.ID, "error", err)
		}
		r.post(func() { r.loop.sweeping, r.loop.sweepFrom = false, next })
	})
}

// sweep reads one step from key from on and returns where the next begins: nil
// to start over, after the last record and after damage.
func sweep(s kv.Store, from []byte) (next []byte, err error) {
	err = s.View(func(v kv.Reader) error {
		n := 0
		return v.Ascend(from, nil, func(k, _ []byte) bool {
			n++
			if n > sweepStep {
				next = bytes.Clone(k)
			}
			return next == nil
		})
	})
	if err != nil {
		return nil, err
	}
	return next, nil
}
