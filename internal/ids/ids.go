// Package ids holds the identifiers and the small value types that every part
// of ckptfs speaks in. It imports nothing of the project, and nothing that
// touches the outside world.
package ids

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// ErrSyntax is the kind of every parse error of this package.
var ErrSyntax = errors.New("ids: bad syntax")

// Slot is a shard of the metadata key space (15 bits). Today all slots are in
// one raft group.
type Slot uint16

// MaxSlot is the largest slot number.
const MaxSlot Slot = 1<<15 - 1

// Ino is an inode number: 0 ‖ slot (15 bits) ‖ counter (48 bits), never reused.
// The top bit is set only for the virtual inodes of a snapshot view.
type Ino uint64

// RootIno is the inode of the file system's root directory. FUSE wants 1, and
// slot 0, counter 1 is exactly that.
const RootIno Ino = 1

const inoCounterBits = 48

// MaxInoCounter is the last counter value of a slot.
const MaxInoCounter = uint64(1)<<inoCounterBits - 1

// MakeIno joins a slot and a counter; counter must be ≤ MaxInoCounter.
func MakeIno(slot Slot, counter uint64) Ino {
	return Ino(uint64(slot)<<inoCounterBits | counter)
}

// Slot returns the shard that holds the inode's records.
func (i Ino) Slot() Slot { return Slot(uint64(i) >> inoCounterBits & uint64(MaxSlot)) }

// Counter returns the number of the inode within its slot.
func (i Ino) Counter() uint64 { return uint64(i) & MaxInoCounter }

// Virtual reports whether the number names an inode of a snapshot view.
func (i Ino) Virtual() bool { return i>>63 == 1 }

func (i Ino) String() string { return fmt.Sprintf("%d", uint64(i)) }

// Epoch counts snapshots: only the creation of a snapshot advances it.
type Epoch uint64

// Session is a mount's (or a job's) lease with the metadata service; 40 bits,
// never reused. Zero is "no session".
type Session uint64

// MaxSession is the largest session number.
const MaxSession Session = 1<<40 - 1

// Incarnation counts restores, rebuilds and forced bootstraps of a cluster, so
// that a metadata service that went back in time never hands out an id whose
// old chunks still lie on the disks.
type Incarnation uint16

// BlockID is 128 bits: slot of its file (16), incarnation (16), session (40),
// counter (56). Ids are made by the writing session without asking anyone.
type BlockID struct{ Hi, Lo uint64 }

// MaxBlockCounter is the last counter value of a session.
const MaxBlockCounter = uint64(1)<<56 - 1

// MakeBlockID joins the four parts; counter must be ≤ MaxBlockCounter.
func MakeBlockID(slot Slot, inc Incarnation, s Session, counter uint64) BlockID {
	return BlockID{
		Hi: uint64(slot)<<48 | uint64(inc)<<32 | uint64(s)>>8,
		Lo: uint64(s)<<56 | counter&MaxBlockCounter,
	}
}

// Slot returns the slot of the file that the block was written for.
func (b BlockID) Slot() Slot { return Slot(b.Hi >> 48) }

// Incarnation returns the cluster incarnation in which the id was made.
func (b BlockID) Incarnation() Incarnation { return Incarnation(b.Hi >> 32) }

// Session returns the session that made the id.
func (b BlockID) Session() Session { return Session(b.Hi&(1<<32-1)<<8 | b.Lo>>56) }

// Counter returns the block's number within its session.
func (b BlockID) Counter() uint64 { return b.Lo & MaxBlockCounter }

// IsZero reports whether b is the zero id, which no block has.
func (b BlockID) IsZero() bool { return b.Hi|b.Lo == 0 }

// Compare orders ids as their big-endian bytes do.
func (b BlockID) Compare(o BlockID) int {
	switch {
	case b.Hi != o.Hi && b.Hi < o.Hi, b.Hi == o.Hi && b.Lo < o.Lo:
		return -1
	case b == o:
		return 0
	}
	return 1
}

// Append appends the 16 big-endian bytes of b.
func (b BlockID) Append(p []byte) []byte {
	p = binary.BigEndian.AppendUint64(p, b.Hi)
	return binary.BigEndian.AppendUint64(p, b.Lo)
}

// BlockIDFrom reads the 16 big-endian bytes of an id; p must hold them.
func BlockIDFrom(p []byte) BlockID {
	return BlockID{binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(p[8:])}
}

// String writes slot-incarnation-session-counter in hexadecimal.
func (b BlockID) String() string {
	return fmt.Sprintf("%04x-%04x-%010x-%014x", uint16(b.Slot()), uint16(b.Incarnation()), uint64(b.Session()), b.Counter())
}

// ParseBlockID reads what String writes.
func ParseBlockID(s string) (BlockID, error) {
	raw, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(raw) != 16 || len(s) != 35 {
		return BlockID{}, fmt.Errorf("block id %q: want SLOT-INCARNATION-SESSION-COUNTER in hexadecimal: %w", s, ErrSyntax)
	}
	return BlockIDFrom(raw), nil
}

// UUID names a cluster, a disk or a segment file.
type UUID [16]byte

func (u UUID) String() string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// IsZero reports whether u is unset.
func (u UUID) IsZero() bool { return u == UUID{} }

// ParseUUID reads what String writes.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	raw, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(raw) != 16 {
		return u, fmt.Errorf("uuid %q: %w", s, ErrSyntax)
	}
	copy(u[:], raw)
	return u, nil
}

// MarshalText writes what String writes.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads what String writes.
func (u *UUID) UnmarshalText(p []byte) error {
	v, err := ParseUUID(string(p))
	if err == nil {
		*u = v
	}
	return err
}

// DiskID numbers a disk of the cluster; given at registration, never reused.
// Zero is "no disk": a chunk that is missing.
type DiskID uint32

// ServerID numbers a chunk server; given at registration, never reused.
type ServerID uint32

// ChunkKey names one chunk: the fragment Index (0 ≤ Index < K+M; the first K
// are data) of a block.
type ChunkKey struct {
	Block BlockID
	Index uint8
}

func (k ChunkKey) String() string { return fmt.Sprintf("%s/%d", k.Block, k.Index) }
