package meta

import (
	"slices"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func (c *checker) readExtents() {
	var before extent
	var beforeIno ids.Ino
	var beforeGen uint64
	c.each(spaceExtent, func(key, value []byte) {
		e, ok := c.extent(key, value)
		if !ok {
			return
		}
		ino := inoOf(key)
		gen, _, _ := splitExtentKey(key)
		if ino == beforeIno && gen == beforeGen && e.Off < before.End() {
			c.bad("inode %d: extents overlap at %d", ino, e.Off)
		}
		before, beforeIno, beforeGen = e, ino, gen
		if e.Kind == ids.ExtentBlock {
			k := reference{e.Block, ino}
			if c.refs[k] == 0 {
				c.refList = append(c.refList, k)
			}
			c.refs[k] += e.Len
		}
		c.checkExtent(c.inodes[ino], ino, gen, &e)
	})
}

func (c *checker) checkExtent(n *seenInode, ino ids.Ino, gen uint64, e *extent) {
	switch {
	case n == nil:
		c.left(ino, "extent")
	case gen > n.Generation:
		c.bad("inode %d: extent of generation %d, the file is at %d", ino, gen, n.Generation)
	case gen < n.Generation:
		if !c.has(freeKey(freeGeneration, uint64(ino), gen)) {
			c.bad("inode %d: extents of generation %d are not queued to be freed", ino, gen)
		}
	default:
		n.covered += e.Len
		if e.Version > n.MapVersion {
			c.bad("inode %d: extent at %d is of map version %d, the file at %d", ino, e.Off, e.Version, n.MapVersion)
		}
		if n.inode.hidden(e) {
			n.hidden = true
		} else if e.End() > n.Size {
			c.bad("inode %d: extent %d+%d behind its size %d", ino, e.Off, e.Len, n.Size)
		}
	}
}

func (c *checker) checkMaps() {
	for _, n := range c.order {
		inline := uint64(len(n.Inline))
		switch {
		case n.Mode&api.ModeType == api.ModeSymlink:
			if inline != n.Size || n.Stored != 0 {
				c.bad("symbolic link %d: size %d, target of %d bytes", n.Ino, n.Size, inline)
			}
		case inline > 0:
			if inline > api.MaxInline || inline > n.Size || n.covered != 0 || n.Stored != inline {
				c.bad("inode %d: %d bytes inline, %d in extents, stored %d, size %d", n.Ino, inline, n.covered, n.Stored, n.Size)
			}
		case n.Stored != n.covered:
			c.bad("inode %d: stored %d, extents cover %d", n.Ino, n.Stored, n.covered)
		}
		queued := c.has(freeKey(freeClip, uint64(n.Ino), 0))
		if queued != (len(n.Clips) > 0) || n.hidden && !queued || len(n.Clips) > maxClips {
			c.bad("inode %d: %d clips, hidden extents: %t, queued: %t", n.Ino, len(n.Clips), n.hidden, queued)
		}
	}
}

func (c *checker) readBlocks() {
	var list []*block
	c.each(spaceBlock, func(key, value []byte) {
		b := &block{}
		if !c.decode(key, value, b) {
			return
		}
		b.ID = ids.BlockIDFrom(key[1:])
		c.blocks[b.ID] = b
		list = append(list, b)
		c.counts.Blocks++
		if len(b.Holders) == 0 && b.Pins == 0 {
			c.bad("block %s: nobody holds it", b.ID)
		}
		for i, h := range b.Holders {
			if h.Live == 0 || h.Live != c.refs[reference{b.ID, h.Ino}] || i > 0 && b.Holders[i-1].Ino >= h.Ino {
				c.bad("block %s: inode %d holds %d bytes, its extents cover %d", b.ID, h.Ino, h.Live, c.refs[reference{b.ID, h.Ino}])
			}
		}
	})
	for _, b := range list {
		for i, d := range b.Disks {
			key := ids.ChunkKey{Block: b.ID, Index: uint8(i)}
			if d == 0 && !c.has(repairKey(key)) {
				c.bad("chunk %s is missing and not in the repair queue", key)
			}
			if d != 0 && c.has(deadKey(d, key)) {
				c.bad("chunk %s is alive on disk %d, and queued to be deleted there", key, d)
			}
		}
	}
}

// checkRefs looks for extents whose block does not know of them.
func (c *checker) checkRefs() {
	for _, k := range c.refList {
		b := c.blocks[k.block]
		if b == nil {
			c.bad("inode %d refers to block %s, which has no record", k.ino, k.block)
			continue
		}
		if !slices.ContainsFunc(b.Holders, func(h holder) bool { return h.Ino == k.ino }) {
			c.bad("block %s: inode %d refers to it, but is no holder", k.block, k.ino)
		}
	}
}

func (c *checker) readQueues() {
	c.each(spaceDead, func(_, _ []byte) { c.counts.Dead++ })
	c.each(spaceRepair, func(key, value []byte) {
		c.counts.Repairs++
		var rec repair
		k := chunkOf(key[1:])
		b := c.blocks[k.Block]
		if c.decode(key, value, &rec) && (b == nil || int(k.Index) >= len(b.Disks) || b.Disks[k.Index] != rec.Disk) {
			c.bad("chunk %s is to be repaired, but its record does not agree", k)
		}
	})
}

func (c *checker) readFreeQueue() {
	c.each(spaceFree, func(key, _ []byte) {
		c.counts.Freeing++
		if len(key) < 10 {
			c.bad("free queue entry %x", key)
			return
		}
		id := beUint64(key[2:])
		n := c.inodes[ids.Ino(id)]
		switch key[1] {
		case freeClip:
			if n == nil || len(n.Clips) == 0 {
				c.bad("inode %d is queued for clips that it has not", id)
			}
		case freeInode:
			if n != nil {
				c.bad("inode %d is queued as gone, and is there", id)
			}
		case freeGeneration, freeSession:
		default:
			c.bad("free queue entry %x", key)
		}
	})
}

func (c *checker) readSessions() {
	var a alloc
	c.load(keyAlloc, &a)
	c.each(spaceSession, func(key, value []byte) {
		var s session
		if !c.decode(key, value, &s) {
			return
		}
		id := ids.Session(beUint64(key[1:]))
		queued := c.has(freeKey(freeSession, uint64(id), 0))
		if id > a.Session || queued != (s.State == SessionEnded) {
			c.bad("session %d of %d: state %d, queued as ended: %t", id, a.Session, s.State, queued)
		}
		if s.State != SessionEnded {
			c.counts.Sessions++
		}
	})
	for _, space := range []byte{spaceWindow, spaceLocked} {
		c.each(space, func(key, _ []byte) {
			if id := beUint64(key[1:]); !c.has(sessionKey(ids.Session(id))) {
				c.bad("record %x of session %d, which is gone", key, id)
			}
		})
	}
	c.each(spaceSecret, func(key, value []byte) {
		var id number
		var s session
		if c.decode(key, value, &id) && (!c.load(sessionKey(ids.Session(id)), &s) || s.Secret != ids.UUID(key[1:])) {
			c.bad("secret of session %d, which has another", id)
		}
	})
}

func (c *checker) readLocks() {
	c.each(spaceLock, func(key, value []byte) {
		var held locks
		ino := inoOf(key)
		if !c.decode(key, value, &held) {
			return
		}
		if c.inodes[ino] == nil {
			c.left(ino, "locks")
		}
		for i := range held.List {
			l := &held.List[i]
			if _, live := c.liveSession(l.Session); !live {
				continue
			}
			if !c.has(lockedKey(l.Session, ino)) {
				c.bad("inode %d: session %d holds a lock, its index does not say so", ino, l.Session)
			}
			for j := range held.List[:i] {
				o := &held.List[j]
				_, live := c.liveSession(o.Session)
				overlap := l.sameOwner(o) && l.Start <= o.End && o.Start <= l.End
				if live && (l.conflicts(o) || overlap) {
					c.bad("inode %d: locks %+v and %+v cannot both be", ino, *l, *o)
				}
			}
		}
	})
}

func (c *checker) readMembers() {
	c.each(spaceMember, func(key, value []byte) {
		var id number
		if c.decode(key, value, &id) {
			c.members[ids.UUID(key[1:])] = uint32(id)
		}
	})
	servers := c.servers()
	m := cluster.Map{Servers: servers}
	if int(c.id.Hosts) != m.Hosts() {
		c.bad("%d hosts, a recount %d", c.id.Hosts, m.Hosts())
	}
	c.disks(func(d cluster.Disk, rec *disk) {
		s := m.Server(d.Server)
		if s == nil || s.Host != rec.Host || c.members[d.UUID] != uint32(d.ID) {
			c.bad("disk %d: server %d, host %q, number of its uuid %d", d.ID, d.Server, rec.Host, c.members[d.UUID])
		}
	})
}
