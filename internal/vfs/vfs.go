// Package vfs is the seam for disks: the few file operations that the segment
// store and the raft log need. OS is the machine's file system; Mem keeps
// everything in memory, knows what has been synced, and can be crashed.
package vfs

import "io"

// FS is a directory tree. Paths are slash-separated and relative to its root.
// Errors satisfy errors.Is with fs.ErrNotExist and fs.ErrExist where they
// apply; a full disk satisfies errors.Is(err, syscall.ENOSPC), a read-only one
// syscall.EROFS.
type FS interface {
	// Create makes a new file open for reading and writing; ErrExist when it
	// exists. The name is durable only after SyncDir of its directory.
	Create(name string) (File, error)
	// Open opens an existing file for reading and writing.
	Open(name string) (File, error)
	Remove(name string) error
	Rename(from, to string) error
	MkdirAll(dir string) error
	// List returns the base names in dir in ascending order.
	List(dir string) ([]string, error)
	// SyncDir makes creations, renames and removals in dir durable.
	SyncDir(dir string) error
	// Space returns the file system's size and what is free, in bytes.
	Space() (size, free uint64, err error)
}

// File is an open file. Safe for concurrent use.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Allocate reserves space for [off, off+n) and grows the size to cover it;
	// ENOSPC when there is none.
	Allocate(off, n int64) error
	// Punch gives the space of [off, off+n) back; it reads as zeros. The size stays.
	Punch(off, n int64) error
	Truncate(size int64) error
	// Sync makes the data and the size durable (fdatasync).
	Sync() error
	Size() (int64, error)
}
