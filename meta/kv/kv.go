// Package kv is the ordered key-value seam under the metadata state machine.
// Production joins an in-memory overlay and bbolt behind it; the simulation
// keeps everything in memory. Keys order as byte strings. Keys that start with a
// zero byte belong to the replica: a state machine neither sees nor writes them.
package kv

// Reader is a consistent view. Returned slices are valid until the view ends
// and must not be changed.
type Reader interface {
	// Get returns the value of key, or nil when there is none. A value that
	// fails its checksum is an error of kind errkind.Corrupt.
	Get(key []byte) ([]byte, error)
	// Ascend calls fn for lo ≤ key < hi in order until it returns false.
	// A nil hi means "to the end".
	Ascend(lo, hi []byte, fn func(key, value []byte) bool) error
	// Descend calls fn for hi ≥ key ≥ lo in descending order until it returns
	// false. A nil hi means "from the end".
	Descend(hi, lo []byte, fn func(key, value []byte) bool) error
}

// Txn is the write set of one command over a view that already contains all
// earlier commands. It sees its own writes. Key and value are taken over: the
// caller must not change them afterwards. A nil or empty value is legal and
// different from "no key".
type Txn interface {
	Reader
	Set(key, value []byte)
	Delete(key []byte)
}

// Store is what lies on the disk: bbolt, or memory in the simulation.
type Store interface {
	// View calls fn with a consistent view of the last flush.
	View(fn func(Reader) error) error
	// Update applies a whole flush in one synced transaction: on return with
	// nil everything is durable, on an error nothing is.
	Update(fn func(Txn) error) error
	Close() error
}

// StateMachine turns log entries into writes. Apply must be deterministic: no
// clock, no randomness, no map order. It is called from one goroutine.
type StateMachine interface {
	// Apply runs one command and returns the encoded reply, which may hold an
	// error. index is the command's position since the founding: it rises by
	// one with each command and is the same on every server (a raft entry packs
	// several commands, so it is not the raft index). An error return means
	// that the view itself failed (checksum, I/O): the node stops. A panic
	// drops the command's writes and answers errkind.Internal. Writes may be
	// made while an Ascend or Descend of the same Txn runs; it does not see them.
	Apply(t Txn, index uint64, cmd []byte) (reply []byte, err error)
}

// Replacer is a Store whose whole content can be replaced by a copy of
// another's.
type Replacer interface {
	// Replace starts an empty replacement; the present content stays until Commit.
	Replace() (Replacement, error)
}

// Replacement is the content to come. Not safe for concurrent use.
type Replacement interface {
	// Put adds a record; keys come in ascending order. Key and value may be
	// changed after it returns.
	Put(key, value []byte) error
	// Commit puts the replacement in the store's place, atomically and durably.
	Commit() error
	// Abort drops it. Harmless after Commit.
	Abort()
}
