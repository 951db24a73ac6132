package meta

import (
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Bounds of data-path rule 15.
const (
	// CompactWindow is the piece of a file that is compacted at once, bytes.
	CompactWindow = 64 << 20
	// CompactExtents is how many extents a window may have.
	CompactExtents = 256
	// compactBlock is the length from which a block under half live counts.
	compactBlock = 1 << 20
)

// Candidate is a part of a file that is worth compacting.
type Candidate struct {
	Ino      ids.Ino
	Off, End uint64 // a window: at most CompactWindow bytes
	Extents  int
	Bytes    uint64 // that the window's extents cover
	Held     uint64 // bytes of the blocks that they refer to, wherever
	Live     uint64 // bytes of these that any extent covers
}

// CompactCursor is where a scan for candidates goes on; the zero value starts,
// and is returned at the end.
type CompactCursor struct {
	Ino ids.Ino
	Gen uint64
	Off uint64
}

// ReadCompactions looks for windows to compact, behind the cursor, at about
// limit extents. Windows of content that is only waiting to be freed may be
// among them: a commit to them is refused as changed.
func ReadCompactions(r kv.Reader, at CompactCursor, limit int) (list []Candidate, goOn CompactCursor, err error) {
	err = read("compaction candidates", r, func(v *view) {
		w := &windowScan{v: v}
		seen := 0
		v.ascend(extentKey(at.Ino, at.Gen, at.Off), []byte{spaceExtent + 1}, func(key, value []byte) bool {
			e, ok := v.extent(key, value)
			if !ok {
				return false
			}
			gen, _, _ := splitExtentKey(key)
			here := CompactCursor{ids.Ino(beUint64(key[1:])), gen, e.Off - e.Off%CompactWindow}
			if here != w.at {
				if seen >= limit {
					goOn = here
					return false
				}
				w.finish(&list)
				w.start(here)
			}
			seen++
			w.add(&e)
			return true
		})
		w.finish(&list)
	})
	return list, goOn, err
}

// windowScan sums up the extents of one window.
type windowScan struct {
	v    *view
	at   CompactCursor
	c    Candidate
	seen map[ids.BlockID]bool
	half bool // refers to a big block that is mostly dead
}

func (w *windowScan) start(at CompactCursor) {
	w.at, w.half = at, false
	w.c = Candidate{Ino: at.Ino, Off: at.Off, End: at.Off + CompactWindow}
	w.seen = map[ids.BlockID]bool{}
}

func (w *windowScan) add(e *extent) {
	w.c.Extents++
	w.c.Bytes += e.Len
	if e.Kind != ids.ExtentBlock || w.seen[e.Block] {
		return
	}
	w.seen[e.Block] = true
	b, ok := w.v.block(e.Block)
	if !ok || b.Pins != 0 {
		return
	}
	w.c.Held += uint64(b.Logical)
	w.c.Live += b.live()
	w.half = w.half || b.Logical >= compactBlock && b.live() < uint64(b.Logical)/2
}

func (w *windowScan) finish(list *[]Candidate) {
	if w.c.Extents > CompactExtents || w.half || w.c.Held > 2*w.c.Live {
		*list = append(*list, w.c)
	}
}
