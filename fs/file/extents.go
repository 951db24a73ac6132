package file

import (
	"context"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	mapPageExtents = 1024      // extents asked for at once
	mapMaxExtents  = 16 * 1024 // extents kept for one inode
	mapTries       = 8         // how often a map may change while it is fetched
)

// mapPage is a known part of a file's committed extent map.
type mapPage struct {
	off, end uint64
	extents  []ids.Extent
}

// extentMap caches parts of the extent map at one version. The inode's lock
// guards it; the blocks that it gives out are never changed.
type extentMap struct {
	version uint64
	pages   []mapPage // ordered, disjoint
	blocks  map[ids.BlockID]*ids.Block
	count   int
}

func (m *extentMap) reset(version uint64) { *m = extentMap{version: version} }

// add takes over a part of the map; it must be of the map's version.
func (m *extentMap) add(p *api.Map) {
	if m.count+len(p.Extents) > mapMaxExtents {
		m.reset(m.version)
	}
	if m.blocks == nil {
		m.blocks = make(map[ids.BlockID]*ids.Block, len(p.Blocks))
	}
	for i := range p.Blocks {
		m.blocks[p.Blocks[i].ID] = &p.Blocks[i]
	}
	m.pages = slices.DeleteFunc(m.pages, func(o mapPage) bool {
		gone := o.off < p.End && p.Off < o.end
		if gone {
			m.count -= len(o.extents)
		}
		return gone
	})
	i, _ := slices.BinarySearchFunc(m.pages, p.Off, func(o mapPage, off uint64) int {
		if o.off < off {
			return -1
		}
		return 1
	})
	m.pages = slices.Insert(m.pages, i, mapPage{p.Off, p.End, p.Extents})
	m.count += len(p.Extents)
}

// at describes what is committed at off: an extent, or a hole that ends at
// end. known is false when that part of the map is not here.
func (m *extentMap) at(off uint64) (x *ids.Extent, end uint64, known bool) {
	i, _ := slices.BinarySearchFunc(m.pages, off, func(o mapPage, off uint64) int {
		if o.end <= off {
			return -1
		}
		return 1
	})
	if i == len(m.pages) || m.pages[i].off > off {
		return nil, 0, false
	}
	pg := &m.pages[i]
	j, _ := slices.BinarySearchFunc(pg.extents, off, func(x ids.Extent, off uint64) int {
		if x.End() <= off {
			return -1
		}
		return 1
	})
	switch {
	case j == len(pg.extents):
		return nil, pg.end, true
	case pg.extents[j].Off > off:
		return nil, min(pg.extents[j].Off, pg.end), true
	}
	return &pg.extents[j], min(pg.extents[j].End(), pg.end), true
}

// fetchMap gets the part of the map that starts at off. n.mu is held, but not
// during the call. It may have to be called again, when the map changed.
func (n *inode) fetchMap(ctx context.Context, off uint64) error {
	n.mu.Unlock()
	var reply api.Mapped
	opctx, stop := n.e.opContext(ctx)
	err := n.e.cfg.Meta.Do(opctx, &api.GetMap{Ino: n.ino, Off: off, End: api.MaxFileSize, Max: mapPageExtents}, &reply)
	stop()
	n.mu.Lock()
	if errkind.Of(err) == errkind.NotFound {
		err = errkind.Stale.Wrap("inode %s is gone", n.ino)
	}
	if err != nil {
		if ctx.Err() != nil {
			return errkind.Interrupted.Wrap("read the map of inode %s", n.ino)
		}
		return fmt.Errorf("read the map of inode %s: %w", n.ino, err)
	}
	if reply.Map.End <= off || reply.Map.Off > off {
		return errkind.Internal.Wrap("map of inode %s: asked for offset %d, got %d to %d", n.ino, off, reply.Map.Off, reply.Map.End)
	}
	n.install(&reply.Attr, false, 0)
	n.addMap(&reply.Map)
	return nil
}

// addMap keeps a part of the map unless it is of another version.
func (n *inode) addMap(p *api.Map) {
	if p.Version == n.mu.attr.MapVersion {
		n.mu.emap.version = p.Version
		n.mu.emap.add(p)
	}
}
