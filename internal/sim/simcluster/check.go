package simcluster

import (
	"errors"
	"fmt"

	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// Audit is what Check counted.
type Audit struct {
	Blocks  int
	Missing int // chunks that wait in the repair queue
	Strays  int // chunks on disks that no record names
	// Unplaced are those of the strays' kind that a repair wrote, and then was
	// not needed: they stay until their server starts anew.
	Unplaced int
}

// Check compares the metadata with itself, with meta.Check, and with what lies
// on the disks: every chunk that a block record names is there, sealed, has the
// record's digest and sums that fit its bytes, or waits in the repair queue.
// All servers must be up. It waits.
func (c *Cluster) Check() (Audit, error) {
	var a Audit
	var blocks []meta.BlockInfo
	queued := map[ids.ChunkKey]bool{}
	err := c.View(func(r kv.Reader) error {
		if err := meta.Check(r); err != nil {
			return err
		}
		var err error
		if blocks, _, err = meta.ReadBlocks(r, 0, ids.BlockID{}, 1<<20); err != nil {
			return err
		}
		list, err := meta.ReadRepairs(r, ids.ChunkKey{}, 1<<20)
		for _, x := range list {
			queued[x.Key] = true
		}
		return err
	})
	if err != nil {
		return a, err
	}
	named := map[chunkAt]bool{}
	var errs []error
	for i := range blocks {
		b := &blocks[i].Block
		a.Blocks++
		for index, disk := range b.Disks {
			key := ids.ChunkKey{Block: b.ID, Index: uint8(index)}
			named[chunkAt{key, disk}] = true
			err := c.checkChunk(b, key, disk)
			if err != nil && queued[key] {
				a.Missing++
			} else if err != nil {
				errs = append(errs, err)
			}
		}
	}
	return a, errors.Join(append(errs, c.strays(named, &a))...)
}

type chunkAt struct {
	key  ids.ChunkKey
	disk ids.DiskID
}

func (c *Cluster) disk(id ids.DiskID) *chunkDisk {
	for _, n := range c.chunks {
		if n.life == nil {
			continue
		}
		for _, d := range n.life.disks {
			if d.id.DiskID == id {
				return d
			}
		}
	}
	return nil
}

func (c *Cluster) checkChunk(b *ids.Block, key ids.ChunkKey, disk ids.DiskID) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("chunk %s on disk %d: %s", key, disk, fmt.Sprintf(format, args...))
	}
	if disk == 0 {
		return bad("missing, and not in the repair queue")
	}
	d := c.disk(disk)
	if d == nil {
		return bad("no server has the disk")
	}
	r, err := d.store.Pin(key)
	if err != nil {
		return bad("%v", err)
	}
	defer r.Close()
	if r.Digest() != b.Digests[key.Index] {
		return bad("digest %016x, the record says %016x", r.Digest(), b.Digests[key.Index])
	}
	data := make([]byte, r.Length())
	if _, err := r.ReadAt(data, 0); err != nil {
		return bad("%v", err)
	}
	if !ec.Check(data, r.Sums(), r.Header().Granule) || ec.Digest(r.Sums()) != r.Digest() {
		return bad("its bytes do not fit its checksums")
	}
	return nil
}

// strays counts the chunks that no record names.
func (c *Cluster) strays(named map[chunkAt]bool, a *Audit) error {
	for _, node := range c.chunks {
		if node.life == nil {
			continue
		}
		for _, d := range node.life.disks {
			list, err := d.store.Inventory().List(ids.ChunkKey{}, 1<<20)
			if err != nil {
				return err
			}
			for _, x := range list {
				switch {
				case named[chunkAt{x.Key, d.id.DiskID}]:
				case d.repaired(x.Key):
					a.Unplaced++
				default:
					a.Strays++
					c.World.Trace("stray chunk %s on disk %d of %s: state %d, %d bytes", x.Key, d.id.DiskID, node.addr, x.State, x.Length)
				}
			}
		}
	}
	return nil
}

// repaired reports whether a sealed chunk was written by another session than
// its block's.
func (d *chunkDisk) repaired(key ids.ChunkKey) bool {
	r, err := d.store.Pin(key)
	if err != nil {
		return false
	}
	defer r.Close()
	s := r.Header().Session
	return s != 0 && s != key.Block.Session()
}
