package client

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// part is a run of a file's bytes that is in a block.
type part struct {
	off   int
	block ids.Block
}

// file writes bytes the way a file engine does: stripes that a block refused
// go to the next one, from memory that is poisoned as soon as it is released.
type file struct {
	f     *fakeNet
	spec  chunk.BlockSpec
	data  []byte
	parts []part
	wr    []chunk.BlockWriter
	spilt int // further blocks of rewritten ones
}

var ctx = context.Background()

// save writes all bytes; on nil every one of them is in parts.
func (x *file) save() error {
	for off, idle := 0, 0; off < len(x.data); {
		n, err := x.block(off)
		if err != nil {
			return err
		}
		if off += n; n > 0 {
			idle = 0
		} else if idle++; idle > 20 {
			return fmt.Errorf("no progress at %d", off)
		}
	}
	for _, w := range x.wr {
		w.Committed()
	}
	return nil
}

// block writes one block from off on and returns how many bytes it holds.
func (x *file) block(off int) (int, error) {
	w, err := x.f.c.NewBlock(ctx, x.spec)
	if err != nil {
		return 0, err
	}
	var mu sync.Mutex
	cond := x.f.w.NewCond(&mu)
	calls, pending, accepted := map[int]int{}, 0, 0
	l := w.Layout()
	end := min(len(x.data), off+l.MaxBlockData())
	for at := off; at < end; at += l.StripeData() {
		buf := bytes.Clone(x.data[at:min(at+l.StripeData(), end)])
		mu.Lock()
		pending++
		mu.Unlock()
		err := w.Append(ctx, buf, func(ok bool) {
			mu.Lock()
			defer mu.Unlock()
			calls[at]++
			pending--
			if ok {
				accepted += len(buf)
			}
			for i := range buf {
				buf[i] = 0xee
			}
			cond.Broadcast()
		})
		if err != nil {
			break
		}
	}
	b, err := w.Seal(ctx)
	if err != nil {
		w.Abandon()
		return 0, err
	}
	blocks := append([]ids.Block{b}, w.(chunk.Spiller).Spill()...)
	n := 0
	x.spilt += len(blocks) - 1
	for _, b := range blocks {
		if b.Length > 0 {
			x.parts = append(x.parts, part{off + n, b})
			n += int(b.Length)
		}
	}
	x.wr = append(x.wr, w)
	mu.Lock()
	defer mu.Unlock()
	for pending > 0 {
		if !cond.WaitFor(time.Minute) {
			return 0, fmt.Errorf("%d stripes were never released", pending)
		}
	}
	for at, k := range calls {
		if k != 1 {
			return 0, fmt.Errorf("stripe at %d released %d times", at, k)
		}
	}
	if accepted != n {
		return 0, fmt.Errorf("%d bytes released with true, %d in the blocks", accepted, n)
	}
	return n, nil
}

// check reads everything back in pieces and compares.
func (x *file) check(step int) error {
	got := make([]byte, len(x.data))
	for _, p := range x.parts {
		for off := 0; off < int(p.block.Length); off += step {
			n := min(step, int(p.block.Length)-off)
			if err := x.f.c.ReadBlock(ctx, &p.block, off, got[p.off+off:p.off+off+n]); err != nil {
				return fmt.Errorf("read back at %d: %w", p.off+off, err)
			}
		}
	}
	if !bytes.Equal(x.data, got) {
		for i := range got {
			if got[i] != x.data[i] {
				return fmt.Errorf("byte %d of %d differs after reading back", i, len(got))
			}
		}
	}
	return nil
}

// quorums checks that every block has a quorum of chunks on distinct disks.
func (x *file) quorums() error {
	for _, p := range x.parts {
		seen, n := map[ids.DiskID]bool{}, 0
		for _, d := range p.block.Disks {
			if d != 0 && seen[d] {
				return fmt.Errorf("block %s: two chunks on disk %d", p.block.ID, d)
			}
			if d != 0 {
				n++
			}
			seen[d] = true
		}
		if n < p.block.Layout.Quorum() {
			return fmt.Errorf("block %s: %d chunks", p.block.ID, n)
		}
	}
	return nil
}

// settle lets background work end.
func (f *fakeNet) settle(d time.Duration) { f.w.Sleep(d) }
