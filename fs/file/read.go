package file

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// segment is a part of a read that must come from a block.
type segment struct {
	dst   []byte
	block *ids.Block
	off   int // in the block
	// extent is the part of the block that the file refers to around the
	// segment: what reading on will need.
	lo, hi int
	at     uint64 // in the file
}

// missing says what a plan lacks.
type missing struct {
	pack *pack // must be sealed first
	page bool  // the map at off is not known
	off  uint64
}

// read fills p from off and returns how many bytes there were. With v they may
// be in v instead.
func (n *inode) read(ctx context.Context, p []byte, off uint64, v *View) (int, error) {
	deadline := n.e.deadline()
	var room [4]segment
	var last error
	for try := 0; try < mapTries; try++ {
		segs, count, err := n.planRead(ctx, deadline, p, off, room[:0])
		if err != nil || len(segs) == 0 {
			return count, err
		}
		sequential := n.noteRead(off, count)
		if err = n.view(ctx, segs, count, sequential, v); err == nil && !v.ready() {
			err = n.fetchSegments(ctx, segs, sequential)
		}
		if err == nil {
			return count, nil
		}
		if ctx.Err() != nil {
			return 0, errkind.Interrupted.Wrap("read inode %s at %d", n.ino, off)
		}
		if errkind.Of(err) != errkind.NoChunk && errkind.Of(err) != errkind.Corrupt {
			return 0, fmt.Errorf("read inode %s at %d: %w", n.ino, off, err)
		}
		// The chunk may have moved, or the range may be another block's by now
		// (rule 21): look again, and give up when nothing has changed.
		last = err
		changed, err := n.lookAgain(ctx, segs)
		if err != nil {
			return 0, err
		}
		if !changed {
			break
		}
	}
	return 0, fmt.Errorf("read inode %s at %d: %w", n.ino, off, last)
}

// planRead copies what is in memory and lists what must be fetched.
func (n *inode) planRead(ctx context.Context, deadline time.Duration, p []byte, off uint64, room []segment) ([]segment, int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	fetched := 0
	for {
		size := n.size()
		if off >= size {
			return nil, 0, nil
		}
		count := int(min(uint64(len(p)), size-off))
		segs, lack := n.gatherRead(p[:count], off, room)
		switch {
		case lack == nil:
			return segs, count, nil
		case lack.page:
			if fetched++; fetched > mapTries+count/unit {
				return nil, 0, errkind.Changed.Wrap("map of inode %s changes faster than it can be read", n.ino)
			}
			if err := n.fetchMap(ctx, lack.off); err != nil {
				return nil, 0, err
			}
		default:
			// Sent, but not committed: only a sealed block can be read (rule 11).
			n.dropLane(lack.pack)
			lack.pack.close()
			if err := n.wait(ctx, deadline); err != nil {
				return nil, 0, err
			}
		}
	}
}

// gatherRead walks the range through the overlay and the committed map.
func (n *inode) gatherRead(p []byte, off uint64, segs []segment) ([]segment, *missing) {
	for len(p) > 0 {
		en, ok, next := n.mu.ov.at(off)
		if !ok {
			c := int(min(uint64(len(p)), next-off))
			var lack *missing
			if c, segs, lack = n.committedAt(p[:c], off, segs); lack != nil {
				return nil, lack
			}
			p = p[c:]
			off += uint64(c)
			continue
		}
		c := int(min(uint64(len(p)), en.end-off))
		if en.pk == nil {
			clear(p[:c])
		} else {
			pkOff := en.pkOff + uint32(off-en.off)
			b := en.pk.bufferAt(pkOff)
			switch {
			case b != nil && b.mem != nil:
				c = copy(p[:c], b.mem[pkOff-b.base:b.n])
			case en.pk.state == packSealed || en.pk.state == packFlight:
				blk, base := en.pk.blocks.at(pkOff)
				lo, end := max(en.pkOff, base), min(en.pkOff+uint32(en.end-en.off), base+blk.Length)
				c = min(c, int(end-pkOff))
				segs = append(segs, segment{p[:c], blk, int(pkOff - base), int(lo - base), int(end - base), off})
			default:
				return nil, &missing{pack: en.pk}
			}
		}
		p = p[c:]
		off += uint64(c)
	}
	return segs, nil
}

// committedAt serves the start of p, which nothing uncommitted covers, and
// returns how much of it that was.
func (n *inode) committedAt(p []byte, off uint64, segs []segment) (int, []segment, *missing) {
	size := n.mu.attr.Size
	if off >= size {
		clear(p)
		return len(p), segs, nil
	}
	x, end, known := n.mu.emap.at(off)
	if !known {
		return 0, nil, &missing{page: true, off: off}
	}
	c := int(min(uint64(len(p)), end-off))
	switch {
	case x == nil:
		clear(p[:c])
	case x.Kind == ids.ExtentInline:
		copy(p[:c], x.Data[off-x.Off:])
	default:
		b := n.mu.emap.blocks[x.Block]
		if b == nil {
			n.mu.emap.reset(n.mu.emap.version)
			return 0, nil, &missing{page: true, off: off}
		}
		segs = append(segs, segment{p[:c], b, int(x.BlockOff) + int(off-x.Off), int(x.BlockOff), int(x.BlockOff) + int(x.Len), off})
	}
	return c, segs, nil
}

// lookAgain asks for the records of the blocks that could not be read, and
// forgets what is known of the map, so that it is fetched again. It reports
// whether another try may do better.
func (n *inode) lookAgain(ctx context.Context, segs []segment) (bool, error) {
	req := &api.GetMap{Ino: n.ino, Off: segs[0].at, End: segs[len(segs)-1].at + 1, Max: mapPageExtents}
	var reply api.Mapped
	opctx, stop := n.e.opContext(ctx)
	err := n.e.cfg.Meta.Do(opctx, req, &reply)
	stop()
	if errkind.Of(err) == errkind.NotFound || errkind.Of(err) == errkind.Stale {
		return false, errkind.Stale.Wrap("inode %s is gone", n.ino)
	}
	if err != nil {
		return false, fmt.Errorf("read the map of inode %s: %w", n.ino, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	changed := reply.Attr.MapVersion != n.mu.attr.MapVersion
	for _, s := range segs {
		same := false
		for i := range reply.Map.Blocks {
			b := &reply.Map.Blocks[i]
			same = same || b.ID == s.block.ID && b.Version == s.block.Version
		}
		changed = changed || !same
	}
	n.install(&reply.Attr, false, 0)
	n.mu.emap.reset(n.mu.emap.version)
	return changed, nil
}
