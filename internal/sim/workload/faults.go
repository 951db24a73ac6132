package workload

import (
	"time"
)

// recover is how long a chunk server that was hit counts as hurt afterwards:
// blocks that were open then, and chunks that were late, must first be safe.
const recoverFor = 15 * time.Second

// fault starts one random fault, if the rules allow it: never more chunk servers
// are hurt at once than the layout has chunks to spare.
func (r *run) fault() {
	rng := r.World.Rand()
	i := rng.IntN(len(r.hurt))
	mount := r.mounts[rng.IntN(len(r.mounts))].Name
	long := 50*time.Millisecond + time.Duration(rng.Int64N(int64(8*time.Second)))
	switch p := rng.IntN(100); {
	case p < 40:
		r.hit(i, func() {
			r.CrashChunk(i)
			r.World.Sleep(long)
			r.must(r.RestartChunk(i))
		})
	case p < 55:
		r.hit(i, func() { r.apart(mount, r.ChunkName(i), long) })
	case p < 65:
		r.hit(i, func() { r.apart(r.MetaName(0), r.ChunkName(i), long) })
	case p < 75:
		r.begin(func() { r.apart(mount, r.MetaName(0), long) })
	case p < 85:
		r.begin(func() { r.Drop(mount, r.ChunkName(i)) })
	case p < 90:
		r.begin(func() {
			r.Slow(r.ChunkName(i), time.Duration(rng.IntN(60_000_000)))
			r.World.Sleep(long)
			r.Slow(r.ChunkName(i), 0)
		})
	case p < 94:
		r.begin(func() { r.killMount(rng.IntN(len(r.mounts)), long) })
	default:
		j := rng.IntN(max(r.cfg.Cluster.Metas, 1))
		r.begin(func() {
			if !r.MetaUp(j) {
				return
			}
			r.CrashMeta(j)
			r.World.Sleep(long / 2)
			r.must(r.RestartMeta(j))
		})
	}
}

// killMount kills a mount and mounts again after d.
func (r *run) killMount(i int, d time.Duration) {
	m := r.mounts[i]
	if m.Dead() {
		return
	}
	m.Crash()
	r.World.Sleep(d)
	again, err := r.Mount(m.Name)
	r.must(err)
	if err == nil {
		r.mounts[i] = again
	}
}

func (r *run) must(err error) {
	if err != nil {
		r.violate("%w", err)
	}
}

// begin runs a fault in a task of its own.
func (r *run) begin(fn func()) {
	r.under++
	r.result.Faults++
	r.World.Go("fault", func() {
		defer func() { r.under-- }()
		fn()
	})
}

// hit runs a fault of a chunk server, unless too many are hurt already.
func (r *run) hit(i int, fn func()) {
	n := 0
	for _, hurt := range r.hurt {
		if hurt {
			n++
		}
	}
	if r.hurt[i] || n >= int(r.cfg.Cluster.Layout.M) && !r.cfg.Wild {
		return
	}
	r.hurt[i] = true
	r.begin(func() {
		fn()
		r.World.Go("recovery", func() {
			r.World.Sleep(recoverFor)
			r.hurt[i] = false
		})
	})
}

// apart partitions two nodes for d.
func (r *run) apart(a, b string, d time.Duration) {
	r.Partition(a, b)
	r.World.Sleep(d)
	r.Heal(a, b)
}
