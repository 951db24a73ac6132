package kv

import "github.com/zeebo/xxh3"

// RecordHash is the share of one record in a state's hash, which is the sum of
// the shares of all its records modulo 2^64: the order of changes is without
// effect, so every server with the same records has the same hash.
func RecordHash(key, value []byte) uint64 {
	return xxh3.HashSeed(value, xxh3.HashSeed(key, 0x636b7074_66732d31))
}
