// Package ranks drives any directory the way the ranks of a training job do:
// save a sharded checkpoint, load it back verified, and work on small files.
package ranks

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
)

// patternLen is the length of the incompressible base pattern, in bytes.
const patternLen = 1 << 20

// stampEvery is how often the pattern is stamped with its file offset.
const stampEvery = 4096

// Pattern makes and checks the bytes of one shard: incompressible, different in
// every shard and in every 4 KiB of it, and cheap next to what is measured.
type Pattern struct {
	seed uint64
	base []byte
}

// NewPattern returns the pattern of one shard.
func NewPattern(seed uint64) *Pattern {
	p := &Pattern{seed: seed, base: make([]byte, patternLen)}
	src := rand.NewPCG(seed, 1)
	for i := 0; i < patternLen; i += 8 {
		binary.LittleEndian.PutUint64(p.base[i:], src.Uint64())
	}
	return p
}

// Fill writes the shard's bytes for [off, off+len(buf)); both must be
// multiples of 4 KiB.
func (p *Pattern) Fill(buf []byte, off int64) {
	for n := 0; n < len(buf); {
		n += copy(buf[n:], p.base[(off+int64(n))%patternLen:])
	}
	for i := 0; i+8 <= len(buf); i += stampEvery {
		binary.LittleEndian.PutUint64(buf[i:], p.stamp(off+int64(i)))
	}
}

func (p *Pattern) stamp(off int64) uint64 { return p.seed<<40 ^ uint64(off) }

// Check reports the first 4 KiB of buf that are not the shard's bytes at off.
func (p *Pattern) Check(buf []byte, off int64) error {
	for i := 0; i < len(buf); i += stampEvery {
		page := buf[i:min(i+stampEvery, len(buf))]
		at := off + int64(i)
		base := p.base[at%patternLen:][:len(page)]
		if len(page) < 8 || binary.LittleEndian.Uint64(page) != p.stamp(at) || !bytes.Equal(page[8:], base[8:]) {
			return fmt.Errorf("wrong bytes at offset %d of shard %d", at, p.seed)
		}
	}
	return nil
}
