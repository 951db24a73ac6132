package file

// WriteMemory returns the most that the write pool ever held, its limit, and
// what it holds now, in bytes.
func (e *Engine) WriteMemory() (peak, limit, now int64) {
	e.budget.mu.Lock()
	defer e.budget.mu.Unlock()
	return e.budget.mu.peak, e.budget.total, e.budget.mu.used
}

// Inodes is how many inodes are in memory.
func (e *Engine) Inodes() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.mu.inodes)
}

// OutstandingIDs is how many block ids are not settled.
func (e *Engine) OutstandingIDs() int {
	e.blockIDs.mu.Lock()
	defer e.blockIDs.mu.Unlock()
	return len(e.blockIDs.mu.out)
}

// Compacting reports whether a compaction runs.
func (e *Engine) Compacting() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.compacting || e.mu.tasks > 0
}
