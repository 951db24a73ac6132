package ec

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Sums appends the XXH3-64 of each granule of p; the last granule may be short.
func Sums(dst []uint64, p []byte, granuleLog uint8) []uint64 {
	g := 1 << granuleLog
	for len(p) > g {
		dst = append(dst, xxh3.Hash(p[:g]))
		p = p[g:]
	}
	if len(p) > 0 {
		dst = append(dst, xxh3.Hash(p))
	}
	return dst
}

// Check reports whether p has exactly the given sums.
func Check(p []byte, sums []uint64, granuleLog uint8) bool {
	if len(sums) != Granules(len(p), granuleLog) {
		return false
	}
	g := 1 << granuleLog
	for i, want := range sums {
		if xxh3.Hash(p[i*g:min((i+1)*g, len(p))]) != want {
			return false
		}
	}
	return true
}

// Digest returns the XXH3-64 of the table: its sums as little-endian numbers,
// one behind the other.
func Digest(sums []uint64) uint64 {
	var buf [256 * 8]byte
	p := buf[:0]
	for _, s := range sums {
		p = binary.LittleEndian.AppendUint64(p, s)
	}
	return xxh3.Hash(p)
}
