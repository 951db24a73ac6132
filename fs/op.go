package fs

import (
	"context"
	"slices"
	"sync"
	"time"
)

// op is the context of one operation. It ends with the operation's time-out,
// or some time after the kernel has said that its caller was interrupted: the
// message does not name the signal, and most signals (a profiling timer, the Go
// runtime's own) must not disturb a program. The watching goroutine starts only
// when somebody waits on Done, or some time after somebody asked for AfterFunc.
type op struct {
	cancel   <-chan struct{}
	deadline time.Time // zero: none
	grace    time.Duration
	lease    uint64 // under which the operation began; zero: none
	mu       struct {
		sync.Mutex
		done  chan struct{}
		stop  chan struct{}
		ended bool
		err   error
		timer *time.Timer // starts the watching
		funcs []*func()   // of AfterFunc
	}
}

// watchAfter is how long an operation lasts before its end by others is
// watched for: nearly all are over by then.
const watchAfter = 50 * time.Millisecond

// begin returns the context of an operation; call end when it is over.
func (f *FS) begin(cancel <-chan struct{}) *op {
	o := &op{cancel: cancel, deadline: time.Now().Add(f.cfg.OpTimeout), grace: f.cfg.Grace}
	if f.cfg.Leases != nil {
		o.lease = f.cfg.Leases.Lease()
	}
	return o
}

// beginWait is begin for an operation that may last as long as its caller
// likes, and ends at the first signal.
func beginWait(cancel <-chan struct{}) *op { return &op{cancel: cancel} }

// background returns the context of work that no caller waits for.
func (f *FS) background() *op { return f.begin(nil) }

// Deadline is that of context.Context.
func (o *op) Deadline() (time.Time, bool) { return o.deadline, !o.deadline.IsZero() }

// Value is that of context.Context; there are none.
func (o *op) Value(any) any { return nil }

// Err is that of context.Context.
func (o *op) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.err == nil && !o.deadline.IsZero() && !time.Now().Before(o.deadline) {
		o.finish(context.DeadlineExceeded)
	}
	return o.mu.err
}

// Done is that of context.Context.
func (o *op) Done() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.done == nil {
		o.mu.done = make(chan struct{})
		if o.mu.err != nil {
			close(o.mu.done)
		} else {
			o.startWatch()
		}
	}
	return o.mu.done
}

// startWatch is called with mu held.
func (o *op) startWatch() {
	if o.mu.err == nil && o.mu.stop == nil {
		o.mu.stop = make(chan struct{})
		go o.watch(o.mu.stop)
	}
}

// AfterFunc runs fn in a goroutine once the context has ended: sched.AfterFunc
// and package context use it.
func (o *op) AfterFunc(fn func()) (stop func() bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.err != nil {
		go fn()
		return func() bool { return false }
	}
	w := &fn
	o.mu.funcs = append(o.mu.funcs, w)
	switch {
	case o.deadline.IsZero(): // ends at the first signal
		o.startWatch()
	case o.mu.timer == nil:
		o.mu.timer = time.AfterFunc(min(watchAfter, time.Until(o.deadline)), func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.startWatch()
		})
	}
	return func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		i := slices.Index(o.mu.funcs, w)
		if i < 0 {
			return false
		}
		o.mu.funcs = slices.Delete(o.mu.funcs, i, i+1)
		return true
	}
}

// finish is called with mu held.
func (o *op) finish(err error) {
	if o.mu.err != nil {
		return
	}
	o.mu.err = err
	if o.mu.timer != nil {
		o.mu.timer.Stop()
	}
	for _, fn := range o.mu.funcs {
		go (*fn)()
	}
	o.mu.funcs = nil
	if o.mu.done != nil {
		close(o.mu.done)
	}
	if o.mu.stop != nil && !o.mu.ended {
		o.mu.ended = true
		close(o.mu.stop)
	}
}

func (o *op) watch(stop <-chan struct{}) {
	var late <-chan time.Time
	if !o.deadline.IsZero() {
		t := time.NewTimer(time.Until(o.deadline))
		defer t.Stop()
		late = t.C
	}
	err := context.DeadlineExceeded
	select {
	case <-stop:
		return
	case <-late:
	case <-o.cancel:
		err = context.Canceled
		g := time.NewTimer(o.grace)
		defer g.Stop()
		select {
		case <-stop:
			return
		case <-late:
		case <-g.C:
		}
	}
	o.mu.Lock()
	o.finish(err)
	o.mu.Unlock()
}

// end releases what waits on the context.
func (o *op) end() {
	o.mu.Lock()
	o.finish(context.Canceled)
	o.mu.Unlock()
}
