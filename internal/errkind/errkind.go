// Package errkind holds the sentinel kinds of error that cross the borders
// between rooms and processes. fs/ alone maps them to errno; a reply carries
// the code, so both sides of a wire compare with errors.Is.
package errkind

import (
	"errors"
	"fmt"
)

// Kind is a class of failure. Its number is part of the wire protocols: only
// ever append.
type Kind uint16

// The kinds.
const (
	OK Kind = iota
	Internal
	NotFound
	Exists
	NotDir
	IsDir
	NotEmpty
	NameTooLong
	Invalid
	Perm         // the operation is never allowed (EPERM)
	Access       // the caller has no right (EACCES)
	NoSpace      // no disk has room, or too few disks
	Quota        // a quota would be exceeded
	Stale        // the inode is gone
	Fenced       // the session has lost what it held
	Busy         // try again later
	Loop         // a directory would become its own ancestor
	CrossDevice  // link or rename that cannot be
	TooManyLinks // link count limit
	NoAttr       // no such extended attribute
	Range        // a buffer or number is out of range
	TooBig       // a file or value is larger than allowed
	NotLeader    // this metadata server does not lead
	Unavailable  // no server answered in time
	Corrupt      // stored bytes fail their checksum
	Split        // the commit touches too many records: divide it
	Changed      // a compare-and-set found another version
	Version      // no common protocol version
	WrongCluster // the peer belongs to another cluster
	Unsupported
	Interrupted
	Timeout
	WouldBlock // a lock is held by another
	Deadlock
	ReadOnly // the disk or mount takes no writes
	NoChunk  // the disk has no such chunk
	Conflict // different bytes for something already written
	NoData   // lseek: no data or hole behind the offset
	Expired  // the session is unknown or has ended
	kinds
)

var names = [kinds]string{
	"ok", "internal error", "no such file or directory", "already exists", "not a directory",
	"is a directory", "directory not empty", "name too long", "invalid argument", "operation not permitted",
	"permission denied", "no space", "quota exceeded", "stale", "fenced", "busy", "would be its own ancestor",
	"cross-device", "too many links", "no such attribute", "out of range", "too big", "not the leader",
	"unavailable", "corrupt", "too many records", "changed meanwhile", "protocol version mismatch",
	"wrong cluster", "not supported", "interrupted", "timed out", "would block", "deadlock", "read-only",
	"no such chunk", "conflicting bytes", "no data", "session ended",
}

// Error makes Kind an error, so that it can serve as a sentinel.
func (k Kind) Error() string {
	if k < kinds {
		return names[k]
	}
	return fmt.Sprintf("error kind %d", uint16(k))
}

// Of returns the kind that err wraps: OK for nil, Internal when it wraps none.
func Of(err error) Kind {
	if err == nil {
		return OK
	}
	var k Kind
	if errors.As(err, &k) {
		return k
	}
	return Internal
}

// Wrap returns an error of kind k that says what failed.
func (k Kind) Wrap(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), k)
}
