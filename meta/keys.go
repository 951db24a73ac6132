package meta

import (
	"encoding/binary"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// The first byte of a key is its space: part of the format, see
// docs/format/metadata.md.
const (
	spaceCluster   = 0x01 // the cluster, its counters: one record each
	spaceSlot      = 0x02 // slot → inode allocation
	spaceName      = 0x10 // parent, hash, name → inode
	spaceInode     = 0x11 // ino → attributes
	spaceXattr     = 0x12 // ino, name → value
	spaceExtent    = 0x13 // ino, generation, offset → bytes
	spaceBlock     = 0x14 // block id → block
	spaceSum       = 0x15 // directory ino → recursive sums
	spaceBack      = 0x16 // ino, parent → names there; multiply-linked inodes
	spaceOrphan    = 0x17 // ino: no name is left
	spaceFree      = 0x20 // kind, id, generation: to be freed in steps
	spaceDead      = 0x21 // disk, block, index: chunk to be deleted
	spaceRepair    = 0x22 // block, index: chunk to be made anew
	spaceLock      = 0x28 // ino → granted locks
	spaceLocked    = 0x29 // session, ino: the session has locks there
	spaceSession   = 0x30 // session → its state
	spaceSecret    = 0x31 // secret → session
	spaceWindow    = 0x32 // session, place → sequence and reply
	spaceServer    = 0x38 // server id → server
	spaceDisk      = 0x39 // disk id → disk
	spaceMember    = 0x3a // uuid of a server or disk → its id
	spaceHistory   = 0x50 // reserved: key, death epoch → old version
	spaceHistoryBy = 0x51 // reserved: cover, key, death epoch
)

// Records of spaceCluster.
var (
	keyCluster = []byte{spaceCluster, 1} // identity, layout, feature level, epoch
	keyClock   = []byte{spaceCluster, 2} // last logged time
	keyAlloc   = []byte{spaceCluster, 3} // last ids given
	keyCounts  = []byte{spaceCluster, 4} // queue lengths and totals
)

// minHash is the smallest name hash, so that the smallest cookies stay free
// for entries such as "." and "..".
const minHash = 16

// HashName returns the 63-bit hash of a name, at least 16: the order of a
// listing, and its cookie. FNV-1a with a finalizer that spreads the low bits;
// part of the format.
func HashName(name []byte) uint64 {
	h := uint64(0xcbf29ce484222325)
	for _, b := range name {
		h ^= uint64(b)
		h *= 0x100000001b3
	}
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return max(h>>1, minHash)
}

func be64(p []byte, v uint64) []byte { return binary.BigEndian.AppendUint64(p, v) }

func be32(p []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(p, v) }

// ordered appends v so that keys sort as the numbers do and small numbers are
// short: a count of bytes, then as many big-endian bytes.
func ordered(p []byte, v uint64) []byte {
	n := 0
	for x := v; x != 0; x >>= 8 {
		n++
	}
	p = append(p, byte(n))
	for i := n - 1; i >= 0; i-- {
		p = append(p, byte(v>>(8*i)))
	}
	return p
}

func takeOrdered(p []byte) (v uint64, rest []byte, ok bool) {
	if len(p) == 0 || p[0] > 8 || len(p) < 1+int(p[0]) {
		return 0, nil, false
	}
	n := int(p[0])
	for _, b := range p[1 : 1+n] {
		v = v<<8 | uint64(b)
	}
	return v, p[1+n:], n == 0 || p[1] != 0
}

func inoKey(space byte, ino ids.Ino) []byte {
	return be64(append(make([]byte, 0, 9), space), uint64(ino))
}

func slotKey(s ids.Slot) []byte { return []byte{spaceSlot, byte(s >> 8), byte(s)} }

func nameKey(parent ids.Ino, name []byte) []byte {
	k := make([]byte, 0, 17+len(name))
	k = be64(append(k, spaceName), uint64(parent))
	return append(be64(k, HashName(name)), name...)
}

func nameHashKey(parent ids.Ino, hash uint64) []byte {
	return be64(inoKey(spaceName, parent), hash)
}

func xattrKey(ino ids.Ino, name []byte) []byte { return append(inoKey(spaceXattr, ino), name...) }

func generationKey(ino ids.Ino, gen uint64) []byte {
	return ordered(append(make([]byte, 0, 19), inoKey(spaceExtent, ino)...), gen)
}

func extentKey(ino ids.Ino, gen, off uint64) []byte { return ordered(generationKey(ino, gen), off) }

func blockKey(id ids.BlockID) []byte { return id.Append(append(make([]byte, 0, 17), spaceBlock)) }

func backKey(ino, parent ids.Ino) []byte { return be64(inoKey(spaceBack, ino), uint64(parent)) }

func deadKey(disk ids.DiskID, k ids.ChunkKey) []byte {
	p := be32(append(make([]byte, 0, 22), spaceDead), uint32(disk))
	return append(k.Block.Append(p), k.Index)
}

func repairKey(k ids.ChunkKey) []byte {
	return append(k.Block.Append(append(make([]byte, 0, 18), spaceRepair)), k.Index)
}

func sessionKey(s ids.Session) []byte { return be64([]byte{spaceSession}, uint64(s)) }

func windowKey(s ids.Session, place uint8) []byte {
	return append(be64([]byte{spaceWindow}, uint64(s)), place)
}

func lockedKey(s ids.Session, ino ids.Ino) []byte {
	return be64(be64([]byte{spaceLocked}, uint64(s)), uint64(ino))
}

func uuidKey(space byte, u ids.UUID) []byte { return append([]byte{space}, u[:]...) }

func idKey(space byte, id uint32) []byte { return be32([]byte{space}, id) }

// Kinds of spaceFree.
const (
	freeClip       = 1 // id = ino: extents that a pending clip hides
	freeGeneration = 2 // id = ino, with generation: extents before a truncation to zero
	freeInode      = 3 // id = ino: all that is left of a removed inode
	freeSession    = 4 // id = session: what an ended session left
)

func freeKey(kind byte, id, gen uint64) []byte {
	k := be64([]byte{spaceFree, kind}, id)
	if kind == freeGeneration {
		k = ordered(k, gen)
	}
	return k
}

// next returns the first key behind all keys that start with p, or nil.
func next(p []byte) []byte {
	q := append([]byte(nil), p...)
	for i := len(q) - 1; i >= 0; i-- {
		if q[i]++; q[i] != 0 {
			return q[:i+1]
		}
	}
	return nil
}

// mark is a record whose key says it all.
type mark struct{}

// Code does nothing.
func (*mark) Code(*codec.Coder) {}

func beUint64(p []byte) uint64 { return binary.BigEndian.Uint64(p) }

func beUint32(p []byte) uint32 { return binary.BigEndian.Uint32(p) }
