// Package fs is the kernel's side of a mount: the FUSE operations, their
// handles, and errno. A node id of the kernel is an inode number; nothing is
// kept of an inode but what the kernel's own references need. Data goes
// through the Engine, names and attributes through Meta.
//
// What programs may rely on is written in docs/consistency.md.
//
// Lock order: openDir.mu, then one of the leaves: the tables' mu, dirOpens.mu,
// locks.mu, atimes.mu, invalidations.mu, op.mu. No lock but openDir.mu is held
// over a call of Meta or Engine.
package fs
