package file

import (
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Limits of a pack, in entries of the overlay: one commit holds at most
// api.MaxOps, and a block's extents are all in one commit (rule 13).
const (
	closePieces = 400 // no new ranges
	maxPieces   = 440 // a write that would split one more waits for the commit: a block that spills splits some, too
)

type packState uint8

const (
	packOpen   packState = iota // being filled or sent
	packSealed                  // durable, or inline: ready to be committed
	packFlight                  // part of the commit under way
	packDead                    // dropped, or committed
)

// pack is a block in the making: a log of bytes in the order in which they
// were written, and later the sealed block. The overlay says which range of
// the file each byte is. The inode's lock guards it.
type pack struct {
	n       *inode
	seq     uint64
	first   time.Duration // when its first byte came
	bufs    []*buffer
	length  uint32
	fileOff uint64
	pieces  int // entries of the overlay that refer to it
	app     bool
	closed  bool // takes no more bytes
	pumped  bool // its pump was started
	pumping bool // its pump runs
	inline  bool // committed as inline data
	state   packState
	w       chunk.BlockWriter
	blocks  sealed
	stripes []stripe
	issued  []ids.BlockID
	failing time.Duration // since when tries to store it fail; 0: they do not
}

// buffer is one piece of a pack's log.
type buffer struct {
	mem    []byte // nil once the servers have the bytes
	base   uint32 // its place in the log
	n      int    // bytes filled
	frozen bool   // never changes again
	left   int    // bytes without an answer of the block writer
	bad    bool   // some of its bytes will not be in the block
}

func (b *buffer) end() uint32 { return b.base + uint32(b.n) }

// stripe is what was handed to the block writer.
type stripe struct {
	lo, hi   uint32
	answered bool
	ok       bool
}

// last is the buffer that still takes bytes, or nil.
func (pk *pack) last() *buffer {
	if len(pk.bufs) == 0 || pk.closed {
		return nil
	}
	if b := pk.bufs[len(pk.bufs)-1]; !b.frozen {
		return b
	}
	return nil
}

// freeze hands a buffer to the pump.
func (pk *pack) freeze(b *buffer) {
	if b.frozen {
		return
	}
	b.frozen = true
	b.left = b.n
	pk.n.e.budget.freeze(len(b.mem))
}

// bufferAt returns the buffer that holds byte off of the log.
func (pk *pack) bufferAt(off uint32) *buffer {
	lo, hi := 0, len(pk.bufs)
	for lo < hi {
		mid := (lo + hi) / 2
		if pk.bufs[mid].end() <= off {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == len(pk.bufs) || pk.bufs[lo].base > off {
		return nil
	}
	return pk.bufs[lo]
}

// drop returns a buffer's memory.
func (pk *pack) drop(b *buffer) {
	if b.mem != nil {
		pk.n.e.budget.put(&pk.n.acct, b.mem, b.frozen)
		b.mem = nil
	}
}

// close ends the pack: what it holds is sealed, or committed inline.
func (pk *pack) close() {
	if pk.closed {
		return
	}
	if b := pk.last(); b != nil {
		pk.freeze(b)
	}
	pk.closed = true
	switch {
	case pk.pumped:
	case pk.pieces == 0:
		pk.kill()
		pk.n.forget(pk)
	case pk.n.size() <= inlineLimit:
		pk.inline = true
		pk.state = packSealed
		pk.n.mu.wantSeq = max(pk.n.mu.wantSeq, pk.seq)
		pk.n.kick()
	default:
		pk.start()
	}
	pk.n.cond.Broadcast()
}

// start runs the pump.
func (pk *pack) start() {
	if !pk.pumped {
		pk.pumped, pk.pumping = true, true
		pk.n.e.task("pump", func() { pk.pump() })
	}
}

// kill drops the pack. Buffers that the block writer still holds go back when
// it releases them; the rest at once. A pump that runs ends the block itself.
// A pack whose commit is under way is left to that: its block may be needed.
func (pk *pack) kill() {
	if pk.state == packFlight {
		return
	}
	pk.state = packDead
	pk.closed = true
	for _, b := range pk.bufs {
		if !pk.held(b) {
			pk.drop(b)
		}
	}
	if !pk.pumping {
		pk.abandon()
	}
}

// abandon gives up the block, if there is one, in a task, because the inode's
// lock is held.
func (pk *pack) abandon() {
	w, issued := pk.w, pk.issued
	pk.w, pk.issued = nil, nil
	if w == nil {
		pk.n.e.blockIDs.retire(issued)
		return
	}
	pk.n.e.task("abandon", func() {
		w.Abandon()
		pk.n.e.blockIDs.retire(issued)
	})
}

// held reports whether an unanswered stripe covers part of b.
func (pk *pack) held(b *buffer) bool {
	for _, s := range pk.stripes {
		if !s.answered && s.lo < b.end() && b.base < s.hi {
			return true
		}
	}
	return false
}

// forget takes the pack off the inode's list.
func (n *inode) forget(pk *pack) {
	for i, o := range n.mu.packs {
		if o == pk {
			n.mu.packs = append(n.mu.packs[:i:i], n.mu.packs[i+1:]...)
			n.settle()
			n.kick() // a flush may have waited for it alone
			return
		}
	}
}
