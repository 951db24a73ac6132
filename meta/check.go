package meta

import (
	"errors"
	"fmt"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// maxProblems bounds what one Check reports.
const maxProblems = 20

// Check reads the whole state and compares everything that is derived with
// what it derives from: link counts with names, sums with files, blocks with
// extents, queues and counters with a recount. It returns nil, or an error
// that tells the first problems. Memory: some hundred bytes a record.
func Check(r kv.Reader) error {
	c := &checker{
		view:    view{base: r},
		inodes:  map[ids.Ino]*seenInode{},
		refs:    map[reference]uint64{},
		blocks:  map[ids.BlockID]*block{},
		members: map[ids.UUID]uint32{},
	}
	if !c.load(keyCluster, &c.id) {
		if c.err != nil {
			return fmt.Errorf("check: %w", c.err)
		}
		return nil // not founded: empty
	}
	c.load(keyCounts, &c.want)
	for _, part := range []func(){
		c.readInodes, c.readNames, c.readBacks, c.checkLinks, c.checkSums, c.readXattrs,
		c.readExtents, c.checkMaps, c.readBlocks, c.checkRefs, c.readQueues, c.readFreeQueue,
		c.readSessions, c.readLocks, c.readMembers,
	} {
		part()
	}
	if c.want != c.counts {
		c.bad("counters say %+v, a recount %+v", c.want, c.counts)
	}
	if c.err != nil {
		return fmt.Errorf("check: %w", c.err)
	}
	return errors.Join(c.problems...)
}

// checker gathers what the records say.
type checker struct {
	view
	id       identity
	want     Counts
	counts   Counts
	problems []error

	inodes  map[ids.Ino]*seenInode
	order   []*seenInode
	refs    map[reference]uint64 // bytes that extents of a file cover of a block
	refList []reference
	blocks  map[ids.BlockID]*block
	members map[ids.UUID]uint32
}

type reference struct {
	block ids.BlockID
	ino   ids.Ino
}

// seenInode is an inode with what was found about it.
type seenInode struct {
	*inode
	names   uint32
	subdirs uint32
	in      ids.Ino // directory of its last name
	backs   uint64  // names that its back-pointers count
	home    bool    // a back-pointer names its home
	below   sum
	covered uint64 // bytes of extents of the current generation
	hidden  bool   // some of them are hidden by clips
	xattrs  uint32
	flags   uint8
}

func (c *checker) bad(format string, args ...any) {
	if len(c.problems) < maxProblems {
		c.problems = append(c.problems, fmt.Errorf("check: "+format, args...))
	}
}

// each calls fn for all records of a space.
func (c *checker) each(space byte, fn func(key, value []byte)) {
	c.ascend([]byte{space}, []byte{space + 1}, func(key, value []byte) bool {
		fn(key, value)
		return c.err == nil
	})
}

func inoOf(key []byte) ids.Ino { return ids.Ino(beUint64(key[1:])) }

func (c *checker) readInodes() {
	var clock number
	c.load(keyClock, &clock)
	c.each(spaceInode, func(key, value []byte) {
		n := &seenInode{inode: &inode{}}
		if !c.decode(key, value, n.inode) {
			return
		}
		n.Ino = inoOf(key)
		c.inodes[n.Ino] = n
		c.order = append(c.order, n)
		if n.Ctime > int64(clock) {
			c.bad("inode %d: changed at %d, after the last logged time %d", n.Ino, n.Ctime, clock)
		}
	})
	for _, n := range c.order {
		var last number
		if c.load(slotKey(n.Ino.Slot()), &last); n.Ino.Counter() > uint64(last) {
			c.bad("inode %d: its slot has given only %d numbers", n.Ino, last)
		}
	}
}

func (c *checker) readNames() {
	c.each(spaceName, func(key, value []byte) {
		var d dirent
		if !c.decode(key, value, &d) {
			return
		}
		parent, name := c.inodes[inoOf(key)], key[17:]
		n := c.inodes[d.Ino]
		switch {
		case validName(name) != nil || beUint64(key[9:]) != HashName(name):
			c.bad("name %q in directory %d: wrong hash or illegal", name, inoOf(key))
		case parent == nil || !parent.IsDir() || parent.Nlink == 0:
			c.bad("name %q lies in %d, which is no directory", name, inoOf(key))
		case n == nil:
			c.bad("name %q in directory %d: inode %d is missing", name, parent.Ino, d.Ino)
		case uint32(d.Type) != n.Mode>>12:
			c.bad("name %q in directory %d: type %o, inode %d has mode %o", name, parent.Ino, d.Type, n.Ino, n.Mode)
		default:
			n.names++
			n.in = parent.Ino
			if n.IsDir() {
				parent.subdirs++
			}
		}
	})
}

func (c *checker) readBacks() {
	c.each(spaceBack, func(key, value []byte) {
		var count number
		n := c.inodes[inoOf(key)]
		if !c.decode(key, value, &count) {
			return
		}
		if n == nil || n.IsDir() || n.Nlink < 2 || count == 0 {
			c.bad("back-pointer of inode %d, which has not several names", inoOf(key))
			return
		}
		n.backs += uint64(count)
		dir := ids.Ino(beUint64(key[9:]))
		n.home = n.home || dir == n.Parent
		if d := c.inodes[dir]; d == nil || !d.IsDir() || d.Nlink == 0 {
			c.bad("back-pointer of inode %d to %d, which is no directory", n.Ino, dir)
		}
	})
}

// checkLinks compares link counts, parents and the orphan table with the names.
func (c *checker) checkLinks() {
	for _, n := range c.order {
		orphan := c.has(inoKey(spaceOrphan, n.Ino))
		if orphan != (n.Nlink == 0) {
			c.bad("inode %d: link count %d, in the orphan table: %t", n.Ino, n.Nlink, orphan)
		}
		switch {
		case n.Ino == ids.RootIno:
			if n.names != 0 || n.Nlink != 2+n.subdirs || n.Parent != n.Ino {
				c.bad("root directory: %d names, link count %d with %d directories, parent %d", n.names, n.Nlink, n.subdirs, n.Parent)
			}
		case n.Nlink == 0:
			if n.names+n.subdirs != 0 || n.Parent != 0 {
				c.bad("orphan %d: %d names, %d directories, parent %d", n.Ino, n.names, n.subdirs, n.Parent)
			}
		case n.IsDir():
			if n.names != 1 || n.Nlink != 2+n.subdirs || n.Parent != n.in {
				c.bad("directory %d: %d names, link count %d with %d directories, parent %d but named in %d",
					n.Ino, n.names, n.Nlink, n.subdirs, n.Parent, n.in)
			}
		case n.Nlink != n.names || n.Nlink == 1 && n.Parent != n.in || n.Nlink > 1 && (n.backs != uint64(n.names) || !n.home):
			c.bad("inode %d: link count %d, %d names, %d by back-pointers, home %d", n.Ino, n.Nlink, n.names, n.backs, n.Parent)
		}
	}
	c.each(spaceOrphan, func(key, _ []byte) {
		c.counts.Orphans++
		if c.inodes[inoOf(key)] == nil {
			c.bad("orphan %d has no inode", inoOf(key))
		}
	})
}

// checkSums compares the sums of directories with what lies below them.
func (c *checker) checkSums() {
	for _, n := range c.order {
		if n.Ino == ids.RootIno || n.Nlink == 0 {
			continue
		}
		own := sum{Bytes: n.Stored, Inodes: 1}
		if n.IsDir() {
			own = sum{Inodes: 1, Dirs: 1}
		}
		dir, steps := n.Parent, 0
		for d := c.inodes[dir]; ; d = c.inodes[dir] {
			if d == nil || steps > len(c.order) {
				c.bad("inode %d: no way up to the root", n.Ino)
				break
			}
			d.below = d.below.add(own)
			if dir == ids.RootIno {
				break
			}
			dir, steps = d.Parent, steps+1
		}
	}
	for _, n := range c.order {
		var stored sum
		c.load(inoKey(spaceSum, n.Ino), &stored)
		if stored != n.below {
			c.bad("directory %d: sums %+v, a recount %+v", n.Ino, stored, n.below)
		}
	}
	c.each(spaceSum, func(key, _ []byte) {
		if n := c.inodes[inoOf(key)]; n == nil || !n.IsDir() {
			c.bad("sums of %d, which is no directory", inoOf(key))
		}
	})
}

func (c *checker) readXattrs() {
	c.each(spaceXattr, func(key, _ []byte) {
		n, name := c.inodes[inoOf(key)], key[9:]
		if n == nil {
			c.left(inoOf(key), "extended attribute")
			return
		}
		n.xattrs += uint32(len(name)) + 1
		n.flags |= api.FlagXattrs | xattrFlag(name)
	})
	for _, n := range c.order {
		if n.xattrs != n.XattrBytes || n.flags != n.Flags {
			c.bad("inode %d: %d bytes of attribute names and flags %#x, a recount %d and %#x", n.Ino, n.XattrBytes, n.Flags, n.xattrs, n.flags)
		}
	}
}

// left checks that what a removed inode left is queued to be freed.
func (c *checker) left(ino ids.Ino, what string) {
	if !c.has(freeKey(freeInode, uint64(ino), 0)) {
		c.bad("%s of inode %d, which is gone and not in the queue of things to free", what, ino)
	}
}
