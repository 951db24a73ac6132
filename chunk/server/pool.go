package server

import (
	"math/bits"
	"sync"

	"golang.org/x/sys/unix"
)

const page = 4 << 10

// maxPages is the size of the largest buffer, one full payload, in pages.
const maxPages = 256

// pool hands out page-aligned buffers. They are mapped, not taken from the Go
// heap, because the collector would let the heap grow to twice their size.
// Callers keep what is in use at once below a budget of their own; the pool
// keeps what is mapped below five quarters of it, the cost of its size classes.
// Safe for concurrent use.
type pool struct {
	limit int64
	mu    struct {
		sync.Mutex
		free   [maxPages + 1][][]byte // by pages
		mapped int64
	}
}

func newPool(budget int64) *pool { return &pool{limit: budget + budget/4 + maxPages*page} }

// classPages rounds up to one of four sizes an octave.
func classPages(n int) int {
	pages := (n + page - 1) / page
	if pages <= 4 {
		return max(pages, 1)
	}
	step := 1 << (bits.Len(uint(pages-1)) - 3)
	return (pages + step - 1) / step * step
}

// get returns a buffer of n bytes, 0 < n ≤ maxPages×page. It fails only when
// the kernel has no memory.
func (p *pool) get(n int) ([]byte, error) {
	pages := classPages(n)
	p.mu.Lock()
	defer p.mu.Unlock()
	if free := p.mu.free[pages]; len(free) > 0 {
		b := free[len(free)-1]
		p.mu.free[pages] = free[:len(free)-1]
		return b[:n], nil
	}
	p.shrink(p.limit - int64(pages)*page)
	b, err := unix.Mmap(-1, 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	p.mu.mapped += int64(len(b))
	return b[:n], nil
}

// put takes back a buffer of get, sliced from its start.
func (p *pool) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	full := b[:cap(b)]
	p.mu.free[len(full)/page] = append(p.mu.free[len(full)/page], full)
}

// shrink unmaps free buffers, the largest first, until at most limit bytes are
// mapped or none is free.
func (p *pool) shrink(limit int64) {
	for pages := maxPages; pages > 0 && p.mu.mapped > limit; pages-- {
		for p.mu.mapped > limit && len(p.mu.free[pages]) > 0 {
			free := p.mu.free[pages]
			b := free[len(free)-1]
			p.mu.free[pages] = free[:len(free)-1]
			p.mu.mapped -= int64(len(b))
			// Unmapping what was mapped cannot fail.
			_ = unix.Munmap(b)
		}
	}
}

// close unmaps every free buffer.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shrink(0)
}
