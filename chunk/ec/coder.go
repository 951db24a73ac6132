package ec

import (
	"fmt"
	"sync"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/klauspost/reedsolomon"
)

// piece is how many bytes of each cell are encoded before their checksums are
// taken, so that K+M pieces are still in a core's L2 cache when they are read
// the second time. It is at least one granule.
const piece = 64 << 10

// Coder encodes and reconstructs the cells of one layout. Safe for concurrent
// use: it runs on the caller's goroutine and starts none.
//
// Bytes at equal offsets of the K+M chunks of a block form one code word, so
// everything here works on any equal ranges of the chunks, tail cells and
// parts of cells alike.
type Coder struct {
	k, m int
	rs   reedsolomon.Encoder // nil for copies
}

// coders holds the one coder of every shape; there are at most 16 × 8.
var coders sync.Map

type shape struct {
	kind ids.LayoutKind
	k, m uint8
}

// For returns the coder of a layout. The error says what is wrong with it.
func For(l ids.Layout) (*Coder, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("erasure code: %w", err)
	}
	key := shape{l.Kind, l.K, l.M}
	if c, ok := coders.Load(key); ok {
		return c.(*Coder), nil
	}
	c := &Coder{k: int(l.K), m: int(l.M)}
	if l.Kind == ids.LayoutRS {
		rs, err := reedsolomon.New(c.k, c.m, reedsolomon.WithMaxGoroutines(1))
		if err != nil {
			return nil, fmt.Errorf("erasure code of %s: %w", l, err)
		}
		c.rs = rs
	}
	got, _ := coders.LoadOrStore(key, c)
	return got.(*Coder), nil
}

// Encode fills parity from data: K and M ranges of one length. A parity range
// of copies may be the data range itself.
func (c *Coder) Encode(data, parity [][]byte) error {
	_, err := c.run(data, parity, nil, piece)
	return err
}

// EncodeAndSum is Encode, and appends to sums[i] the checksums of range i of
// data, then parity, taken while the bytes are in the cache. The ranges must
// start on a granule.
func (c *Coder) EncodeAndSum(data, parity [][]byte, sums [][]uint64, granuleLog uint8) error {
	if len(sums) != c.k+c.m {
		return fmt.Errorf("encode: %d checksum tables for %d cells", len(sums), c.k+c.m)
	}
	step := max(piece, 1<<granuleLog)
	_, err := c.run(data, parity, func(cells [][]byte) {
		for i, p := range cells {
			if i > 0 && c.rs == nil {
				sums[i] = append(sums[i], sums[0][len(sums[0])-Granules(len(p), granuleLog):]...)
				continue
			}
			sums[i] = Sums(sums[i], p, granuleLog)
		}
	}, step)
	return err
}

// run encodes step bytes at a time and shows each encoded step to seen.
func (c *Coder) run(data, parity [][]byte, seen func([][]byte), step int) (int, error) {
	n, err := c.size(data, parity)
	if err != nil {
		return 0, err
	}
	cells := make([][]byte, c.k+c.m)
	for off := 0; off < n; off += step {
		end := min(off+step, n)
		for i := range cells {
			if i < c.k {
				cells[i] = data[i][off:end]
			} else {
				cells[i] = parity[i-c.k][off:end]
			}
		}
		if err := c.encode(cells); err != nil {
			return off, err
		}
		if seen != nil {
			seen(cells)
		}
	}
	return n, nil
}

func (c *Coder) size(data, parity [][]byte) (int, error) {
	if len(data) != c.k || len(parity) != c.m {
		return 0, fmt.Errorf("encode: %d data and %d parity cells, want %d and %d", len(data), len(parity), c.k, c.m)
	}
	n := len(data[0])
	for _, group := range [2][][]byte{data, parity} {
		for _, p := range group {
			if len(p) != n {
				return 0, fmt.Errorf("encode: cells of %d and %d bytes", n, len(p))
			}
		}
	}
	return n, nil
}

func (c *Coder) encode(cells [][]byte) error {
	if c.rs != nil {
		if err := c.rs.Encode(cells); err != nil {
			return fmt.Errorf("encode: %w", err)
		}
		return nil
	}
	for _, p := range cells[1:] {
		if len(p) > 0 && &p[0] != &cells[0][0] {
			copy(p, cells[0])
		}
	}
	return nil
}

// Reconstruct fills the wanted cells from any K others. cells has K+M entries
// of one length n; a missing one has length 0, and must have capacity n where
// it is wanted. On return wanted[i] cells have length n and their bytes; other
// missing cells stay empty.
func (c *Coder) Reconstruct(cells [][]byte, want []bool) error {
	if len(cells) != c.k+c.m || len(want) != c.k+c.m {
		return fmt.Errorf("reconstruct: %d cells and %d marks, want %d", len(cells), len(want), c.k+c.m)
	}
	n, have, first := 0, 0, -1
	for i, p := range cells {
		if len(p) == 0 {
			continue
		}
		if first >= 0 && len(p) != n {
			return fmt.Errorf("reconstruct: cells of %d and %d bytes", n, len(p))
		}
		if first < 0 {
			first = i
		}
		n = len(p)
		have++
	}
	if have < c.k {
		return fmt.Errorf("reconstruct: %d cells, need %d: %w", have, c.k, reedsolomon.ErrTooFewShards)
	}
	for i := range cells {
		if want[i] && cap(cells[i]) < n {
			return fmt.Errorf("reconstruct: cell %d has room for %d of %d bytes", i, cap(cells[i]), n)
		}
	}
	if c.rs != nil {
		if err := c.rs.ReconstructSome(cells, want); err != nil {
			return fmt.Errorf("reconstruct: %w", err)
		}
		return nil
	}
	for i := range cells {
		if want[i] && len(cells[i]) == 0 {
			cells[i] = cells[i][:n]
			copy(cells[i], cells[first])
		}
	}
	return nil
}
