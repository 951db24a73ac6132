package server

import (
	"log/slog"
	"time"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// job is one order to a chunk server.
type job struct {
	api.Job
	server ids.ServerID
	given  time.Duration // when it was handed out
	handed bool
}

// window names a piece of a file that is compacted.
type fileWindow struct {
	ino ids.Ino
	off uint64
}

// jobs is the plain worker: what is being repaired and compacted, by whom.
type jobs struct {
	next    uint64
	active  map[uint64]*job
	chunks  map[ids.ChunkKey]uint64 // under repair
	windows map[fileWindow]uint64   // under compaction
	retry   map[any]time.Duration   // failed chunks and windows: not before
	// guarded are places where a job may have put, or may still put, a chunk
	// that no record names yet: not to be deleted before the time.
	guarded map[api.ChunkAt]time.Duration
	// deleted are places that were told to delete a chunk of a living block:
	// no target before the time, lest an old order hits a new chunk.
	deleted map[api.ChunkAt]time.Duration
	changed bool // look at the queue from its start
	after   ids.ChunkKey
	compact meta.CompactCursor
	scan    deadScan
}

// Limits of jobs.
const (
	maxJobs       = 1024
	maxJobsServer = 32
	planPage      = 256
	maxMemories   = 1 << 16 // entries of retry, deleted
	deletedFor    = time.Minute
	guardFor      = 3 * jobLimit
)

func newJobs() jobs {
	return jobs{
		active: make(map[uint64]*job), chunks: make(map[ids.ChunkKey]uint64), windows: make(map[fileWindow]uint64),
		retry: make(map[any]time.Duration), guarded: make(map[api.ChunkAt]time.Duration), deleted: make(map[api.ChunkAt]time.Duration),
	}
}

func (j *jobs) add(x *job, now time.Duration) {
	j.next++
	x.ID = j.next
	j.active[x.ID] = x
	if x.Kind == api.JobRepair {
		key := ids.ChunkKey{Block: x.Block.ID, Index: x.Index}
		j.chunks[key] = x.ID
		j.guarded[api.ChunkAt{Key: key, Disk: x.Target}] = now + guardFor
	} else {
		j.windows[fileWindow{x.Ino, x.Off}] = x.ID
	}
}

// subject is the key of a job in retry.
func (x *job) subject() any {
	if x.Kind == api.JobRepair {
		return ids.ChunkKey{Block: x.Block.ID, Index: x.Index}
	}
	return fileWindow{x.Ino, x.Off}
}

// end forgets a job. Its guard stays: a server that was given up may be at work.
func (j *jobs) end(x *job) {
	delete(j.active, x.ID)
	switch key := x.subject().(type) {
	case ids.ChunkKey:
		delete(j.chunks, key)
	case fileWindow:
		delete(j.windows, key)
	}
}

// results takes the outcome of jobs.
func (j *jobs) results(log *slog.Logger, done []api.JobResult, now time.Duration) {
	for _, r := range done {
		x := j.active[r.Job]
		if x == nil {
			continue
		}
		j.end(x)
		j.changed = true
		if k := errkind.Kind(r.Err); k != errkind.OK {
			log.Warn("metadata: a job failed", "job", r.Job, "kind", x.Kind, "block", x.Block.ID, "ino", x.Ino, "err", r.Text)
			again := jobBackoff
			if k == errkind.Unsupported {
				again = jobUnsupported
			}
			if len(j.retry) < maxMemories {
				j.retry[x.subject()] = now + again
			}
		}
	}
}

// serverRestarted forgets the jobs of a server that is down or new born.
func (j *jobs) serverRestarted(id ids.ServerID) {
	for _, n := range sortedKeys(j.active) {
		if x := j.active[n]; x.server == id && x.handed {
			j.end(x)
			j.changed = true
		}
	}
}

// expire gives up jobs that take too long, and forgets what is past.
func (j *jobs) expire(now time.Duration) {
	for _, n := range sortedKeys(j.active) {
		if x := j.active[n]; x.handed && now-x.given > jobLimit {
			j.end(x)
			j.changed = true
		}
	}
	for k, until := range j.retry {
		if now >= until {
			delete(j.retry, k)
			j.changed = true
		}
	}
	for _, m := range []map[api.ChunkAt]time.Duration{j.guarded, j.deleted} {
		for k, until := range m {
			if now >= until {
				delete(m, k)
			}
		}
	}
}

// handOut gives a server its jobs, as many as it has room for.
func (j *jobs) handOut(to ids.ServerID, room uint32, now time.Duration) []api.Job {
	var out []api.Job
	for _, n := range sortedKeys(j.active) {
		x := j.active[n]
		if len(out) >= int(min(room, maxJobsServer)) {
			break
		}
		if x.server == to && !x.handed {
			x.handed, x.given = true, now
			out = append(out, x.Job)
		}
	}
	return out
}

func (j *jobs) load(server ids.ServerID) int {
	n := 0
	for _, x := range j.active {
		if x.server == server {
			n++
		}
	}
	return n
}

// planJobs turns the repair queue and the candidates for compaction into jobs;
// with mu held.
func (s *Server) planJobs(l *leader) {
	l.jobs.expire(s.cfg.Sched.Now())
	s.planRepairs(l)
	if s.mu.lead == l {
		s.planCompaction(l)
	}
}

// wanted is an entry of the repair queue with its block.
type wanted struct {
	meta.Repair
	block ids.Block
}

func (s *Server) planRepairs(l *leader) {
	j := &l.jobs
	if j.changed {
		j.changed, j.after = false, ids.ChunkKey{}
	}
	if len(j.active) >= maxJobs {
		return
	}
	var list []wanted
	after := j.after
	fresh := s.cfg.Sched.Wall().Add(-lateAfter).UnixNano()
	err := s.view(func(r kv.Reader) error {
		page, err := meta.ReadRepairs(r, after, planPage)
		if err != nil {
			return err
		}
		after = ids.ChunkKey{}
		if len(page) == planPage {
			after = page[len(page)-1].Key
		}
		for _, e := range page {
			if e.Disk == 0 && e.Since > fresh {
				continue // its writer is still finishing it
			}
			b, ok, err := meta.ReadBlock(r, e.Key.Block)
			if err != nil {
				return err
			}
			if ok && int(e.Key.Index) < len(b.Disks) {
				list = append(list, wanted{e, b.Block})
			}
		}
		return nil
	})
	if err != nil {
		s.cfg.Log.Error("metadata: read the repair queue", "err", err)
		return
	}
	if s.mu.lead != l {
		return
	}
	j.after = after
	for i := range list {
		l.planRepair(&list[i], s.cfg.Sched.Now())
	}
}

// planRepair makes a job for one chunk, if it can be done now.
func (l *leader) planRepair(w *wanted, now time.Duration) {
	j, m := &l.jobs, &l.cluster.cmap
	if _, busy := j.chunks[w.Key]; busy || len(j.active) >= maxJobs {
		return
	}
	if _, wait := j.retry[w.Key]; wait || !rebuildable(m, &w.block, w.Key.Index) {
		return
	}
	// The chunk, and room for what is being written there meanwhile.
	need := uint64(w.block.Length)/uint64(w.block.Layout.K) + ids.MaxChunk
	disk, ok := target(m, &w.block, w.Key.Index, func(d ids.DiskID) bool {
		_, told := j.deleted[api.ChunkAt{Key: w.Key, Disk: d}]
		return told || m.Disk(d).Free < need || j.load(m.Disk(d).Server) >= maxJobsServer
	})
	if !ok {
		return
	}
	j.add(&job{
		Job:    api.Job{Kind: api.JobRepair, Block: w.block, Index: w.Key.Index, Target: disk},
		server: m.Disk(disk).Server,
	}, now)
}

// rebuildable reports whether enough other chunks can be read.
func rebuildable(m *cluster.Map, b *ids.Block, index uint8) bool {
	n := 0
	for i, id := range b.Disks {
		if i == int(index) || id == 0 {
			continue
		}
		d := m.Disk(id)
		if d == nil || d.State == cluster.DiskDead || d.State == cluster.DiskRemoved {
			continue
		}
		if sv := m.Server(d.Server); sv != nil && sv.Up {
			n++
		}
	}
	return n >= int(b.Layout.K)
}

// planCompaction looks at a piece of the extents and makes jobs for the
// windows that are worth it.
func (s *Server) planCompaction(l *leader) {
	j := &l.jobs
	if len(j.windows) >= maxJobs/4 {
		return
	}
	var list []meta.Candidate
	at := j.compact
	err := s.view(func(r kv.Reader) (err error) { list, at, err = meta.ReadCompactions(r, at, maxExtentsScan); return err })
	if err != nil {
		s.cfg.Log.Error("metadata: look for candidates to compact", "err", err)
		return
	}
	if s.mu.lead != l {
		return
	}
	j.compact = at
	now := s.cfg.Sched.Now()
	for i := range list {
		c := &list[i]
		key := fileWindow{c.Ino, c.Off}
		_, busy := j.windows[key]
		_, wait := j.retry[key]
		server, ok := l.leastBusy()
		if busy || wait || !ok {
			continue
		}
		if len(j.retry) < maxMemories {
			j.retry[key] = now + jobBackoff // or one that cannot be improved is tried in every round
		}
		j.add(&job{Job: api.Job{Kind: api.JobCompact, Ino: c.Ino, Off: c.Off, End: c.End}, server: server}, now)
	}
}

// maxExtentsScan is how many extents one look covers.
const maxExtentsScan = 1024

// leastBusy is the server with room and the fewest jobs.
func (l *leader) leastBusy() (ids.ServerID, bool) {
	var best ids.ServerID
	least := maxJobsServer
	for _, id := range sortedKeys(l.cluster.servers) {
		st := l.cluster.servers[id]
		if n := l.jobs.load(id); st.up && st.room > 0 && n < least {
			best, least = id, n
		}
	}
	return best, best != 0
}

// deadScan finds the blocks that have a chunk on a dead disk.
type deadScan struct {
	done    map[ids.DiskID]bool // fully scanned in this term
	disk    ids.DiskID          // being scanned
	after   ids.BlockID
	more    bool // the next tick should come at once
	running bool // a QueueRepair is under way
}

// scanPage is how many blocks one step looks at.
const scanPage = 2048

// scanDead queues the chunks of dead disks for repair, a piece at a time; with
// mu held.
func (s *Server) scanDead(l *leader) {
	d := &l.jobs.scan
	d.more = false
	if d.running || !d.choose(&l.cluster.base) {
		return
	}
	var chunks []api.ChunkAt
	disk, after := d.disk, d.after
	err := s.view(func(r kv.Reader) error {
		list, next, err := meta.ReadBlocks(r, disk, after, scanPage)
		after = next
		for i := range list {
			for index, on := range list[i].Disks {
				if on == disk {
					chunks = append(chunks, api.ChunkAt{Key: ids.ChunkKey{Block: list[i].ID, Index: uint8(index)}, Disk: disk})
				}
			}
		}
		return err
	})
	if err != nil {
		s.cfg.Log.Error("metadata: look for chunks of a dead disk", "disk", disk, "err", err)
		return
	}
	if s.mu.lead != l {
		return
	}
	if len(chunks) == 0 {
		d.advance(disk, after)
		return
	}
	d.running = true
	s.own(&api.QueueRepair{Chunks: chunks, Damage: "the disk is dead"}, func(_ []byte, err error) {
		d.running = false
		l.jobs.changed = true
		if err == nil {
			d.advance(disk, after)
		}
		s.wake.Broadcast()
	})
}

// choose finds the disk to scan; false when there is nothing to do. A disk
// that came back is scanned anew when it dies again.
func (d *deadScan) choose(m *cluster.Map) bool {
	if d.done == nil {
		d.done = make(map[ids.DiskID]bool)
	}
	chosen := false
	for i := range m.Disks {
		id := m.Disks[i].ID
		dead := m.Disks[i].State == cluster.DiskDead
		switch {
		case !dead:
			delete(d.done, id)
		case d.disk == id:
			chosen = true
		case !chosen && d.disk == 0 && !d.done[id]:
			d.disk, d.after, chosen = id, ids.BlockID{}, true
		}
	}
	if !chosen {
		d.disk = 0
	}
	return chosen
}

func (d *deadScan) advance(disk ids.DiskID, after ids.BlockID) {
	if d.disk != disk {
		return
	}
	d.after, d.more = after, true
	if after.IsZero() {
		d.done[disk], d.disk = true, 0
	}
}
