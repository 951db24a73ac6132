package replica

import (
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// diskJob is one thing for the disk task, which does them in order.
type diskJob struct {
	append  *Append
	ours    bool // append holds proposals of this leader
	install *incoming
	compact uint64 // index up to which the store holds everything
	stop    bool
}

// store hands a change of the log to the disk task.
func (r *Replica) store(a *Append, ours bool) {
	l := &r.loop
	job := diskJob{append: a, ours: ours && len(a.Entries) > 0 && a.Sync}
	if job.ours {
		l.appending++
	}
	if a.Snapshot != nil {
		job.install = r.beginInstall(a)
	}
	r.enqueueDisk(job)
}

func (r *Replica) enqueueDisk(j diskJob) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.disk = append(r.mu.disk, j)
	r.work.Signal()
}

// runDisk does the disk's jobs. It has a task of its own, so that a hung disk
// does not stop the loop's clock.
func (r *Replica) runDisk() {
	for {
		jobs, dead := r.takeDisk()
		if dead {
			r.log.Abandon()
			return
		}
		for len(jobs) > 0 {
			n, err := r.doDisk(jobs)
			if err != nil {
				r.log.Abandon()
				r.fail(err)
				return
			}
			if jobs[n-1].stop {
				return
			}
			jobs = jobs[n:]
		}
	}
}

func (r *Replica) takeDisk() ([]diskJob, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.mu.disk) == 0 && !r.mu.dead {
		r.work.Wait()
	}
	jobs := r.mu.disk
	r.mu.disk = nil
	return jobs, r.mu.dead
}

// doDisk does the first jobs, as many appends as possible with one sync, and
// returns how many.
func (r *Replica) doDisk(jobs []diskJob) (int, error) {
	switch j := jobs[0]; {
	case j.stop:
		return 1, r.log.Close()
	case j.compact != 0:
		return 1, r.log.Compact(onlyGroup, j.compact, r.cfg.RetainLog)
	case j.install != nil:
		return 1, r.install(j)
	}
	var writes []log.Write
	sync, n := false, 0
	for _, j := range jobs {
		if j.append == nil || j.install != nil {
			break
		}
		writes = append(writes, log.Write{Group: onlyGroup, Entries: j.append.Entries, Hard: j.append.Hard})
		sync = sync || j.append.Sync
		n++
	}
	if err := r.log.Append(writes, sync); err != nil {
		return n, err
	}
	done := jobs[:n]
	if sync {
		r.post(func() { r.stored(done) })
	}
	return n, nil
}

func (r *Replica) stored(jobs []diskJob) {
	for _, j := range jobs {
		if j.ours && r.loop.appending > 0 {
			r.loop.appending--
		}
		if j.append.Sync {
			r.loop.node.Stored(j.append)
		}
	}
}

// flushIfDue moves what was applied into the store, in a task of its own.
func (r *Replica) flushIfDue(now time.Duration) {
	l := &r.loop
	due := now-l.lastFlush >= r.cfg.FlushEvery || r.over.Bytes() >= r.cfg.FlushBytes
	if l.flushing || l.installing || !due || l.applied.index == l.flushed.index {
		return
	}
	f := r.over.Freeze()
	if f == nil {
		return
	}
	st := l.applied
	_, st.newborn = l.node.Newborn()
	l.flushing, l.lastFlush = true, now
	r.setFlushing(true)
	r.task("metadata flush", func() {
		err := f.Write(stateKey, st.encode())
		r.setFlushing(false)
		if err == nil {
			err = r.log.Prepare()
		}
		if err != nil {
			r.fail(fmt.Errorf("flush the metadata up to entry %d: %w", st.index, err))
			return
		}
		r.post(func() { r.flushDone(st) })
	})
}

func (r *Replica) flushDone(st state) {
	l := &r.loop
	l.flushing, l.flushed = false, st
	r.storage.SetSnapshot(st.marker())
	r.enqueueDisk(diskJob{compact: st.index})
}

// lastWrite flushes what is left, before the replica closes.
func (r *Replica) lastWrite() {
	l := &r.loop
	if l.applied.index == l.flushed.index {
		return
	}
	_, l.applied.newborn = l.node.Newborn()
	if f := r.over.Freeze(); f != nil {
		if err := f.Write(stateKey, l.applied.encode()); err != nil {
			r.fail(fmt.Errorf("flush the metadata before closing: %w", err))
		}
	}
}

// awaitFlush waits in the disk task until no flush writes to the store; false
// when the replica has stopped.
func (r *Replica) awaitFlush() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.mu.flushing && !r.mu.dead {
		r.work.Wait()
	}
	return !r.mu.dead
}

func (r *Replica) setFlushing(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.flushing = on
	r.work.Broadcast()
}
