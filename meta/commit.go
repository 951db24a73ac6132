package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func (s *state) commit(r *api.Commit) (codec.Message, error) {
	n, err := s.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if !n.IsRegular() {
		return nil, errkind.Invalid.Wrap("commit to inode %d, which is not a regular file", r.Ino)
	}
	if len(r.Ops) > api.MaxOps {
		return nil, errkind.Invalid.Wrap("commit to inode %d: %d operations, at most %d", r.Ino, len(r.Ops), api.MaxOps)
	}
	m := s.filemap(n)
	if err := s.freshBlocks(m, r); err != nil {
		return nil, err
	}
	stored := n.Stored
	reply := &api.Committed{}
	visible := false
	for i := range r.Ops {
		o := &r.Ops[i]
		if err := m.apply(o, &reply.Bases); err != nil {
			return nil, err
		}
		visible = visible || o.Kind != api.OpReplace
	}
	for i := range r.Blocks {
		if _, ok := m.refs[r.Blocks[i].ID]; !ok {
			return nil, errkind.Invalid.Wrap("commit to inode %d: no operation refers to block %s", r.Ino, r.Blocks[i].ID)
		}
	}
	m.settle()
	if n.Parent != 0 {
		s.charge(n.Parent, sum{Bytes: n.Stored - stored})
	}
	if visible {
		if r.Mtime != 0 {
			n.Mtime = r.Mtime
		}
		n.Ctime = s.now
	}
	n.Change++
	s.setInode(n)
	reply.Attr = n.attr()
	return reply, nil
}

// freshBlocks checks the blocks that a commit brings, and raises the session's
// floor.
func (s *state) freshBlocks(m *filemap, r *api.Commit) error {
	sess, ok := s.liveSession(s.h.Session)
	if !ok {
		if len(r.Blocks) > 0 {
			return errkind.Invalid.Wrap("commit to inode %d: new blocks without a session", r.Ino)
		}
		return nil
	}
	m.fresh = make(map[ids.BlockID]*ids.Block, len(r.Blocks))
	for i := range r.Blocks {
		b := &r.Blocks[i]
		if m.fresh[b.ID] != nil {
			return errkind.Invalid.Wrap("commit to inode %d: block %s twice", r.Ino, b.ID)
		}
		if err := s.checkBlock(b, r.Ino, sess.Floor); err != nil {
			return err
		}
		m.fresh[b.ID] = b
	}
	if r.Floor > sess.Floor {
		sess.Floor = r.Floor
		s.put(sessionKey(s.h.Session), sess)
	}
	return nil
}

// checkBlock checks a new block: an id that the session may still use and
// nobody used before, a valid shape, enough chunks on known disks.
func (s *state) checkBlock(b *ids.Block, ino ids.Ino, floor uint64) error {
	bad := func(why string) error { return errkind.Invalid.Wrap("block %s of inode %d: %s", b.ID, ino, why) }
	switch {
	case b.ID.Session() != s.h.Session:
		return bad("its id is of another session")
	case b.ID.Incarnation() != s.id.Incarnation:
		return bad("its id is of another incarnation")
	case b.ID.Slot() != ino.Slot():
		return bad("its id is of another slot")
	case b.ID.Counter() < floor:
		return errkind.Fenced.Wrap("block %s of inode %d lies below the session's floor %d", b.ID, ino, floor)
	case b.Layout.Validate() != nil:
		return bad("its layout is not valid")
	case b.Length == 0 || int(b.Length) > b.Layout.MaxBlockData():
		return bad("its length is out of range")
	case b.Codec == ids.CodecNone && (b.Logical != b.Length || len(b.Frames) != 0):
		return bad("it has no codec, yet another logical length or frames")
	case b.Codec != ids.CodecNone:
		return bad("its codec is unknown")
	case b.Granule < 12 || b.Granule > 20:
		return bad("its checksum granule is out of range")
	case len(b.Disks) != b.Layout.Width() || len(b.Digests) != b.Layout.Width():
		return bad("its disks or digests are not as many as its layout has chunks")
	}
	if s.has(blockKey(b.ID)) {
		return errkind.Conflict.Wrap("block %s of inode %d is already there", b.ID, ino)
	}
	durable := 0
	for i, d := range b.Disks {
		if d == 0 {
			continue
		}
		durable++
		if !s.has(idKey(spaceDisk, uint32(d))) {
			return bad("one of its disks is unknown")
		}
		if s.has(deadKey(d, ids.ChunkKey{Block: b.ID, Index: uint8(i)})) {
			return errkind.Conflict.Wrap("block %s of inode %d is dead", b.ID, ino)
		}
	}
	if durable < b.Layout.Quorum() {
		return bad("fewer chunks are durable than its quorum")
	}
	return nil
}

