package file_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
)

// TestScatteredWritesOverManyBlocks dirties far more ranges than one commit may
// hold operations, in several blocks that are sealed by one flush.
func TestScatteredWritesOverManyBlocks(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "scattered")
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	const ranges, step = 1300, 12 << 10
	want := make([]byte, ranges*step)
	for round := range uint64(2) {
		for i := range ranges {
			at := (i*7919%ranges)*step + 100
			part := random(round<<32|uint64(i), 5000)
			copy(want[at:], part)
			write(t, h, part, int64(at))
		}
		require.NoError(t, h.Flush(ctx))
	}
	h.Release()
	p.expect(t, attr, want[:(ranges-1)*step+100+5000])
}
