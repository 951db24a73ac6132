package client

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Bounds of the finisher: more is left to the repair queue.
const (
	maxFinishing   = 2
	maxFinishQueue = 64
	finishTries    = 3
	finishTimeout  = 5 * time.Second
)

// finisher rebuilds, on another disk, chunks of committed blocks whose first
// server failed and whose cells are gone.
type finisher struct {
	c  *Client
	mu struct {
		sync.Mutex
		queue   []finishJob
		running int
		closed  bool
	}
	cond sched.Cond
}

type finishJob struct {
	what  wire.Open // the header of the block's chunks
	block ids.Block
	index int
}

func newFinisher(c *Client) *finisher {
	f := &finisher{c: c}
	f.cond = c.sched.NewCond(&f.mu)
	return f
}

// rebuild queues a missing chunk; it never waits.
func (f *finisher) rebuild(what wire.Open, b ids.Block, index int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.closed || len(f.mu.queue) >= maxFinishQueue {
		return
	}
	f.mu.queue = append(f.mu.queue, finishJob{what, cloneBlock(b), index})
	if f.mu.running < maxFinishing {
		f.mu.running++
		f.c.sched.Go("finish late chunks", f.work)
	}
}

func (f *finisher) work() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.mu.queue) > 0 && !f.mu.closed {
		job := f.mu.queue[0]
		f.mu.queue = f.mu.queue[1:]
		f.mu.Unlock()
		key := ids.ChunkKey{Block: job.block.ID, Index: uint8(job.index)}
		disk, err := f.one(&job, key)
		if err != nil {
			f.c.log.Info("late chunk left to repair", "chunk", key.String(), "why", err)
		} else {
			f.c.reportPlaced(key, disk, job.block.Version)
		}
		f.mu.Lock()
	}
	f.mu.running--
	f.cond.Broadcast()
}

func (f *finisher) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.closed = true
	for f.mu.running > 0 {
		f.cond.Wait()
	}
}

func (f *finisher) stopped() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.closed {
		return errkind.Interrupted.Wrap("the client is closed")
	}
	return nil
}

// one rebuilds a chunk on a disk whose domain holds none of the block's others.
func (f *finisher) one(job *finishJob, key ids.ChunkKey) (ids.DiskID, error) {
	m := f.c.cfg.Map()
	if m == nil {
		return 0, errkind.Unavailable.Wrap("no cluster map")
	}
	skip := make(map[ids.DiskID]bool)
	for _, d := range job.block.Disks {
		skip[d] = true
	}
	place := f.c.place(m, job.block.Layout.Width(), skip)
	for _, d := range job.block.Disks {
		if disk := m.Disk(d); disk != nil {
			if s := m.Server(disk.Server); s != nil {
				place.claim(peer{disk: d, server: s.ID, addr: s.Addr, host: s.Host})
			}
		}
	}
	last := errkind.NoSpace.Wrap("no disk in another failure domain")
	for range finishTries {
		p, ok := place.next()
		if !ok {
			break
		}
		if last = f.copyTo(job, key, p); last == nil {
			return p.disk, nil
		}
		place.drop(p)
	}
	return 0, last
}

func (f *finisher) copyTo(job *finishJob, key ids.ChunkKey, p peer) error {
	b, ctx := &job.block, context.Background()
	n := ec.ChunkLen(b.Layout, int(b.Length))
	open := job.what
	open.Disk, open.Key, open.Reserve = p.disk, key, uint32(n)
	open.Siblings = slices.Clone(b.Disks)
	open.Siblings[job.index] = p.disk
	credit, err := f.credit(p, &open, 1)
	if err != nil {
		return err
	}
	err = f.c.RebuildChunk(ctx, b, job.index, func(off uint32, data []byte, sums []uint64) error {
		end := int(off) + len(data)
		if end > credit {
			if credit, err = f.credit(p, &open, end); err != nil {
				return err
			}
		}
		resp, err := f.c.call(ctx, p, &wire.Request{
			Op: wire.OpPut, Class: wire.ClassBackground, Payload: [][]byte{data},
			Body: &wire.Put{Disk: p.disk, Key: key, Off: off, Sums: sums},
		}, finishTimeout)
		if err != nil {
			return err
		}
		if g, ok := resp.Body.(*wire.Grant); ok {
			credit = max(credit, int(g.Credit))
		}
		return f.stopped()
	})
	if err != nil {
		f.c.forget(p, key)
		return err
	}
	resp, err := f.c.call(ctx, p, &wire.Request{Op: wire.OpSeal, Class: wire.ClassBackground, Body: &wire.Seal{
		Disk: p.disk, Key: key, Length: uint32(n), Digest: b.Digests[job.index],
	}}, finishTimeout)
	if err != nil {
		return err
	}
	if s, ok := resp.Body.(*wire.Sealed); !ok || s.Digest != b.Digests[job.index] {
		return errkind.Corrupt.Wrap("chunk %s on disk %d: sealed with another digest", key, p.disk)
	}
	return nil
}

// credit asks for a grant that reaches end.
func (f *finisher) credit(p peer, open *wire.Open, end int) (int, error) {
	start := f.c.sched.Now()
	for {
		m := *open
		resp, err := f.c.call(context.Background(), p, &wire.Request{Op: wire.OpOpen, Class: wire.ClassBackground, Body: &m}, finishTimeout)
		if err == nil {
			if g, ok := resp.Body.(*wire.Grant); ok && int(g.Credit) >= end {
				return int(g.Credit), nil
			}
		} else if errkind.Of(err) != errkind.Busy {
			return 0, err
		}
		if err := f.stopped(); err != nil {
			return 0, err
		}
		if f.c.sched.Now()-start > finishTimeout {
			return 0, errkind.Busy.Wrap("disk %d grants no space for a late chunk", p.disk)
		}
		f.c.sleep(minBackoff)
	}
}

// sleep waits for d.
func (c *Client) sleep(d time.Duration) {
	var mu sync.Mutex
	cond := c.sched.NewCond(&mu)
	mu.Lock()
	defer mu.Unlock()
	cond.WaitFor(d)
}
