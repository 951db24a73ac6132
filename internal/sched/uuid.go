package sched

import (
	"encoding/binary"

	"github.com/ckptfs/ckptfs/internal/ids"
)

// NewUUID returns a random id: from the seed in the simulation.
func NewUUID(s Sched) ids.UUID {
	var u ids.UUID
	binary.LittleEndian.PutUint64(u[:8], s.Uint64())
	binary.LittleEndian.PutUint64(u[8:], s.Uint64())
	return u
}