// apply executes one operation.
func (m *filemap) apply(o *api.Op, bases *[]uint64) error {
	n := m.n
	end := o.Off + o.Len
	if end < o.Off || end > api.MaxFileSize {
		return errkind.TooBig.Wrap("inode %d: range %d+%d", n.Ino, o.Off, o.Len)
	}
	switch o.Kind {
	case api.OpWrite:
		return m.write(ids.Extent{Off: o.Off, Len: o.Len, Kind: ids.ExtentBlock, Block: o.Block, BlockOff: o.BlockOff})
	case api.OpInline:
		return m.write(ids.Extent{Off: o.Off, Len: o.Len, Kind: ids.ExtentInline, Data: o.Data})
	case api.OpPunch:
		n.MapVersion++
		m.cut(o.Off, end)
	case api.OpTruncate:
		return m.truncate(o.Off)
	case api.OpAppend:
		base, err := m.append(o)
		*bases = append(*bases, base)
		return err
	case api.OpReplace:
		return m.replace(o)
	case api.OpExtend:
		n.Size = max(n.Size, o.Off)
	case api.OpKillPriv:
		m.s.killPriv(n)
	default:
		return errkind.Invalid.Wrap("inode %d: operation kind %d", n.Ino, o.Kind)
	}
	return nil
}

// write maps a range and raises the size to at least its end.
func (m *filemap) write(e ids.Extent) error {
	if err := m.check(&e); err != nil {
		return err
	}
	m.n.MapVersion++
	m.put(e)
	m.n.Size = max(m.n.Size, e.End())
	return nil
}

// check checks an extent that a client sent.
func (m *filemap) check(e *ids.Extent) error {
	bad := func(why string) error {
		return errkind.Invalid.Wrap("inode %d: extent %d+%d: %s", m.n.Ino, e.Off, e.Len, why)
	}
	if end := e.End(); end < e.Off || end > api.MaxFileSize {
		return errkind.TooBig.Wrap("inode %d: extent %d+%d", m.n.Ino, e.Off, e.Len)
	}
	switch {
	case e.Len == 0:
		return bad("no bytes")
	case e.Kind == ids.ExtentInline && uint64(len(e.Data)) != e.Len:
		return bad("its length is not that of its data")
	case e.Kind == ids.ExtentInline && e.Len > api.MaxInline:
		return bad("too many bytes to be kept in the metadata")
	case e.Kind == ids.ExtentInline:
		return nil
	case e.Kind != ids.ExtentBlock:
		return bad("unknown kind")
	}
	b := m.fresh[e.Block]
	if b == nil {
		old, ok := m.s.block(e.Block)
		if !ok {
			return errkind.Changed.Wrap("inode %d: block %s is gone: read the map again", m.n.Ino, e.Block)
		}
		b = &old.Block
	}
	if uint64(e.BlockOff)+e.Len > uint64(b.Logical) {
		return bad("behind the end of its block")
	}
	return nil
}

// append places a run at the real end of the file and returns where that is.
func (m *filemap) append(o *api.Op) (uint64, error) {
	base, length := m.n.Size, o.Len
	if err := inOrder(m.n.Ino, o.Extents); err != nil {
		return 0, err
	}
	if k := len(o.Extents); k > 0 {
		length = max(length, o.Extents[k-1].End())
	}
	if length > api.MaxFileSize-base {
		return 0, errkind.TooBig.Wrap("inode %d: %d bytes appended at %d", m.n.Ino, length, base)
	}
	m.n.MapVersion++
	for _, e := range o.Extents {
		e.Off += base
		if err := m.check(&e); err != nil {
			return 0, err
		}
		m.put(e)
	}
	m.n.Size = base + length
	return base, nil
}

// replace swaps the extents of a window, if the map did not change meanwhile.
func (m *filemap) replace(o *api.Op) error {
	n := m.n
	if n.MapVersion != o.Expect {
		return errkind.Changed.Wrap("inode %d: the map is at version %d, not %d", n.Ino, n.MapVersion, o.Expect)
	}
	if err := inOrder(n.Ino, o.Extents); err != nil {
		return err
	}
	for i := range o.Extents {
		e := &o.Extents[i]
		if err := m.check(e); err != nil {
			return err
		}
		if e.Off < o.Off || e.End() > o.Off+o.Len || e.End() > n.Size {
			return errkind.Invalid.Wrap("inode %d: extent %d+%d lies outside of the window or the file", n.Ino, e.Off, e.Len)
		}
	}
	n.MapVersion++
	m.cut(o.Off, o.Off+o.Len)
	for _, e := range o.Extents {
		m.put(e)
	}
	return nil
}

// inOrder checks that extents are in order and do not overlap.
func inOrder(ino ids.Ino, list []ids.Extent) error {
	for i := 1; i < len(list); i++ {
		if list[i].Off < list[i-1].End() {
			return errkind.Invalid.Wrap("inode %d: extents out of order at %d", ino, list[i].Off)
		}
	}
	return nil
}
