package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// startJob begins a job in a task of its own, unless it is running already.
func (w *Worker) startJob(j *Job) {
	job := *j
	at := At{ids.ChunkKey{Block: job.Block.ID, Index: job.Index}, job.Target}
	w.mu.Lock()
	_, running := w.mu.jobs[job.ID]
	_, taken := w.mu.busy[at]
	refused := job.Kind == JobRepair && taken || len(w.mu.jobs) >= w.cfg.MaxJobs || w.mu.closing
	if !running && !refused {
		w.mu.jobs[job.ID] = struct{}{}
		if job.Kind == JobRepair {
			w.mu.busy[at] = struct{}{}
		}
	} else if !running {
		w.mu.done = append(w.mu.done, Result{job.ID, errkind.Busy.Wrap("job %d: the server has no room", job.ID)})
	}
	w.mu.Unlock()
	if running || refused {
		return
	}
	w.run("job", func() {
		ctx, end := w.bound(w.cfg.JobBound)
		defer end()
		err := w.do(ctx, &job)
		if err != nil {
			w.cfg.Log.Warn("job failed", "job", job.ID, "err", err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.mu.jobs, job.ID)
		if job.Kind == JobRepair {
			delete(w.mu.busy, at)
		}
		w.mu.done = append(w.mu.done, Result{job.ID, err})
	})
}

func (w *Worker) do(ctx context.Context, j *Job) error {
	switch {
	case j.Kind == JobCompact && w.cfg.Compact != nil:
		if err := w.cfg.Compact.Compact(ctx, j.Ino, j.Off, j.End); err != nil {
			return fmt.Errorf("compact inode %s from %d to %d: %w", j.Ino, j.Off, j.End, err)
		}
		return nil
	case j.Kind == JobCompact:
		return unsupported("compaction")
	case j.Kind != JobRepair:
		return unsupported(fmt.Sprintf("job of kind %d", j.Kind))
	case w.cfg.Rebuild == nil:
		return unsupported("repair")
	}
	return w.repair(ctx, j)
}

// repair makes chunk Index of the block whole on the target, and has it
// recorded. When recording fails the chunk stays: the record may have it all
// the same, so that only a verdict may delete it.
func (w *Worker) repair(ctx context.Context, j *Job) error {
	key := ids.ChunkKey{Block: j.Block.ID, Index: j.Index}
	k := w.disk(j.Target)
	if k == nil {
		return errkind.Invalid.Wrap("repair chunk %s: disk %d is not here", key, j.Target)
	}
	if int(j.Index) >= len(j.Block.Digests) {
		return errkind.Invalid.Wrap("repair chunk %s: the block has %d chunks", key, len(j.Block.Digests))
	}
	state, err := k.inspect(key, j.Block.Digests[j.Index])
	if err == nil && state != chunkWhole {
		err = w.rebuild(ctx, k, j, key, state)
	}
	if err != nil {
		return fmt.Errorf("repair chunk %s on disk %d: %w", key, j.Target, err)
	}
	if err := w.cfg.Control.Place(ctx, At{key, j.Target}, j.Block.Version); err != nil {
		return fmt.Errorf("record chunk %s on disk %d: %w", key, j.Target, err)
	}
	return nil
}

// chunkState is what a disk has of a chunk.
type chunkState uint8

const (
	chunkAbsent  chunkState = iota
	chunkWhole              // every byte is as the block record says
	chunkDamaged            // something else
)

// inspect reads what the disk has of the chunk.
func (k *keeper) inspect(key ids.ChunkKey, digest uint64) (chunkState, error) {
	r, err := k.store.Store.Pin(key)
	switch {
	case errors.Is(err, errkind.NoChunk):
		list, err := k.store.Store.Inventory().List(before(key), 1)
		if err != nil || len(list) == 0 || list[0].Key != key {
			return chunkAbsent, err
		}
		return chunkDamaged, nil // open, and nobody will seal it
	case errors.Is(err, errkind.Corrupt):
		return chunkDamaged, nil
	case err != nil:
		return chunkAbsent, err
	}
	defer r.Close()
	if r.Digest() != digest || !intact(r) {
		return chunkDamaged, nil
	}
	return chunkWhole, nil
}

// before returns a key such that List starts with key, if it is there.
func before(key ids.ChunkKey) ids.ChunkKey {
	switch {
	case key.Index > 0:
		key.Index--
		return key
	case key.Block.Lo > 0:
		key.Block.Lo--
	default:
		key.Block.Hi, key.Block.Lo = key.Block.Hi-1, ^uint64(0)
	}
	key.Index = 255
	return key
}

// intact reads all of a chunk and compares it with its own checksums.
func intact(r chunk.Reader) bool {
	h, sums := r.Header(), r.Sums()
	if ec.Digest(sums) != r.Digest() {
		return false
	}
	piece := 1 << max(h.Granule, 18)
	buf := make([]byte, min(piece, int(r.Length())))
	for off := 0; off < int(r.Length()); off += piece {
		p := buf[:min(piece, int(r.Length())-off)]
		if n, _ := r.ReadAt(p, int64(off)); n < len(p) {
			return false
		}
		from := off >> h.Granule
		if !ec.Check(p, sums[from:from+ec.Granules(len(p), h.Granule)], h.Granule) {
			return false
		}
	}
	return true
}

// rebuild computes the chunk and stores it. A damaged one is replaced only
// when the whole new one is in memory: most of its granules may be sound, and
// be needed to rebuild others.
func (w *Worker) rebuild(ctx context.Context, k *keeper, j *Job, key ids.ChunkKey, state chunkState) error {
	length := ec.ChunkLen(j.Block.Layout, int(j.Block.Length))
	h := chunk.Header{
		Key: key, Layout: j.Block.Layout, Ino: j.Ino, Reserve: uint32(length), Granule: j.Block.Granule,
		Session: w.cfg.Session(), Siblings: slices.Clone(j.Block.Disks),
	}
	h.Siblings[j.Index] = j.Target
	if state == chunkDamaged {
		whole := make([]byte, 0, length)
		err := w.cfg.Rebuild.RebuildChunk(ctx, &j.Block, int(j.Index), func(_ uint32, data []byte, _ []uint64) error {
			whole = append(whole, data...)
			return nil
		})
		if err != nil {
			return err
		}
		if err := k.delete([]ids.ChunkKey{key}); err != nil {
			return err
		}
		return k.fill(h, func(put putFunc) error { return put(0, whole, ec.Sums(nil, whole, h.Granule)) })
	}
	return k.fill(h, func(put putFunc) error {
		return w.cfg.Rebuild.RebuildChunk(ctx, &j.Block, int(j.Index), put)
	})
}

type putFunc = func(off uint32, data []byte, sums []uint64) error

// fill stores a chunk durably, or leaves nothing of it.
func (k *keeper) fill(h chunk.Header, with func(put putFunc) error) error {
	s := k.store.Store
	if err := s.Open(h); err != nil {
		return err
	}
	err := with(func(off uint32, data []byte, sums []uint64) error {
		if len(data) == 0 {
			return nil
		}
		return s.Put(h.Key, off, data, sums)
	})
	var done chunk.Sealed
	if err == nil {
		done, err = s.Seal(h.Key, h.Reserve)
	}
	if err == nil {
		return s.Sync(done.Ticket)
	}
	if derr := s.Delete([]ids.ChunkKey{h.Key}); derr != nil {
		k.w.cfg.Log.Warn("cannot drop an unfinished repair", "chunk", h.Key.String(), "err", derr)
	}
	return err
}
