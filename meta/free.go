package meta

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

const (
	// freeBatch is how many records one turn of a step removes; freeRoom is
	// how many records it may touch by that (an extent's block has at most 24
	// chunks to queue, and as many repairs to cancel).
	freeBatch = 32
	freeRoom  = freeBatch * (2 + 2*(ids.MaxK+ids.MaxM))
	// freeDefault is the size of a step that names none.
	freeDefault = 1024
	// freeScan bounds the extents that one turn of a clip looks at.
	freeScan = 512
)

// reap removes orphans. What is no orphan (any more) is ignored, and so is what
// does not fit into one command: it stays an orphan and is named again.
func (s *state) reap(r *api.Reap) (codec.Message, error) {
	for _, ino := range r.Inos {
		if len(s.own.list) > api.MaxRecords-16 {
			break
		}
		n, ok := s.inode(ino)
		if !ok || n.Nlink != 0 || !s.dequeue(inoKey(spaceOrphan, ino), &s.counts.Orphans) {
			continue
		}
		s.delete(inoKey(spaceInode, ino))
		s.dequeue(freeKey(freeClip, uint64(ino), 0), &s.counts.Freeing)
		prefix := inoKey(spaceExtent, ino)
		if n.XattrBytes > 0 || s.has(inoKey(spaceLock, ino)) || len(s.keys(prefix, next(prefix), 1)) > 0 {
			s.enqueue(freeKey(freeInode, uint64(ino), 0), &mark{}, &s.counts.Freeing)
		}
	}
	return &api.Empty{}, nil
}

// freeStep does a piece of the queued freeing: about Max records.
func (s *state) freeStep(r *api.FreeStep) (codec.Message, error) {
	budget := int(min(r.Max, api.MaxRecords-freeRoom-maxDepth-64))
	if budget == 0 {
		budget = freeDefault
	}
	for len(s.own.list) < budget && !s.failed() {
		entry := s.keys([]byte{spaceFree}, []byte{spaceFree + 1}, 1)
		if len(entry) == 0 {
			return &api.Stepped{}, nil
		}
		done, err := s.freeOne(entry[0])
		if err != nil {
			return nil, err
		}
		if done {
			s.dequeue(entry[0], &s.counts.Freeing)
		}
	}
	return &api.Stepped{More: len(s.keys([]byte{spaceFree}, []byte{spaceFree + 1}, 1)) > 0}, nil
}

// freeOne does one turn on an entry of the queue; true when nothing is left.
func (s *state) freeOne(key []byte) (bool, error) {
	if len(key) < 10 {
		return false, errkind.Corrupt.Wrap("free queue entry %x", key)
	}
	id := beUint64(key[2:])
	switch key[1] {
	case freeClip:
		return s.freeClipped(ids.Ino(id)), nil
	case freeGeneration:
		gen, _, ok := takeOrdered(key[10:])
		if !ok {
			return false, errkind.Corrupt.Wrap("free queue entry %x", key)
		}
		return s.freeExtents(ids.Ino(id), generationKey(ids.Ino(id), gen)), nil
	case freeInode:
		return s.freeInode(ids.Ino(id)), nil
	case freeSession:
		return s.freeSession(ids.Session(id)), nil
	}
	return false, errkind.Corrupt.Wrap("free queue entry %x", key)
}

// freeExtents removes some of the extents below prefix; true when none is left.
func (s *state) freeExtents(ino ids.Ino, prefix []byte) bool {
	m := s.filemap(&inode{Attr: api.Attr{Ino: ino}})
	count := 0
	type found struct {
		gen uint64
		e   extent
	}
	var list []found
	s.ascend(prefix, next(prefix), func(key, value []byte) bool {
		count++
		if count > freeBatch {
			return false
		}
		e, ok := s.extent(key, value)
		gen, _, _ := splitExtentKey(key)
		list = append(list, found{gen, e})
		return ok
	})
	for i := range list {
		m.remove(list[i].gen, &list[i].e)
	}
	m.settle()
	return count <= freeBatch
}

// freeClipped removes some of the extents that clips of a live inode hide;
// true when the scan reached the end. The queue's record holds how far it came.
func (s *state) freeClipped(ino ids.Ino) bool {
	n, ok := s.inode(ino)
	if !ok {
		return true
	}
	key := freeKey(freeClip, uint64(ino), 0)
	var cursor number
	s.load(key, &cursor)
	m := s.filemap(n)
	list := s.extents(ino, n.Generation, uint64(cursor), noEnd, freeScan)
	stored, removed := n.Stored, 0
	for i := range list {
		e := &list[i]
		if n.hidden(e) {
			if removed == freeBatch {
				cursor = number(e.Off)
				break
			}
			removed++
			m.remove(n.Generation, e)
			n.Stored -= e.Len
		}
		cursor = number(e.End())
	}
	m.settle()
	done := len(list) < freeScan && removed < freeBatch
	if done {
		n.Clips = nil
	} else {
		s.put(key, &cursor)
	}
	if n.Parent != 0 {
		s.charge(n.Parent, sum{Bytes: n.Stored - stored})
	}
	n.Change++
	s.setInode(n)
	return done
}

// freeInode removes some of what is left of a removed inode; true when nothing
// is left.
func (s *state) freeInode(ino ids.Ino) bool {
	if !s.freeExtents(ino, inoKey(spaceExtent, ino)) {
		return false
	}
	prefix := inoKey(spaceXattr, ino)
	names := s.keys(prefix, next(prefix), freeBatch)
	for _, k := range names {
		s.delete(k)
	}
	if len(names) == freeBatch {
		return false
	}
	return s.dropLocks(ino)
}

// freeSession removes some of what an ended session left; true when nothing is
// left, not even the session: its number alone tells that it has ended.
func (s *state) freeSession(id ids.Session) bool {
	prefix := be64([]byte{spaceLocked}, uint64(id))
	held := s.keys(prefix, next(prefix), freeBatch)
	for _, k := range held {
		s.dropSessionLocks(ids.Ino(beUint64(k[9:])), id)
	}
	if len(held) == freeBatch {
		return false
	}
	prefix = be64([]byte{spaceWindow}, uint64(id))
	for _, k := range s.keys(prefix, next(prefix), api.Places) {
		s.delete(k)
	}
	var sess session
	if s.load(sessionKey(id), &sess) {
		s.forgetSecret(id, sess.Secret)
		s.delete(sessionKey(id))
	}
	return true
}

// keys lists at most limit keys in [lo, hi).
func (v *view) keys(lo, hi []byte, limit int) [][]byte {
	var list [][]byte
	v.ascend(lo, hi, func(key, _ []byte) bool {
		list = append(list, key)
		return len(list) < limit
	})
	return list
}
