// Package kv is the ordered key-value seam under the metadata state machine.
// Production joins an in-memory overlay and bbolt behind it; the simulation
// keeps everything in memory. Keys order as byte strings.
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
	// Descend calls fn for hi ≥ key ≥ lo in descending order until it returns false.
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
	// Apply runs the command of one log position and returns the encoded
	// reply, which may hold an error. An error return means that the view
	// itself failed (checksum, I/O): the node stops.
	Apply(t Txn, index uint64, cmd []byte) (reply []byte, err error)
}
