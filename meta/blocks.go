package meta

import (
	"slices"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// block reads a block's record.
func (v *view) block(id ids.BlockID) (*block, bool) {
	b := &block{}
	if !v.load(blockKey(id), b) {
		return nil, false
	}
	b.ID = id
	return b, true
}

func (s *state) setBlock(b *block) {
	b.Birth = s.id.Epoch
	s.put(blockKey(b.ID), b)
}

// settle carries the references that the extents gained and lost over to the
// block records. A block that nobody refers to is dead: its chunks are queued
// for deletion in this very transaction.
func (m *filemap) settle() {
	s := m.s
	for _, id := range m.order {
		d := m.refs[id]
		b := &block{}
		if f := m.fresh[id]; f != nil {
			b.Block = *f
			s.counts.Blocks++
			s.queueMissing(b)
		} else if d == 0 {
			continue
		} else {
			var ok bool
			if b, ok = s.block(id); !ok {
				if !s.failed() {
					s.fail(errkind.Corrupt.Wrap("inode %d refers to block %s, which has no record", m.n.Ino, id))
				}
				return
			}
		}
		if !b.hold(m.n.Ino, d) {
			s.fail(errkind.Corrupt.Wrap("block %s: inode %d gives up more than it holds", id, m.n.Ino))
			return
		}
		if len(b.Holders) == 0 && b.Pins == 0 {
			s.kill(b)
		} else {
			s.setBlock(b)
		}
	}
}

// hold adds d bytes to what ino refers to; false when that falls below zero.
func (b *block) hold(ino ids.Ino, d int64) bool {
	i, ok := slices.BinarySearchFunc(b.Holders, ino, func(h holder, ino ids.Ino) int {
		switch {
		case h.Ino < ino:
			return -1
		case h.Ino > ino:
			return 1
		}
		return 0
	})
	if !ok {
		if d > 0 {
			b.Holders = slices.Insert(b.Holders, i, holder{ino, uint64(d)})
		}
		return d >= 0
	}
	live := int64(b.Holders[i].Live) + d
	b.Holders[i].Live = uint64(live)
	if live <= 0 {
		b.Holders = slices.Delete(b.Holders, i, i+1)
	}
	return live >= 0
}

// kill removes a block's record and queues its chunks for deletion.
func (s *state) kill(b *block) {
	since := number(s.now)
	for i, d := range b.Disks {
		if d != 0 {
			s.enqueue(deadKey(d, ids.ChunkKey{Block: b.ID, Index: uint8(i)}), &since, &s.counts.Dead)
		}
	}
	var keys [][]byte
	lo := b.ID.Append([]byte{spaceRepair})
	s.ascend(lo, next(lo), func(key, _ []byte) bool {
		keys = append(keys, key)
		return true
	})
	for _, k := range keys {
		s.dequeue(k, &s.counts.Repairs)
	}
	s.delete(blockKey(b.ID))
	s.counts.Blocks--
}

// queueMissing queues what is wrong with a new block's chunks: missing, or
// more of them in one failure domain than need be (data-path rules 1 and 16).
func (s *state) queueMissing(b *block) {
	width := max(b.Layout.Width(), s.id.Layout.Width())
	hosts := max(int(s.id.Hosts), 1)
	perHost := (width + hosts - 1) / hosts
	onHost := map[string]int{}
	for i, d := range b.Disks {
		key := ids.ChunkKey{Block: b.ID, Index: uint8(i)}
		if d == 0 {
			s.queueChunk(key, 0, "missing")
			continue
		}
		var rec disk
		s.load(idKey(spaceDisk, uint32(d)), &rec)
		onHost[rec.Host]++
		if slices.Index(b.Disks, d) < i || onHost[rec.Host] > perHost {
			s.queueChunk(key, d, "shares a failure domain")
		}
	}
}

func (s *state) queueChunk(k ids.ChunkKey, d ids.DiskID, reason string) {
	s.enqueue(repairKey(k), &repair{Disk: d, Since: s.now, Reason: reason}, &s.counts.Repairs)
}

// placeChunk records a late, repaired or moved chunk.
func (s *state) placeChunk(r *api.PlaceChunk) (codec.Message, error) {
	b, ok := s.block(r.Key.Block)
	if !ok {
		return nil, errkind.NotFound.Wrap("block %s is dead", r.Key.Block)
	}
	i := int(r.Key.Index)
	switch {
	case i >= len(b.Disks):
		return nil, errkind.Invalid.Wrap("chunk %s: the block has %d", r.Key, len(b.Disks))
	case b.Version != r.Version:
		return nil, errkind.Changed.Wrap("chunk %s: the record is at version %d, not %d", r.Key, b.Version, r.Version)
	case !s.has(idKey(spaceDisk, uint32(r.Disk))):
		return nil, errkind.Invalid.Wrap("chunk %s: disk %d is unknown", r.Key, r.Disk)
	case s.has(deadKey(r.Disk, r.Key)):
		return nil, errkind.Busy.Wrap("chunk %s: an older copy on disk %d is being deleted", r.Key, r.Disk)
	}
	old := b.Disks[i]
	if j := slices.Index(b.Disks, r.Disk); j >= 0 && j != i {
		return nil, errkind.Invalid.Wrap("chunk %s: disk %d already holds chunk %d of the block", r.Key, r.Disk, j)
	}
	if old != 0 && old != r.Disk {
		since := number(s.now)
		s.enqueue(deadKey(old, r.Key), &since, &s.counts.Dead)
	}
	b.Disks[i] = r.Disk
	b.Version++
	s.setBlock(b)
	s.dequeue(repairKey(r.Key), &s.counts.Repairs)
	return &api.Empty{}, nil
}

// queueRepair takes reports of missing or damaged chunks. What is unknown, or
// no longer as reported, is ignored.
func (s *state) queueRepair(r *api.QueueRepair) (codec.Message, error) {
	for _, c := range r.Chunks {
		b, ok := s.block(c.Key.Block)
		if !ok || int(c.Key.Index) >= len(b.Disks) || b.Disks[c.Key.Index] != c.Disk {
			continue
		}
		s.queueChunk(c.Key, c.Disk, r.Damage)
	}
	return &api.Empty{}, nil
}

// chunksFreed takes chunks that were durably deleted from the queue.
func (s *state) chunksFreed(r *api.ChunksFreed) (codec.Message, error) {
	for _, c := range r.Chunks {
		s.dequeue(deadKey(c.Disk, c.Key), &s.counts.Dead)
	}
	return &api.Empty{}, nil
}
