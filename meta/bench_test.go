package meta

import (
	"fmt"
	"testing"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// BenchmarkSmallFile is the life of a small file: created, its content
// committed inline, unlinked, reaped.
func BenchmarkSmallFile(b *testing.B) {
	r := newRig(b)
	dir := r.dir(r.dir(r.dir(1, "a"), "b"), "c")
	data := make([]byte, 4096)
	for i := 0; b.Loop(); i++ {
		r.log = r.log[:0]
		name := fmt.Sprint(i)
		f := r.file(dir, name)
		r.do(&api.Commit{Ino: f, Ops: []api.Op{{Kind: api.OpInline, Len: 4096, Data: data}}})
		r.do(&api.Unlink{Parent: dir, Name: []byte(name)})
		r.must(&api.Reap{Inos: []ids.Ino{f}})
	}
}

// BenchmarkBlockCommit is a commit of eight whole blocks of six chunks.
func BenchmarkBlockCommit(b *testing.B) {
	r := newRig(b)
	f := r.file(r.dir(1, "a"), "f")
	for i := 0; b.Loop(); i++ {
		r.log = r.log[:0]
		c := &api.Commit{Ino: f}
		for j := range 8 {
			blk := r.newBlock(f, 64<<20)
			c.Blocks = append(c.Blocks, blk)
			c.Ops = append(c.Ops, writeOp(uint64(i*8+j)<<26, &blk))
		}
		r.do(c)
	}
}
