// Package file is the file engine: it turns reads and writes of files into
// blocks, extents and commits, and knows nothing of FUSE. docs/file-engine.md
// describes the design; rule numbers are those of docs/design/data-path.md.
//
// Lock order: inode.mu, then one of the leaves Engine.mu, budget.mu,
// cache.mu, blockIDs.mu, registry.mu. No two leaves are held together, no two
// inodes either, and no lock is held over a call of Meta, Blocks or a callback.
// Every wait is a bounded Cond wait; it ends with its context, or after
// Config.OpTimeout.
package file
