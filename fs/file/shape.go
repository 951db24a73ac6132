package file

import (
	"slices"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	window         = 64 << 20  // bytes of a file that are compacted together (rule 15)
	windowExtents  = 1024      // more are compacted by the writer
	compactRanges  = 256       // committed ranges after which the writer looks at windows
	compactWindows = 64        // windows remembered for a look
	compactWaste   = 1 << 20   // dead bytes that are not worth it
	shapeExtents   = 512 << 10 // a file of more extents is left to the metadata service's jobs
	shapeBlocks    = 64 << 10  // or of more blocks
	maxMoves       = 64 << 10  // ranges that commits may change while one compaction runs
)

// shape is what a writer knows of the blocks that hold a file, without asking.
// The live bytes need not be counted: they are in the attributes.
type shape struct {
	version uint64 // of the map, of which held is true; any other: held is unknown
	held    uint64 // at most so many bytes are in all blocks that the file refers to
	fresh   uint64 // bytes of blocks committed since it was last decided whether to look
}

// see takes note of attributes: nothing holds nothing.
func (s *shape) see(a *api.Attr) {
	if a.Stored == 0 {
		s.version, s.held = a.MapVersion, 0
	}
}

// added notes that a commit which raised the map's version from old to version
// brought blocks.
func (s *shape) added(blocks []ids.Block, old, version uint64) {
	bytes := uint64(0)
	for i := range blocks {
		bytes += uint64(blocks[i].Logical)
	}
	s.fresh += bytes
	s.held += bytes
	if s.version == old {
		s.version = version
	}
}

// wasteful reports whether a file with so many live bytes may be held by more
// than twice as many (rule 15).
func (s *shape) wasteful(a *api.Attr) bool {
	return s.version == a.MapVersion && s.held > 2*a.Stored+compactWaste
}

// span is a range of a file.
type span struct{ lo, hi uint64 }

// moves are the commits of this engine while a compaction runs: what they
// changed must not be replaced by what was there before.
type moves struct {
	tracked bool
	// version is that of the map if nobody else has changed it since the
	// compaction began; broken says that somebody may have.
	version uint64
	broken  bool
	changed overlay // of holes
}

// note takes down what a commit changed.
func (m *moves) note(ops []api.Op, bases []uint64, old, steps, version uint64) {
	if !m.tracked {
		return
	}
	m.broken = m.broken || m.version != old || version != old+steps || len(m.changed.list) > maxMoves
	m.version = version
	mark := func(lo, hi uint64) { m.changed.insert(entry{off: lo, end: hi}) }
	for i := range ops {
		op := &ops[i]
		switch op.Kind {
		case api.OpTruncate:
			mark(op.Off, infinity)
		case api.OpAppend:
			for _, b := range bases {
				mark(b, infinity)
			}
		case api.OpWrite, api.OpInline, api.OpPunch, api.OpReplace:
			mark(op.Off, op.Off+op.Len)
		case api.OpExtend, api.OpKillPriv:
		}
	}
}

// untouched returns the parts of [lo, hi) that no commit changed.
func (m *moves) untouched(lo, hi uint64) []span {
	var left []span
	for i := m.changed.search(lo); lo < hi; i++ {
		if i == len(m.changed.list) || m.changed.list[i].off >= hi {
			return append(left, span{lo, hi})
		}
		if en := m.changed.list[i]; en.off > lo {
			left = append(left, span{lo, en.off})
		}
		lo = m.changed.list[i].end
	}
	return left
}

// account notes a commit that was made, before its attributes are taken over.
func (n *inode) account(req *api.Commit, reply *api.Committed, steps uint64) {
	for i := range req.Ops {
		op := &req.Ops[i]
		if op.Kind != api.OpWrite && op.Kind != api.OpInline && op.Kind != api.OpAppend {
			continue
		}
		n.mu.ranges++
		w := op.Off / window
		if !slices.Contains(n.mu.windows, w) && len(n.mu.windows) < compactWindows {
			n.mu.windows = append(n.mu.windows, w)
		}
	}
	n.accountBlocks(req.Ops, req.Blocks, reply, steps)
}

// accountBlocks notes what a commit changed, and the blocks that it brought.
func (n *inode) accountBlocks(ops []api.Op, blocks []ids.Block, reply *api.Committed, steps uint64) {
	old, version := n.mu.attr.MapVersion, reply.Attr.MapVersion
	n.mu.moves.note(ops, reply.Bases, old, steps, version)
	if version != old+steps {
		old = version + 1 // what held counts is of another map
	}
	n.mu.shape.added(blocks, old, version)
}

// worthCompacting decides whether to look at the file's map. When nothing is
// known of its blocks the chance is such that about half as many bytes as it
// has are written between two looks, also by writers that open it only briefly.
func (n *inode) worthCompacting() bool {
	if n.mu.err != nil {
		return false
	}
	s, a := &n.mu.shape, &n.mu.attr
	if n.mu.ranges >= compactRanges || s.wasteful(a) {
		return true
	}
	if s.version == a.MapVersion || s.fresh == 0 {
		return false
	}
	fresh := s.fresh
	s.fresh = 0
	return n.e.cfg.Sched.Uint64()%max(a.Stored/2, compactWaste) < fresh
}
