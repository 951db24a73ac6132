// Package sim runs a whole cluster in one process, reproducibly: one task at a
// time, on a virtual clock, both driven by a seed. Two runs of equal seed have
// equal traces.
package sim

import (
	"container/heap"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/sched"
)

// World schedules tasks. It implements sched.Sched. All of its state belongs
// to whoever runs: the one current task, or the loop between two tasks.
type World struct {
	rng     *rand.Rand
	now     time.Duration
	ready   []*task
	current *task
	timers  timerHeap
	yield   chan struct{}
	live    map[*task]struct{}
	nextID  uint64
	steps   uint64
	trace   uint64
	sink    func(string)
	onStep  func(string)
	ending  bool
}

// task is a goroutine that runs only while it holds the world's token.
type task struct {
	id   uint64
	name string
	wake chan bool // false: the world ends, unwind
	note string    // what it waits for
}

// epoch is the wall clock at virtual time zero.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

// NewWorld returns a world whose every choice follows from seed.
func NewWorld(seed uint64) *World {
	return &World{
		rng:   rand.New(rand.NewPCG(seed, 0x636b707466730001)),
		now:   time.Second,
		yield: make(chan struct{}),
		live:  make(map[*task]struct{}),
	}
}

// Rand is the world's source of randomness.
func (w *World) Rand() *rand.Rand { return w.rng }

// Uint64 returns a random number of the seed.
func (w *World) Uint64() uint64 { return w.rng.Uint64() }

// Now is the virtual clock.
func (w *World) Now() time.Duration { return w.now }

// Wall is the virtual time of day.
func (w *World) Wall() time.Time { return epoch.Add(w.now) }

// OnTrace sends every traced line to fn, for reading a failure.
func (w *World) OnTrace(fn func(string)) { w.sink = fn }

// OnStep sends every scheduling decision to fn: where the first one differs
// between two runs of equal seed, the task before it broke determinism.
func (w *World) OnStep(fn func(string)) { w.onStep = fn }

// Trace adds an event to the trace.
func (w *World) Trace(format string, args ...any) {
	line := fmt.Sprintf("%12s %s", w.now, fmt.Sprintf(format, args...))
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%016x%s", w.trace, line)
	w.trace = h.Sum64()
	if w.sink != nil {
		w.sink(line)
	}
}

// TraceHash is a hash over all traced events and scheduling decisions.
func (w *World) TraceHash() uint64 { return w.trace }

// Go starts a task; it runs when the seed chooses it.
func (w *World) Go(name string, fn func()) {
	if w.ending {
		return
	}
	w.nextID++
	t := &task{id: w.nextID, name: name, wake: make(chan bool)}
	w.live[t] = struct{}{}
	w.ready = append(w.ready, t)
	go func() {
		if !<-t.wake {
			w.finish(t)
			return
		}
		defer w.finish(t)
		fn()
	}()
}

func (w *World) finish(t *task) {
	delete(w.live, t)
	w.yield <- struct{}{}
}

// AfterFunc runs fn in a task of its own after d.
func (w *World) AfterFunc(d time.Duration, fn func()) sched.Timer {
	t := &timer{world: w, at: w.now + max(d, 0), seq: w.nextSeq(), fire: func() { w.Go("timer", fn) }}
	heap.Push(&w.timers, t)
	return t
}

func (w *World) nextSeq() uint64 {
	w.nextID++
	return w.nextID
}

// Sleep parks the current task for d.
func (w *World) Sleep(d time.Duration) {
	var mu sync.Mutex
	c := w.NewCond(&mu)
	mu.Lock()
	defer mu.Unlock()
	c.WaitFor(d)
}

// park gives the token back until someone makes the task ready again.
func (w *World) park(note string) {
	t := w.current
	if t == nil {
		panic("sim: a wait outside of any task")
	}
	t.note = note
	w.yield <- struct{}{}
	if !<-t.wake {
		runtime.Goexit() // the world ended; deferred calls run
	}
}

