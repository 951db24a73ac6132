package file

import (
	"context"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// minView is the shortest read that is answered without a copy, in bytes.
const minView = 64 << 10

// View is the answer to a read: memory of the cache, which stays what it is
// until Release. The zero value is an empty one. Not safe for concurrent use.
type View struct {
	// Parts are the bytes that were read, in order; nil when they were copied.
	Parts  [][]byte
	pieces []*piece
	c      *cache
	parts  [2][]byte // room
	refs   [2]*piece
}

func (v *View) ready() bool { return v != nil && v.Parts != nil }

// Release gives the memory back. The parts must not be used any more.
func (v *View) Release() {
	for _, p := range v.pieces {
		v.c.release(p)
	}
	v.Parts, v.pieces = nil, nil
}

// ReadView is ReadAt for a caller that needs no copy of its own: when all of
// the bytes are in the cache, or on their way there, v.Parts refers to them and p is left
// alone. The caller releases v in any case but an error.
func (h *Handle) ReadView(ctx context.Context, p []byte, off int64, v *View) (int, error) {
	if off < 0 {
		return 0, errkind.Invalid.Wrap("read inode %s at %d", h.n.ino, off)
	}
	if len(p) == 0 {
		return 0, nil
	}
	return h.n.read(ctx, p, uint64(off), v)
}

// view makes v the answer to a read of count bytes, if the cache has, or should
// have, all of them.
func (n *inode) view(ctx context.Context, segs []segment, count int, sequential bool, v *View) error {
	if v == nil || count < minView || len(segs) != 1 || len(segs[0].dst) != count {
		return nil
	}
	err := n.e.cache.view(ctx, &segs[0], sequential, v)
	if err != nil {
		v.Release()
	}
	return err
}

func (c *cache) view(ctx context.Context, s *segment, sequential bool, v *View) error {
	size := pieceSize(s.block)
	v.c, v.Parts, v.pieces = c, v.parts[:0], v.refs[:0]
	for done := 0; done < len(s.dst); {
		at := s.off + done
		index := at / size
		n := min(len(s.dst)-done, (index+1)*size-at)
		p := c.find(s, index, sequential)
		if p == nil {
			v.Release()
			return nil
		}
		v.pieces = append(v.pieces, p)
		part, err := c.await(ctx, p, at-index*size, n)
		if err != nil {
			return err
		}
		v.Parts = append(v.Parts, part)
		done += n
	}
	return nil
}
