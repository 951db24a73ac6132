package meta

import (
	"fmt"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

const (
	// maxListing and maxExtents bound a reply, in entries.
	maxListing = 4096
	maxExtents = 4096
	// maxMapBytes bounds the inline data in one part of a map.
	maxMapBytes = 512 << 10
	// openExtents is how much of the map comes with the reply to Open.
	openExtents = 128
)

// Query answers a request that changes nothing from one view. It is pure: of
// an Open it answers the state part only, registering is the leader's. Errors
// are of the kinds that the client is to see; Corrupt when the view failed.
func (m *Machine) Query(r kv.Reader, h *api.Header, req api.Request) (codec.Message, error) {
	v := &view{base: r}
	reply, err := v.query(h, req)
	if v.err != nil {
		return nil, fmt.Errorf("%s: %w", req.Kind(), v.err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", req.Kind(), err)
	}
	return reply, nil
}

func (v *view) query(h *api.Header, req api.Request) (codec.Message, error) {
	switch r := req.(type) {
	case *api.Lookup:
		return v.lookup(r)
	case *api.GetAttr:
		return v.getAttr(r.Ino)
	case *api.ReadDir:
		return v.readDir(r)
	case *api.Open:
		return v.open(r)
	case *api.GetMap:
		return v.getMap(r)
	case *api.GetBlocks:
		return v.getBlocks(r)
	case *api.Readlink:
		return v.readlink(r)
	case *api.GetXattr:
		return v.getXattr(r)
	case *api.ListXattr:
		return v.listXattr(r)
	case *api.StatFS:
		return v.totals(), nil
	case *api.TestLock:
		return v.testLock(h, r)
	case *api.GetLayout:
		return v.getLayout(r)
	}
	return nil, errkind.Unsupported.Wrap("not a question to the state")
}

func (v *view) lookup(r *api.Lookup) (codec.Message, error) {
	if len(r.Name) > api.MaxName {
		return nil, validName(r.Name)
	}
	if string(r.Name) == "." {
		return v.getAttr(r.Parent)
	}
	dir, err := v.directory(r.Parent)
	if err != nil {
		return nil, err
	}
	if string(r.Name) == ".." {
		if dir.Parent == 0 {
			return nil, errkind.NotFound.Wrap("directory %d was removed", r.Parent)
		}
		return v.getAttr(dir.Parent)
	}
	n, err := v.child(r.Parent, r.Name)
	if err != nil {
		return nil, err
	}
	return n.entry(), nil
}

func (v *view) getAttr(ino ids.Ino) (codec.Message, error) {
	n, err := v.need(ino)
	if err != nil {
		return nil, err
	}
	return n.entry(), nil
}

func (v *view) readDir(r *api.ReadDir) (codec.Message, error) {
	dir, err := v.directory(r.Ino)
	if err != nil {
		return nil, err
	}
	limit := int(min(max(r.Max, 1), maxListing))
	l := &api.Listing{EOF: true, Change: dir.Change}
	prefix := inoKey(spaceName, r.Ino)
	if r.Cookie >= 1<<63 { // behind every hash
		return l, nil
	}
	v.ascend(nameHashKey(r.Ino, r.Cookie+1), next(prefix), func(key, value []byte) bool {
		hash := beUint64(key[len(prefix):])
		if k := len(l.Entries); k >= limit && l.Entries[k-1].Cookie != hash {
			l.EOF = false
			return false
		}
		var d dirent
		if !v.decode(key, value, &d) {
			return false
		}
		l.Entries = append(l.Entries, api.DirEntry{
			Name: key[len(prefix)+8:], Ino: d.Ino, Mode: uint32(d.Type) << 12, Cookie: hash,
		})
		return true
	})
	if r.Plus {
		for i := range l.Entries {
			e := &l.Entries[i]
			n, err := v.child(r.Ino, e.Name)
			if err != nil {
				return nil, err
			}
			a := n.attr()
			e.Attr = &a
		}
	}
	return l, nil
}

func (v *view) open(r *api.Open) (codec.Message, error) {
	n, err := v.need(r.Ino)
	if err != nil {
		return nil, err
	}
	o := &api.Opened{Attr: n.attr(), Map: api.Map{End: noEnd, Version: n.MapVersion}}
	if n.IsRegular() {
		o.Map = *v.mapOf(n, 0, noEnd, openExtents)
	}
	return o, nil
}

func (v *view) getMap(r *api.GetMap) (codec.Message, error) {
	n, err := v.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if !n.IsRegular() || r.Off > r.End {
		return nil, errkind.Invalid.Wrap("map of inode %d, range %d to %d", r.Ino, r.Off, r.End)
	}
	limit := int(min(max(r.Max, 1), maxExtents))
	return &api.Mapped{Attr: n.attr(), Map: *v.mapOf(n, r.Off, min(r.End, noEnd), limit)}, nil
}

// mapOf returns the map of [off, end), less when it has more extents or inline
// bytes than one reply takes. Whole extents are in it, also those that begin
// before off or end behind end.
func (v *view) mapOf(n *inode, off, end uint64, limit int) *api.Map {
	m := &api.Map{Off: off, End: end, Version: n.MapVersion}
	if data := n.Inline; len(data) > 0 {
		if off < uint64(len(data)) && end > 0 {
			m.Extents = []ids.Extent{inlineExtent(0, data, 0).Extent}
		}
		return m
	}
	// Hidden extents are few but for a moment after a truncation; then a part
	// of the map may come out short, with End saying how far it goes.
	list := v.extents(n.Ino, n.Generation, off, end, limit+1)
	room := maxMapBytes
	for i := range list {
		e := &list[i]
		if i == limit || room < 0 {
			m.End = e.Off
			break
		}
		if n.hidden(e) {
			continue
		}
		room -= len(e.Data)
		m.Extents = append(m.Extents, e.Extent)
	}
	seen := map[ids.BlockID]bool{}
	for i := range m.Extents {
		id := m.Extents[i].Block
		if m.Extents[i].Kind != ids.ExtentBlock || seen[id] {
			continue
		}
		seen[id] = true
		b, ok := v.block(id)
		if !ok {
			if !v.failed() {
				v.fail(errkind.Corrupt.Wrap("inode %d refers to block %s, which has no record", n.Ino, id))
			}
			return m
		}
		m.Blocks = append(m.Blocks, b.Block)
	}
	return m
}

func (v *view) getBlocks(r *api.GetBlocks) (codec.Message, error) {
	if len(r.IDs) > maxExtents {
		return nil, errkind.TooBig.Wrap("%d blocks asked for, at most %d", len(r.IDs), maxExtents)
	}
	reply := &api.Blocks{}
	for _, id := range r.IDs {
		if b, ok := v.block(id); ok {
			reply.Blocks = append(reply.Blocks, b.Block)
		}
	}
	return reply, nil
}

func (v *view) readlink(r *api.Readlink) (codec.Message, error) {
	n, err := v.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if n.Mode&api.ModeType != api.ModeSymlink {
		return nil, errkind.Invalid.Wrap("inode %d is not a symbolic link", r.Ino)
	}
	return &api.Bytes{Value: n.Inline}, nil
}

func (v *view) getXattr(r *api.GetXattr) (codec.Message, error) {
	if _, err := v.need(r.Ino); err != nil {
		return nil, err
	}
	var x xattr
	if !v.load(xattrKey(r.Ino, r.Name), &x) {
		return nil, errkind.NoAttr.Wrap("attribute %q of inode %d", r.Name, r.Ino)
	}
	return &api.Bytes{Value: x.Value}, nil
}

func (v *view) listXattr(r *api.ListXattr) (codec.Message, error) {
	if _, err := v.need(r.Ino); err != nil {
		return nil, err
	}
	reply := &api.Names{}
	prefix := inoKey(spaceXattr, r.Ino)
	v.ascend(prefix, next(prefix), func(key, _ []byte) bool {
		reply.Names = append(reply.Names, key[len(prefix):])
		return true
	})
	return reply, nil
}

func (v *view) getLayout(r *api.GetLayout) (codec.Message, error) {
	n, err := v.need(r.Ino)
	if err != nil {
		return nil, err
	}
	if n.IsDir() {
		return v.layoutAt(n), nil
	}
	return &api.LayoutOf{Own: n.Layout, Effective: n.Layout, From: n.Ino}, nil
}

// totals sums up disks that hold data, and the tree below the root.
func (v *view) totals() *api.Totals {
	var below sum
	v.load(inoKey(spaceSum, ids.RootIno), &below)
	t := &api.Totals{Inodes: below.Inodes + 1, Bytes: below.Bytes}
	v.disks(func(d cluster.Disk, _ *disk) {
		switch d.State {
		case cluster.DiskActive:
			t.Free += d.Free
			fallthrough
		case cluster.DiskReadOnly, cluster.DiskDraining:
			t.Capacity += d.Capacity
		case cluster.DiskDead, cluster.DiskRemoved:
		}
	})
	if root, ok := v.inode(ids.RootIno); ok {
		t.Layout = root.Layout
	}
	return t
}
