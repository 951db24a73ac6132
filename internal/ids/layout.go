package ids

import (
	"fmt"
	"strconv"
	"strings"
)

// Limits of a layout (DESIGN §1, data-path rule 3).
const (
	MaxK           = 16
	MaxM           = 8
	MinCellLog     = 16      // 64 KiB
	MaxCellLog     = 20      // 1 MiB
	MaxStripe      = 8 << 20 // cell × (K+M), bytes
	MaxChunk       = 16 << 20
	MaxBlock       = 64 << 20
	DefaultCellLog = 19 // 512 KiB; docs/performance.md says why
)

// LayoutKind says how a block is protected.
type LayoutKind uint8

// The kinds of layout.
const (
	LayoutNone   LayoutKind = iota // "inherit": no layout of its own
	LayoutRS                       // K data and M parity chunks, Reed–Solomon
	LayoutCopies                   // K = 1, M+1 whole copies
)

// Layout says how the blocks of a file are protected. It is recorded for each
// block, so a file's layout may change without touching what is stored.
type Layout struct {
	Kind    LayoutKind
	K, M    uint8
	CellLog uint8 // log2 of the cell size in bytes
}

// RS returns rs-K-M with the default cell, made smaller until a stripe fits MaxStripe.
func RS(k, m int) Layout {
	l := Layout{Kind: LayoutRS, K: uint8(k), M: uint8(m), CellLog: DefaultCellLog}
	for l.CellSize()*l.Width() > MaxStripe {
		l.CellLog--
	}
	return l
}

// Copies returns copies-N with the default cell.
func Copies(n int) Layout {
	return Layout{Kind: LayoutCopies, K: 1, M: uint8(n - 1), CellLog: DefaultCellLog}
}

// IsZero reports "no layout of its own".
func (l Layout) IsZero() bool { return l.Kind == LayoutNone }

// Width is K+M, the number of chunks of a block.
func (l Layout) Width() int { return int(l.K) + int(l.M) }

// CellSize in bytes.
func (l Layout) CellSize() int { return 1 << l.CellLog }

// StripeData is the number of data bytes in a full stripe, K cells.
func (l Layout) StripeData() int { return int(l.K) << l.CellLog }

// MaxBlockData is the largest number of data bytes in one block: K chunks of
// MaxChunk, at most MaxBlock, a whole number of stripes.
func (l Layout) MaxBlockData() int {
	n := min(int(l.K)*MaxChunk, MaxBlock)
	return n - n%l.StripeData()
}

// Quorum is the number of durable chunks at which a block may be committed:
// min(K+M, max(K+1, K+M−1)) (data-path rule 1).
func (l Layout) Quorum() int {
	return min(l.Width(), max(int(l.K)+1, l.Width()-1))
}

// Narrow returns the layout with the same M for n < K+M failure domains
// (data-path rule 1): rs-(n−M)-M, or copies-(M+1) when only M+1 are left;
// false when there are fewer than M+1, and nothing may be written.
func (l Layout) Narrow(n int) (Layout, bool) {
	if n >= l.Width() {
		return l, true
	}
	m := int(l.M)
	if n < m+1 {
		return Layout{}, false
	}
	if n == m+1 || l.Kind == LayoutCopies {
		return Layout{Kind: LayoutCopies, K: 1, M: l.M, CellLog: l.CellLog}, true
	}
	return Layout{Kind: LayoutRS, K: uint8(n - m), M: l.M, CellLog: l.CellLog}, true
}

// Small returns the layout for a block too small to be coded: copies-(M+1).
func (l Layout) Small() Layout {
	return Layout{Kind: LayoutCopies, K: 1, M: l.M, CellLog: l.CellLog}
}

// Validate reports what is wrong with the layout, or nil.
func (l Layout) Validate() error {
	bad := func(why string) error { return fmt.Errorf("layout %s: %s: %w", l, why, ErrSyntax) }
	switch {
	case l.Kind != LayoutRS && l.Kind != LayoutCopies:
		return bad("unknown kind; want rs-K-M or copies-N")
	case l.K < 1 || l.K > MaxK:
		return bad("K must be 1 to 16")
	case l.M > MaxM:
		return bad("M must be at most 8")
	case l.Kind == LayoutRS && (l.K < 2 || l.M < 1):
		return bad("rs needs K of 2 or more and M of 1 or more; use copies-N instead")
	case l.Kind == LayoutCopies && l.K != 1:
		return bad("copies have K = 1")
	case l.CellLog < MinCellLog || l.CellLog > MaxCellLog:
		return bad("the cell must be 64KiB to 1MiB")
	case l.CellSize()*l.Width() > MaxStripe:
		return bad("cell × (K+M) must not exceed 8MiB")
	}
	return nil
}

// String writes rs-K-M or copies-N, followed by :CELL when the cell is not the
// one that ParseLayout would choose.
func (l Layout) String() string {
	var s string
	def := l.CellLog
	switch l.Kind {
	case LayoutNone:
		return "none"
	case LayoutRS:
		s = fmt.Sprintf("rs-%d-%d", l.K, l.M)
		if l.Width() > 0 && l.Width() <= MaxK+MaxM {
			def = RS(int(l.K), int(l.M)).CellLog
		}
	case LayoutCopies:
		s = fmt.Sprintf("copies-%d", l.M+1)
		def = DefaultCellLog
	default:
		return fmt.Sprintf("layout(%d)", l.Kind)
	}
	if l.CellLog != def {
		s += fmt.Sprintf(":%dKiB", 1<<l.CellLog>>10)
	}
	return s
}

// ParseLayout reads rs-K-M or copies-N, each with an optional :CELLKiB.
func ParseLayout(s string) (Layout, error) {
	bad := func() (Layout, error) {
		return Layout{}, fmt.Errorf("layout %q: want rs-K-M (as rs-4-2) or copies-N (as copies-3): %w", s, ErrSyntax)
	}
	body, cell, hasCell := strings.Cut(s, ":")
	parts := strings.Split(body, "-")
	nums := make([]int, 0, 2)
	for _, p := range parts[1:] {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 || n > MaxK+MaxM {
			return bad()
		}
		nums = append(nums, n)
	}
	var l Layout
	switch {
	case parts[0] == "rs" && len(nums) == 2 && nums[0] > 0:
		l = RS(nums[0], nums[1])
	case parts[0] == "copies" && len(nums) == 1 && nums[0] > 0 && nums[0] <= MaxM+1:
		l = Copies(nums[0])
	default:
		return bad()
	}
	if hasCell {
		kib, err := strconv.Atoi(strings.TrimSuffix(cell, "KiB"))
		if err != nil || kib <= 0 || kib&(kib-1) != 0 || kib > 1<<(MaxCellLog-10) {
			return bad()
		}
		l.CellLog = 10
		for ; kib > 1; kib >>= 1 {
			l.CellLog++
		}
	}
	return l, l.Validate()
}
