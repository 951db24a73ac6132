package bolt

import (
	"encoding/binary"
	"hash/crc32"
)

// The envelope of a value: version, CRC32C of key and value, value. The key is
// covered so that a value that ended up under another key is found.
const (
	envelopeVersion = 1
	envelopeSize    = 5
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(key, value []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, key), castagnoli, value)
}

// seal wraps a value for storage.
func seal(key, value []byte) []byte {
	buf := make([]byte, envelopeSize, envelopeSize+len(value))
	buf[0] = envelopeVersion
	binary.LittleEndian.PutUint32(buf[1:], checksum(key, value))
	return append(buf, value...)
}

// open returns the value inside an envelope, never nil; false when it is damaged.
func open(key, env []byte) ([]byte, bool) {
	if len(env) < envelopeSize || env[0] != envelopeVersion {
		return nil, false
	}
	value := env[envelopeSize:len(env):len(env)]
	return value, binary.LittleEndian.Uint32(env[1:]) == checksum(key, value)
}
