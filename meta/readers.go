package meta

import (
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// What the leader reads for its own work. Every reader is bounded by limit (at
// least 1) and goes on behind a cursor; all errors are failures of the view.

// read runs fn on a view of r.
func read(what string, r kv.Reader, fn func(*view)) error {
	v := &view{base: r}
	fn(v)
	if v.err != nil {
		return fmt.Errorf("read %s: %w", what, v.err)
	}
	return nil
}

// Info is what the state says of the whole.
type Info struct {
	Founded     bool
	Cluster     ids.UUID
	Incarnation ids.Incarnation
	Epoch       ids.Epoch // for the header of replies
	Feature     uint32
	Layout      ids.Layout // that the cluster was founded with
	MapVersion  uint64     // of the cluster map
	Time        int64      // last logged time, ns since 1970
	Counts      Counts
}

// ReadInfo returns the state's identity, counters and clock.
func ReadInfo(r kv.Reader) (Info, error) {
	var i Info
	err := read("cluster", r, func(v *view) {
		var id identity
		var clock number
		i.Founded = v.load(keyCluster, &id)
		v.load(keyClock, &clock)
		v.load(keyCounts, &i.Counts)
		i.Cluster, i.Incarnation, i.Epoch, i.Feature = id.Cluster, id.Incarnation, id.Epoch, id.Feature
		i.Layout, i.MapVersion, i.Time = id.Layout, id.MapVersion, int64(clock)
	})
	return i, err
}

// ReadMap returns the cluster map as recorded: no server is Up and there are no
// placement sets, both are the leader's to fill in.
func ReadMap(r kv.Reader) (cluster.Map, error) {
	var m cluster.Map
	err := read("cluster map", r, func(v *view) {
		var id identity
		v.load(keyCluster, &id)
		m.Version, m.Cluster, m.Incarnation = id.MapVersion, id.Cluster, id.Incarnation
		m.Servers = v.servers()
		v.disks(func(d cluster.Disk, _ *disk) { m.Disks = append(m.Disks, d) })
		m.DiskDomains = m.Hosts() < id.Layout.Width()
	})
	return m, err
}

// ReadTotals answers StatFS.
func ReadTotals(r kv.Reader) (api.Totals, error) {
	var t api.Totals
	err := read("totals", r, func(v *view) { t = *v.totals() })
	return t, err
}

// SessionInfo describes a session.
type SessionInfo struct {
	ID         ids.Session
	State      SessionState
	Name, Host string
	Floor      uint64 // lowest block counter that it may still commit, as logged
	Created    int64
}

// ReadSessions lists sessions with numbers above after.
func ReadSessions(r kv.Reader, after ids.Session, limit int) ([]SessionInfo, error) {
	var list []SessionInfo
	err := read("sessions", r, func(v *view) {
		v.ascend(sessionKey(after+1), []byte{spaceSession + 1}, func(key, value []byte) bool {
			var s session
			if !v.decode(key, value, &s) {
				return false
			}
			list = append(list, SessionInfo{
				ID: ids.Session(beUint64(key[1:])), State: s.State, Name: s.Name, Host: s.Host, Floor: s.Floor, Created: s.Created,
			})
			return len(list) < limit
		})
	})
	return list, err
}

// ReadSession returns one session; false when it is unknown or its end is
// already complete.
func ReadSession(r kv.Reader, id ids.Session) (SessionInfo, bool, error) {
	list, err := ReadSessions(r, id-1, 1)
	if err != nil || len(list) == 0 || list[0].ID != id || id == 0 {
		return SessionInfo{}, false, err
	}
	return list[0], true, nil
}

// FindSession returns the number of the live session that was opened with the
// secret, or zero.
func FindSession(r kv.Reader, secret ids.UUID) (ids.Session, error) {
	var id ids.Session
	err := read("session", r, func(v *view) {
		var n number
		if v.load(uuidKey(spaceSecret, secret), &n) {
			if _, ok := v.liveSession(ids.Session(n)); ok {
				id = ids.Session(n)
			}
		}
	})
	return id, err
}

// ReadOrphans lists inodes without a name, above after.
func ReadOrphans(r kv.Reader, after ids.Ino, limit int) ([]ids.Ino, error) {
	var list []ids.Ino
	err := read("orphans", r, func(v *view) {
		for _, k := range v.keys(inoKey(spaceOrphan, after+1), []byte{spaceOrphan + 1}, limit) {
			list = append(list, ids.Ino(beUint64(k[1:])))
		}
	})
	return list, err
}

// LockHolder is the owner of a granted lock.
type LockHolder struct {
	Session ids.Session
	Space   api.LockSpace
	Owner   uint64
}

// ReadBlockers lists the owners whose granted locks keep a session from a lock,
// each once: what a search for deadlocks goes along.
func ReadBlockers(r kv.Reader, session ids.Session, l *api.Lock) ([]LockHolder, error) {
	var list []LockHolder
	err := read("locks", r, func(v *view) {
		want, err := wantedLock(l, session)
		if err != nil || want.Type == api.Unlock {
			return
		}
		var held locks
		v.load(inoKey(spaceLock, l.Ino), &held)
		for i := range held.List {
			h := &held.List[i]
			who := LockHolder{h.Session, h.Space, h.Owner}
			if !h.conflicts(want) || slices.Contains(list, who) {
				continue
			}
			if _, live := v.liveSession(h.Session); live {
				list = append(list, who)
			}
		}
	})
	return list, err
}

// DeadChunk is a chunk that is to be deleted.
type DeadChunk struct {
	Key   ids.ChunkKey
	Since int64 // logged time at which the last reference went
}

// ReadDead lists the dead chunks of a disk behind after; the zero key starts.
func ReadDead(r kv.Reader, disk ids.DiskID, after ids.ChunkKey, limit int) ([]DeadChunk, error) {
	var list []DeadChunk
	err := read("dead chunks", r, func(v *view) {
		prefix := idKey(spaceDead, uint32(disk))
		lo := append(deadKey(disk, after), 0)
		v.ascend(lo, next(prefix), func(key, value []byte) bool {
			var since number
			if !v.decode(key, value, &since) {
				return false
			}
			list = append(list, DeadChunk{Key: chunkOf(key[len(prefix):]), Since: int64(since)})
			return len(list) < limit
		})
	})
	return list, err
}

// chunkOf reads a chunk's key: a block id and an index.
func chunkOf(p []byte) ids.ChunkKey {
	return ids.ChunkKey{Block: ids.BlockIDFrom(p), Index: p[16]}
}

// Repair is a chunk that is to be made anew.
type Repair struct {
	Key    ids.ChunkKey
	Disk   ids.DiskID // that holds it, damaged or misplaced; zero when missing
	Since  int64      // logged time
	Reason string
}

// ReadRepairs lists the repair queue behind after; the zero key starts.
func ReadRepairs(r kv.Reader, after ids.ChunkKey, limit int) ([]Repair, error) {
	var list []Repair
	err := read("repair queue", r, func(v *view) {
		lo := append(repairKey(after), 0)
		v.ascend(lo, []byte{spaceRepair + 1}, func(key, value []byte) bool {
			var rec repair
			if !v.decode(key, value, &rec) {
				return false
			}
			list = append(list, Repair{Key: chunkOf(key[1:]), Disk: rec.Disk, Since: rec.Since, Reason: rec.Reason})
			return len(list) < limit
		})
	})
	return list, err
}

// BlockInfo is a block's record.
type BlockInfo struct {
	ids.Block
	Live    uint64    // bytes that extents cover
	Holders []ids.Ino // files that refer to it, in order
}

func (b *block) info() BlockInfo {
	i := BlockInfo{Block: b.Block, Live: b.live()}
	for _, h := range b.Holders {
		i.Holders = append(i.Holders, h.Ino)
	}
	return i
}

// ReadBlock returns a block's record; false when there is none.
func ReadBlock(r kv.Reader, id ids.BlockID) (BlockInfo, bool, error) {
	var i BlockInfo
	found := false
	err := read("block", r, func(v *view) {
		b, ok := v.block(id)
		if ok {
			i, found = b.info(), true
		}
	})
	return i, found, err
}

// ReadBlocks lists block records behind after, looking at limit of them, and
// returns those that have a chunk on disk (any disk when zero). next is the
// last one looked at, zero at the end.
func ReadBlocks(r kv.Reader, disk ids.DiskID, after ids.BlockID, limit int) (list []BlockInfo, next ids.BlockID, err error) {
	err = read("blocks", r, func(v *view) {
		seen := 0
		v.ascend(append(blockKey(after), 0), []byte{spaceBlock + 1}, func(key, value []byte) bool {
			b := &block{}
			if !v.decode(key, value, b) {
				return false
			}
			b.ID = ids.BlockIDFrom(key[1:])
			if disk == 0 || slices.Contains(b.Disks, disk) {
				list = append(list, b.info())
			}
			if seen++; seen == limit {
				next = b.ID
				return false
			}
			return true
		})
	})
	return list, next, err
}

// Verdict says what a disk is to do with a chunk that it holds (data-path rule
// 17). writer is the session named in the chunk's header (zero: the block's
// own); floor is the lowest block counter that the writer may still commit, as
// the leader heard last (the logged one counts too, if it is higher).
func Verdict(r kv.Reader, disk ids.DiskID, key ids.ChunkKey, writer ids.Session, floor uint64) (api.Verdict, error) {
	verdict := api.VerdictKeep
	err := read("verdict", r, func(v *view) { verdict = v.verdict(disk, key, writer, floor) })
	if err != nil {
		verdict = api.VerdictKeep
	}
	return verdict, err
}

func (v *view) verdict(disk ids.DiskID, key ids.ChunkKey, writer ids.Session, floor uint64) api.Verdict {
	if b, ok := v.block(key.Block); ok && int(key.Index) < len(b.Disks) && b.Disks[key.Index] == disk {
		return api.VerdictKeep
	}
	if writer == 0 {
		writer = key.Block.Session()
	}
	var id identity
	var a alloc
	v.load(keyCluster, &id)
	v.load(keyAlloc, &a)
	own := key.Block.Session()
	if key.Block.Incarnation() > id.Incarnation || writer > a.Session || own > a.Session || v.failed() {
		return api.VerdictKeep // of a future that this state does not know
	}
	sess, ok := v.liveSession(writer)
	if v.failed() {
		return api.VerdictKeep
	}
	if !ok || writer == own && key.Block.Counter() < max(floor, sess.Floor) {
		return api.VerdictDelete
	}
	return api.VerdictNotYet
}
