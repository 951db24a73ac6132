package workload

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// entry is a name and what the file under it may hold. Only one task at a time
// uses it.
type entry struct {
	dir    ids.Ino
	name   string
	busy   bool
	exists bool
	// images are the contents that a reader may find: one when the last close
	// or fsync succeeded; besides, each state written since then, of which any
	// mixture of bytes may have been committed.
	images [][]byte
	// unsure says that a write failed: what of it will be committed, and when,
	// is open, so the file is only read until it is removed.
	unsure bool
}

func (e *entry) String() string { return fmt.Sprintf("%s/%s", e.dir, e.name) }

// newest is the content as its writer sees it.
func (e *entry) newest() []byte { return e.images[len(e.images)-1] }

// wrote notes a state that is not acknowledged.
func (e *entry) wrote(now []byte) { e.images = append(e.images, now) }

// acknowledged notes that the newest state is durable.
func (e *entry) acknowledged() { e.images = e.images[len(e.images)-1:] }

// check compares what a reader got with what it may get. With several images
// bytes that were written but not acknowledged may also be missing: zeros.
func (e *entry) check(got []byte) error {
	if len(e.images) == 1 && bytes.Equal(got, e.images[0]) {
		return nil
	}
	if !slices.ContainsFunc(e.images, func(p []byte) bool { return len(p) == len(got) }) {
		return fmt.Errorf("%s has %d bytes; may have %v", e, len(got), sizes(e.images))
	}
	for i, b := range got {
		ok := b == 0 && len(e.images) > 1 || slices.ContainsFunc(e.images, func(p []byte) bool { return i < len(p) && p[i] == b })
		if !ok {
			return fmt.Errorf("%s of %d bytes: byte %d is %02x (zero from here for %d bytes); none of the %d states has that: %s",
				e, len(got), i, b, zeros(got[i:]), len(e.images), around(e.images, i))
		}
	}
	return nil
}

func sizes(images [][]byte) []int {
	var out []int
	for _, p := range images {
		out = append(out, len(p))
	}
	return out
}

func zeros(p []byte) int {
	n := len(p) - len(bytes.TrimLeft(p, "\x00"))
	return n
}

func around(images [][]byte, i int) string {
	var out []string
	for _, p := range images {
		if i < len(p) {
			out = append(out, fmt.Sprintf("%02x", p[i]))
		} else {
			out = append(out, "end")
		}
	}
	return fmt.Sprint(out)
}

// overwrite returns p with data at off.
func overwrite(p, data []byte, off int) []byte {
	out := make([]byte, max(len(p), off+len(data)))
	copy(out, p)
	copy(out[off:], data)
	return out
}

// resize returns p cut or filled with zeros.
func resize(p []byte, n int) []byte {
	out := make([]byte, n)
	copy(out, p)
	return out
}
