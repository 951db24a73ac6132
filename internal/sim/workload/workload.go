// Package workload lets random programs use a simulated cluster while random
// faults hit it, and checks that nothing acknowledged is lost: close-to-open
// through another mount all the while, and the whole state at the end. One seed
// gives one run.
package workload

import (
	"errors"
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim/simcluster"
	"github.com/ckptfs/ckptfs/meta/api"
)

// Config says how large a run is. Zero values take the default.
type Config struct {
	Cluster simcluster.Config
	Mounts  int           // default 3
	Workers int           // tasks that use them; default 4
	Names   int           // files; default 10
	MaxFile int           // bytes of one; default 800,000
	For     time.Duration // of virtual time under faults; default 15 s
	NoFault bool
	// Wild hurts any number of chunk servers at once. Then operations may fail,
	// but what was acknowledged must still be there when all are back.
	Wild bool
	// atEnd, set by tests, runs before the whole state is checked.
	atEnd func(r *run) error
	// Trace, when set, gets every event.
	Trace func(line string)
	// Steps, when set, gets every scheduling decision.
	Steps func(line string)
}

func (c *Config) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.Mounts, 3)
	def(&c.Workers, 4)
	def(&c.Names, 10)
	def(&c.MaxFile, 800_000)
	if c.For == 0 {
		c.For = 15 * time.Second
	}
	if c.Cluster.Servers == 0 {
		c.Cluster.Servers = 7
	}
	if c.Cluster.Layout.IsZero() {
		c.Cluster.Layout = ids.Layout{Kind: ids.LayoutRS, K: 4, M: 2, CellLog: ids.MinCellLog}
	}
}

// Result is what a run did.
type Result struct {
	Hash    uint64 // of the trace: equal for equal seeds
	Ops     int
	Faults  int
	Failed  int // operations that failed as they may
	Virtual time.Duration
	Audit   simcluster.Audit
}

// run is one run.
type run struct {
	*simcluster.Cluster
	cfg     Config
	result  Result
	mounts  []*simcluster.Mount
	entries []*entry
	workers int
	hurt    []bool // chunk servers that a fault occupies
	under   int    // faults under way
	stop    bool
	broken  error
	stopped bool
}

// Run runs one seed and returns the first broken promise, or nil.
func Run(seed uint64, cfg Config) (Result, error) {
	cfg.setDefaults()
	r := &run{Cluster: simcluster.New(seed, cfg.Cluster), cfg: cfg}
	r.World.OnTrace(cfg.Trace)
	r.World.OnStep(cfg.Steps)
	err := r.Run(cfg.For+time.Hour, r.main)
	r.result.Hash, r.result.Virtual = r.World.TraceHash(), r.World.Now()
	if r.broken != nil {
		err = r.broken
	}
	if r.stopped {
		r.Close() // a run cut off is left as it is: its tasks may be anywhere
	}
	return r.result, err
}

// violate notes a broken promise; the first one counts.
func (r *run) violate(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	r.World.Trace("violation: %v", err)
	if r.broken == nil {
		r.broken = err
	}
	r.stop = true
}

func (r *run) main() error {
	if err := r.prepare(); err != nil {
		return err
	}
	for i := range r.cfg.Workers {
		r.workers++
		r.World.Go(fmt.Sprintf("worker %d", i), r.work)
	}
	end := r.World.Now() + r.cfg.For
	for !r.stop && r.World.Now() < end {
		r.World.Sleep(time.Duration(r.World.Rand().Int64N(int64(time.Second))))
		if !r.cfg.NoFault && !r.stop {
			r.fault()
		}
	}
	r.stop = true
	for r.workers > 0 || r.under > 0 {
		r.World.Sleep(100 * time.Millisecond)
	}
	if r.broken != nil {
		return r.broken
	}
	if r.cfg.atEnd != nil {
		if err := r.cfg.atEnd(r); err != nil {
			return err
		}
	}
	err := r.verify()
	err = errors.Join(err, r.Stop())
	r.stopped = true
	return err
}

// prepare boots the cluster, mounts it and makes the directories.
func (r *run) prepare() error {
	if err := r.Boot(); err != nil {
		return err
	}
	r.hurt = make([]bool, r.cfg.Cluster.Servers)
	for i := range r.cfg.Mounts {
		m, err := r.Mount(fmt.Sprintf("mount%d", i+1))
		if err != nil {
			return err
		}
		r.mounts = append(r.mounts, m)
	}
	dirs := []ids.Ino{ids.RootIno}
	for _, name := range []string{"a", "b"} {
		var e api.Entry
		err := r.mounts[0].Meta.Do(ctx, &api.Create{Parent: ids.RootIno, Name: []byte(name), Mode: api.ModeDir | 0o755, Exclusive: true}, &e)
		if err != nil {
			return err
		}
		dirs = append(dirs, e.Attr.Ino)
	}
	for i := range r.cfg.Names {
		r.entries = append(r.entries, &entry{dir: dirs[i%len(dirs)], name: fmt.Sprintf("file%d", i)})
	}
	return nil
}

// The cluster must be quiet at the latest after settle: then no job of a leader
// that went away can still be at work, and its guards have gone.
const (
	settle    = 20 * time.Minute
	lookEvery = 30 * time.Second
)

// verify checks the whole state once everything is up and quiet.
func (r *run) verify() error {
	for _, m := range r.mounts {
		for _, e := range r.entries {
			if err := r.read(m, e); err != nil {
				return fmt.Errorf("after everything has healed, through %s: %w", m.Name, err)
			}
		}
	}
	var errs []error
	for _, m := range r.mounts {
		if err := m.Close(); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", m.Name, err))
		}
	}
	errs = append(errs, r.audit())
	return errors.Join(errs...)
}

// audit waits until nothing is left to be done, then checks what there is.
func (r *run) audit() error {
	var a simcluster.Audit
	var err error
	for end := r.World.Now() + settle; r.World.Now() < end; {
		r.World.Sleep(lookEvery)
		if a, err = r.Check(); err == nil && a.Strays+a.Missing == 0 {
			break
		}
	}
	r.result.Audit = a
	r.World.Trace("audit %+v", a)
	if a.Strays > 0 {
		err = errors.Join(err, fmt.Errorf("%d chunks on disks belong to no block", a.Strays))
	}
	if a.Missing > 0 {
		err = errors.Join(err, fmt.Errorf("%d chunks still wait for repair", a.Missing))
	}
	return err
}
