package file_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// faults says, in parts of 100, how often what goes wrong.
type faults struct {
	refuse   uint64 // a stripe, and all behind it, is not taken
	deny     uint64 // NewBlock fails for now
	narrow   uint64 // a block gets a narrower layout
	spill    uint64 // a sealed block becomes several
	maxDelay time.Duration
	seal     func(ids.BlockID) error
	read     func(ids.BlockID) error
}

// memBlocks keeps blocks in memory.
type memBlocks struct {
	sched  sched.Sched
	faults faults
	mu     struct {
		sync.Mutex
		blocks  map[ids.BlockID][]byte
		sealed  map[ids.BlockID]ids.Block
		written int64
		reads   int
		open    int // writers neither committed nor abandoned
		broken  []string
	}
}

func newBlocks(s sched.Sched) *memBlocks {
	m := &memBlocks{sched: s}
	m.mu.blocks = map[ids.BlockID][]byte{}
	m.mu.sealed = map[ids.BlockID]ids.Block{}
	return m
}

func (m *memBlocks) chance(part uint64) bool { return part > 0 && m.sched.Uint64()%100 < part }

// delay waits a random time.
func (m *memBlocks) delay(ctx context.Context) error {
	if m.faults.maxDelay > 0 {
		var mu sync.Mutex
		c := m.sched.NewCond(&mu)
		mu.Lock()
		c.WaitFor(time.Duration(m.sched.Uint64() % uint64(m.faults.maxDelay)))
		mu.Unlock()
	}
	if ctx.Err() != nil {
		return errkind.Timeout.Wrap("a server")
	}
	return nil
}

func (m *memBlocks) complain(format string, args ...any) {
	m.mu.broken = append(m.mu.broken, fmt.Sprintf(format, args...))
}

// violations lists what the engine did against the contract.
func (m *memBlocks) violations() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.mu.broken...)
}

func (m *memBlocks) openWriters() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.open
}

func (m *memBlocks) NewBlock(ctx context.Context, spec chunk.BlockSpec) (chunk.BlockWriter, error) {
	if err := m.delay(ctx); err != nil {
		return nil, err
	}
	if m.chance(m.faults.deny) {
		return nil, errkind.Unavailable.Wrap("too few servers")
	}
	w := &memWriter{m: m, layout: spec.Layout, id: spec.NextID(), max: spec.MaxLen, nextID: spec.NextID}
	if m.chance(m.faults.narrow) {
		w.layout, _ = spec.Layout.Narrow(5 - int(m.sched.Uint64()%3))
	}
	w.cond = m.sched.NewCond(&w.mu)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.open++
	return w, nil
}

func (m *memBlocks) WriteBlock(ctx context.Context, spec chunk.BlockSpec, data []byte) (ids.Block, chunk.BlockWriter, error) {
	if err := m.delay(ctx); err != nil {
		return ids.Block{}, nil, err
	}
	if m.chance(m.faults.deny) {
		return ids.Block{}, nil, errkind.Unavailable.Wrap("too few servers")
	}
	w := &memWriter{m: m, layout: spec.Layout.Small(), id: spec.NextID()}
	m.mu.Lock()
	m.mu.open++
	if len(data) == 0 || len(data) > chunk.SmallBlock {
		m.complain("small block of %d bytes", len(data))
	}
	m.mu.Unlock()
	w.data = bytes.Clone(data)
	return w.keep(), w, nil
}