// Run steps the world until done reports true, and returns an error when no
// task can ever run again or limit of virtual time has passed.
func (w *World) Run(limit time.Duration, done func() bool) error {
	end := w.now + limit
	for !done() {
		for len(w.ready) == 0 {
			if w.timers.Len() == 0 {
				return fmt.Errorf("sim: nothing can run any more; waiting:\n%s", w.waiting())
			}
			t := heap.Pop(&w.timers).(*timer)
			if t.stopped {
				continue
			}
			w.now = max(w.now, t.at)
			t.stopped = true
			t.fire()
		}
		if w.now > end {
			return fmt.Errorf("sim: not done after %s; waiting:\n%s", limit, w.waiting())
		}
		w.step()
	}
	return nil
}

func (w *World) step() {
	i := w.rng.IntN(len(w.ready))
	t := w.ready[i]
	w.ready = append(w.ready[:i], w.ready[i+1:]...)
	w.steps++
	w.trace = (w.trace ^ t.id) * 0x100000001b3
	if w.onStep != nil {
		w.onStep(fmt.Sprintf("%12s task %d %s", w.now, t.id, t.name))
	}
	w.current = t
	t.wake <- true
	<-w.yield
	w.current = nil
}

// Close unwinds every task that is left. The world cannot run after it.
func (w *World) Close() {
	w.ending = true
	for len(w.live) > 0 {
		tasks := w.byID()
		w.current = tasks[0]
		tasks[0].wake <- false
		<-w.yield
	}
}

// Waiting names the tasks that are left.
func (w *World) waiting() string {
	var b strings.Builder
	for _, t := range w.byID() {
		fmt.Fprintf(&b, "  task %d %s: %s\n", t.id, t.name, t.note)
	}
	return b.String()
}

func (w *World) byID() []*task {
	tasks := make([]*task, 0, len(w.live))
	for t := range w.live {
		tasks = append(tasks, t)
	}
	sort.Slice(tasks, func(i, j int) bool { return tasks[i].id < tasks[j].id })
	return tasks
}

// NewCond returns a condition variable of the world.
func (w *World) NewCond(l sync.Locker) sched.Cond { return &cond{world: w, lock: l} }

type cond struct {
	world   *World
	lock    sync.Locker
	waiters []*waiter
}

type waiter struct {
	task  *task
	woken bool
	timer *timer
}

// Wait parks the task until woken.
func (c *cond) Wait() { c.wait(-1) }

// WaitFor parks the task until woken or d has passed.
func (c *cond) WaitFor(d time.Duration) bool { return c.wait(max(d, 0)) }

func (c *cond) wait(d time.Duration) bool {
	w := c.world
	if w.ending {
		runtime.Goexit()
	}
	me := &waiter{task: w.current}
	c.waiters = append(c.waiters, me)
	if d >= 0 {
		me.timer = &timer{world: w, at: w.now + d, seq: w.nextSeq(), fire: func() { c.timeout(me) }}
		heap.Push(&w.timers, me.timer)
	}
	c.lock.Unlock()
	defer c.lock.Lock()
	w.park("condition")
	return me.woken
}

func (c *cond) timeout(me *waiter) {
	for i, x := range c.waiters {
		if x == me {
			c.waiters = append(c.waiters[:i], c.waiters[i+1:]...)
			c.world.ready = append(c.world.ready, me.task)
			return
		}
	}
}

// Signal wakes the longest waiter.
func (c *cond) Signal() {
	if len(c.waiters) > 0 {
		c.wakeAt(0)
	}
}

// Broadcast wakes all waiters.
func (c *cond) Broadcast() {
	for len(c.waiters) > 0 {
		c.wakeAt(0)
	}
}

func (c *cond) wakeAt(i int) {
	x := c.waiters[i]
	c.waiters = append(c.waiters[:i], c.waiters[i+1:]...)
	x.woken = true
	if x.timer != nil {
		x.timer.stopped = true
	}
	c.world.ready = append(c.world.ready, x.task)
}

type timer struct {
	world   *World
	at      time.Duration
	seq     uint64
	fire    func()
	stopped bool
}

// Stop keeps the timer from firing.
func (t *timer) Stop() bool {
	was := !t.stopped
	t.stopped = true
	return was
}

type timerHeap []*timer

func (h timerHeap) Len() int { return len(h) }
func (h timerHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h timerHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)   { *h = append(*h, x.(*timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
