package client

import (
	"container/list"
	"sync"
)

// latePool counts the bytes of cells that are kept for late chunks after their
// stripe was released (rule 10). When it is full the oldest late cells are
// dropped; their chunks are left to the repair queue.
type latePool struct {
	c  *Client
	mu struct {
		sync.Mutex
		budget, used int64
		fifo         *list.List // of *lateCell, oldest first
	}
}

// lateCell is one entry: drop gives the memory up, called without locks.
type lateCell struct {
	size int64
	drop func()
	at   *list.Element // nil once dropped or released
}

func newLatePool(c *Client, budget int64) *latePool {
	p := &latePool{c: c}
	p.mu.budget, p.mu.fifo = budget, list.New()
	return p
}

// keep counts size bytes. It returns nil when they can never fit. Older cells
// are dropped, in a task of their own, to make room; until they are gone the
// pool is over its budget by less than size.
func (p *latePool) keep(size int, drop func()) *lateCell {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := int64(size)
	if n > p.mu.budget {
		return nil
	}
	for p.mu.used+n > p.mu.budget {
		e := p.mu.fifo.Front()
		if e == nil {
			return nil
		}
		victim := p.remove(e)
		p.c.sched.Go("drop late cell", victim.drop)
	}
	l := &lateCell{size: n, drop: drop}
	l.at = p.mu.fifo.PushBack(l)
	p.mu.used += n
	return l
}

// remove is called with the lock held.
func (p *latePool) remove(e *list.Element) *lateCell {
	l := p.mu.fifo.Remove(e).(*lateCell)
	l.at = nil
	p.mu.used -= l.size
	return l
}

// release gives the bytes of a cell back; a second time it does nothing.
func (p *latePool) release(l *lateCell) {
	if l == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.at != nil {
		p.remove(l.at)
	}
}

func (p *latePool) usedBytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.used
}