func (m *memBlocks) ReadBlock(ctx context.Context, b *ids.Block, off int, dst []byte) error {
	if err := m.delay(ctx); err != nil {
		return err
	}
	if m.faults.read != nil {
		if err := m.faults.read(b.ID); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.reads++
	data, ok := m.mu.blocks[b.ID]
	if !ok {
		return errkind.NoChunk.Wrap("block %s", b.ID)
	}
	if off < 0 || off+len(dst) > len(data) {
		m.complain("read of %d bytes at %d of block %s of %d", len(dst), off, b.ID, len(data))
		return errkind.Range.Wrap("block %s", b.ID)
	}
	copy(dst, data[off:])
	return nil
}

// memWriter writes one block.
type memWriter struct {
	m      *memBlocks
	layout ids.Layout
	id     ids.BlockID
	max    int
	nextID func() ids.BlockID
	first  ids.BlockID // of a rewritten block
	spill  []ids.Block
	data   []byte
	ended  bool
	cond   sched.Cond
	mu     struct {
		sync.Mutex
		flying  int
		refused bool
		short   bool // the last stripe was not full
		next    int  // stripes are kept in order
		taken   int
		sealed  bool
	}
}

func (w *memWriter) Layout() ids.Layout { return w.layout }

func (w *memWriter) Append(ctx context.Context, data []byte, release func(ok bool)) error {
	size := w.layout.StripeData()
	w.mu.Lock()
	for w.mu.flying >= 2 {
		w.cond.Wait()
	}
	total := len(w.data)
	if len(data) == 0 || len(data) > size || w.mu.short || w.mu.sealed || w.max > 0 && total+len(data) > w.max {
		w.m.mu.Lock()
		w.m.complain("stripe of %d bytes after %d (stripe %d, limit %d, short %v)", len(data), total, size, w.max, w.mu.short)
		w.m.mu.Unlock()
	}
	w.mu.short = len(data) < size
	if w.mu.refused || w.m.chance(w.m.faults.refuse) {
		w.mu.refused = true
		w.mu.Unlock()
		release(false)
		return errkind.Unavailable.Wrap("a chunk was lost")
	}
	w.mu.flying++
	mine := w.mu.taken
	w.mu.taken++
	w.mu.Unlock()
	sum := xxh3.Hash(data)
	w.m.sched.Go("stripe", func() {
		_ = w.m.delay(context.Background())
		w.mu.Lock()
		for w.mu.next != mine {
			w.cond.Wait()
		}
		w.mu.next++
		if xxh3.Hash(data) != sum {
			w.m.mu.Lock()
			w.m.complain("a stripe of block %s changed while it was sent", w.id)
			w.m.mu.Unlock()
		}
		ok := !w.mu.refused
		if ok {
			w.data = append(w.data, data...)
		}
		w.mu.flying--
		w.cond.Broadcast()
		w.mu.Unlock()
		release(ok)
	})
	return nil
}

func (w *memWriter) Seal(ctx context.Context) (ids.Block, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.mu.flying > 0 {
		w.cond.Wait()
	}
	w.mu.sealed = true
	if f := w.m.faults.seal; f != nil {
		if err := f(w.id); err != nil {
			return ids.Block{}, err
		}
	}
	if len(w.data) > 0 && w.m.chance(w.m.faults.spill) {
		return w.rewrite(), nil
	}
	return w.keep(), nil
}

// rewrite files the bytes away as several blocks with new ids, cut anywhere.
func (w *memWriter) rewrite() ids.Block {
	var all []ids.Block
	least, most := len(w.data)/16+1, uint64(len(w.data)/2+1)
	for data := w.data; len(data) > 0; {
		c := min(len(data), least+int(w.m.sched.Uint64()%most))
		w.id, w.data = w.nextID(), data[:c:c]
		all = append(all, w.keep())
		data = data[c:]
	}
	w.first, w.spill = all[0].ID, all[1:]
	return all[0]
}

// Spill returns the blocks of a rewritten one, but for the first.
func (w *memWriter) Spill() []ids.Block { return w.spill }

// keep files the block away and describes it.
func (w *memWriter) keep() ids.Block {
	b := ids.Block{
		ID: w.id, Layout: w.layout, Length: uint32(len(w.data)), Logical: uint32(len(w.data)), Granule: 16,
		Disks: make([]ids.DiskID, w.layout.Width()), Digests: make([]uint64, w.layout.Width()),
	}
	for i := range b.Disks {
		b.Disks[i], b.Digests[i] = ids.DiskID(i+1), xxh3.Hash(w.data)
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.m.mu.blocks[w.id] = w.data
	w.m.mu.sealed[w.id] = b
	w.m.mu.written += int64(len(w.data))
	return b
}

func (w *memWriter) end(what string, lose bool) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.ended {
		w.m.complain("block %s ended twice (%s)", w.id, what)
	}
	w.ended = true
	w.m.mu.open--
	if lose {
		delete(w.m.mu.blocks, w.id)
		delete(w.m.mu.blocks, w.first)
		for i := range w.spill {
			delete(w.m.mu.blocks, w.spill[i].ID)
		}
	}
}

func (w *memWriter) Committed() { w.end("committed", false) }
func (w *memWriter) Abandon()   { w.end("abandoned", true) }
