package file

// CacheReferences is how many references the pieces of the cache have.
func (e *Engine) CacheReferences() int {
	e.cache.mu.Lock()
	defer e.cache.mu.Unlock()
	n := 0
	for _, p := range e.cache.mu.pieces {
		n += p.refs
	}
	return n
}
