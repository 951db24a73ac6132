package server

import (
	"fmt"
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

const classes = int(wire.ClassRepair) + 1

// disk is one store with its queues. All fields that change are guarded by
// Server.mu.
type disk struct {
	id    ids.DiskID
	store chunk.Store
	share int64      // bytes of the put budget that this disk may take
	work  sched.Cond // a queue has a request, or the server closes
	sync  sched.Cond // syncs is not empty, or the server closes

	puts    int64 // bytes of the put budget taken
	queues  [classes][]*item
	running int // requests being executed
	shed    int // of these, the ones that are not foreground
	turn    uint
	waited  time.Duration // by the request that left the queue last
	syncs   []pendingSync
	parked  int // reads that wait for a buffer
}

// pendingSync is an answer that waits for its bytes to be durable.
type pendingSync struct {
	it     *item
	ticket uint64
	reply  *Reply
}

func (s *Server) startDisk(cfg Disk, share int64) *disk {
	d := &disk{id: cfg.ID, store: cfg.Store, share: share, work: s.clock.NewCond(&s.mu), sync: s.clock.NewCond(&s.mu)}
	for i := range s.lim.Workers {
		s.start(fmt.Sprintf("disk %d worker %d", d.id, i), func() { s.worker(d) })
	}
	s.start(fmt.Sprintf("disk %d sync", d.id), func() { s.syncer(d) })
	return d
}

// delay is how long requests wait for the disk now.
func (d *disk) delay(now time.Duration) time.Duration {
	delay := time.Duration(0)
	if d.running > 0 {
		delay = d.waited
	}
	for _, q := range d.queues {
		if len(q) > 0 {
			delay = max(delay, now-q[0].arrived)
		}
	}
	return delay
}

// submit queues a request, or refuses it.
func (s *Server) submit(it *item) {
	s.mu.Lock()
	var err error
	if it.cancelled {
		err = errCancelled
	} else {
		err = s.enqueue(it)
	}
	s.mu.Unlock()
	if err != nil {
		s.finish(it, fail(err))
	}
}

// enqueue puts a request on its disk's queue; Busy when that is full.
func (s *Server) enqueue(it *item) error {
	q := it.disk.queues[it.req.Class]
	if len(q) >= s.lim.QueueLen {
		return s.busy(max(s.clock.Now()-q[0].arrived, 10*time.Millisecond), fmt.Sprintf("disk %d has %d requests waiting", it.disk.id, len(q)))
	}
	it.state = itemQueued
	it.disk.push(it)
	return nil
}

func (d *disk) push(it *item) {
	d.queues[it.req.Class] = append(d.queues[it.req.Class], it)
	d.work.Signal()
}

// unqueue takes a request out of the queue in which it waits; s.mu is held.
func (s *Server) unqueue(it *item) {
	if it.state == itemWaiting {
		for e := s.mu.waiting.Front(); e != nil; e = e.Next() {
			if e.Value.(*item) == it {
				s.mu.waiting.Remove(e)
				break
			}
		}
	} else {
		q := &it.disk.queues[it.req.Class]
		if i := slices.Index(*q, it); i >= 0 {
			*q = slices.Delete(*q, i, i+1)
		}
		if it.req.Op == wire.OpOpen && it.chunk != nil {
			s.forget(it.chunk) // the store has not heard of it
		}
	}
	it.state = itemDone
}

// orders in which the classes are looked at: mostly by urgency, but so that
// no class waits for ever.
var orders = [3][classes]wire.Class{
	{wire.ClassForeground, wire.ClassBackground, wire.ClassRepair},
	{wire.ClassBackground, wire.ClassRepair, wire.ClassForeground},
	{wire.ClassRepair, wire.ClassBackground, wire.ClassForeground},
}

// pick takes the next request off the queues; nil when none may run. One
// worker is always left to the foreground.
func (d *disk) pick(workers int) *item {
	order := orders[0]
	switch {
	case d.turn%64 == 63:
		order = orders[2]
	case d.turn%8 == 7:
		order = orders[1]
	}
	for _, class := range order {
		q := d.queues[class]
		if len(q) == 0 || class != wire.ClassForeground && d.shed >= max(workers-1, 1) {
			continue
		}
		it := q[0]
		q[0] = nil
		d.queues[class] = q[1:]
		d.turn++
		d.running++
		if class != wire.ClassForeground {
			d.shed++
		}
		return it
	}
	return nil
}

// worker serves one disk until the server closes and the queues are empty.
func (s *Server) worker(d *disk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		it := d.pick(s.lim.Workers)
		if it == nil {
			if s.mu.closing && s.idle(d) {
				return
			}
			d.work.Wait()
			continue
		}
		now := s.clock.Now()
		d.waited = now - it.arrived
		it.state = itemRunning
		late := it.due > 0 && now >= it.due
		gone := it.cancelled
		s.unlocked(func() { s.run(d, it, late, gone) })
		d.running--
		if it.req.Class != wire.ClassForeground {
			d.shed--
			d.work.Signal() // another of its kind may run now
		}
		if s.mu.closing {
			d.work.Broadcast()
			d.sync.Broadcast()
		}
	}
}

// idle reports that a closing server has nothing left for the disk.
func (s *Server) idle(d *disk) bool {
	if d.running > 0 || d.parked > 0 || len(d.syncs) > 0 {
		return false
	}
	for _, q := range d.queues {
		if len(q) > 0 {
			return false
		}
	}
	return true
}

// run executes a request, unless it is too late or nobody waits for it.
func (s *Server) run(d *disk, it *item, late, gone bool) {
	if it.conn != nil && (late || gone) {
		err := errCancelled
		if late {
			err = errkind.Timeout.Wrap("dropped after %v in the queue of disk %d", s.clock.Now()-it.arrived, d.id)
		}
		s.mu.Lock()
		if it.req.Op == wire.OpOpen && it.chunk != nil {
			s.forget(it.chunk)
		}
		s.mu.Unlock()
		s.finish(it, fail(err))
		return
	}
	r, err := s.execute(d, it)
	if err != nil {
		r = fail(err)
	}
	if r != nil {
		s.finish(it, r)
	}
}

// awaitSync lets an answer wait for the disk's next sync.
func (s *Server) awaitSync(d *disk, it *item, ticket uint64, r *Reply) {
	s.mu.Lock()
	d.syncs = append(d.syncs, pendingSync{it, ticket, r})
	d.sync.Signal()
	s.mu.Unlock()
}

// syncer makes sealed chunks durable: one Sync for all that came since the
// last one began.
func (s *Server) syncer(d *disk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		group := d.syncs
		d.syncs = nil
		if len(group) == 0 {
			if s.mu.closing && s.idle(d) {
				return
			}
			d.sync.Wait()
			continue
		}
		d.running++
		s.unlocked(func() { s.syncGroup(d, group) })
		d.running--
		if s.mu.closing {
			d.work.Broadcast()
			d.sync.Broadcast()
		}
	}
}

func (s *Server) syncGroup(d *disk, group []pendingSync) {
	ticket := uint64(0)
	for _, p := range group {
		ticket = max(ticket, p.ticket)
	}
	err := d.store.Sync(ticket)
	for _, p := range group {
		if err != nil {
			p.reply = fail(fmt.Errorf("sync disk %d: %w", d.id, err))
		}
		s.finish(p.it, p.reply)
	}
}

// unlocked runs fn without the lock, which is held again afterwards, even when
// the task is being unwound.
func (s *Server) unlocked(fn func()) {
	s.mu.Unlock()
	defer s.mu.Lock()
	fn()
}
