package fs

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// bothEngines runs a test with the engine in memory, whose behaviour is plain,
// and with the real one over blocks in memory.
func bothEngines(t *testing.T, fn func(t *testing.T, c *cluster)) {
	t.Run("memory", func(t *testing.T) { fn(t, newCluster()) })
	t.Run("real", func(t *testing.T) {
		c := newCluster()
		c.blocks = &memBlocks{all: make(map[ids.BlockID][]byte)}
		fn(t, c)
	})
}

// newRealEngine starts a real engine for one mount.
func newRealEngine(c *cluster, s *session, log *slog.Logger, invalidate func(ids.Ino, uint64, error)) *file.Engine {
	return file.New(file.Config{
		Meta: s, IDs: &blockIDs{session: s.id}, Blocks: c.blocks, Sched: new(sched.Real), Log: log,
		Budget: 64 << 20, Invalidate: invalidate,
	})
}

// blockIDs makes the ids of a session's blocks.
type blockIDs struct {
	session ids.Session
	mu      sync.Mutex
	last    uint64
}

func (b *blockIDs) NextBlockID(slot ids.Slot) ids.BlockID {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	return ids.MakeBlockID(slot, 1, b.session, b.last)
}

// memBlocks keeps blocks in memory.
type memBlocks struct {
	mu  sync.Mutex
	all map[ids.BlockID][]byte
}

func (m *memBlocks) NewBlock(_ context.Context, spec chunk.BlockSpec) (chunk.BlockWriter, error) {
	return &memWriter{m: m, layout: spec.Layout, id: spec.NextID()}, nil
}

func (m *memBlocks) WriteBlock(ctx context.Context, spec chunk.BlockSpec, data []byte) (ids.Block, chunk.BlockWriter, error) {
	w := &memWriter{m: m, layout: spec.Layout.Small(), id: spec.NextID(), data: bytes.Clone(data)}
	b, err := w.Seal(ctx)
	return b, w, err
}

func (m *memBlocks) ReadBlock(_ context.Context, b *ids.Block, off int, dst []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	data, ok := m.all[b.ID]
	if !ok || off+len(dst) > len(data) {
		return errkind.NoChunk.Wrap("block %s", b.ID)
	}
	copy(dst, data[off:])
	return nil
}

// memWriter writes one block.
type memWriter struct {
	m      *memBlocks
	layout ids.Layout
	id     ids.BlockID
	data   []byte
}

func (w *memWriter) Layout() ids.Layout { return w.layout }

func (w *memWriter) Append(_ context.Context, data []byte, release func(ok bool)) error {
	w.data = append(w.data, data...)
	go release(true)
	return nil
}

func (w *memWriter) Seal(context.Context) (ids.Block, error) {
	w.m.mu.Lock()
	w.m.all[w.id] = w.data
	w.m.mu.Unlock()
	b := ids.Block{
		ID: w.id, Layout: w.layout, Length: uint32(len(w.data)), Logical: uint32(len(w.data)), Granule: 16,
		Disks: make([]ids.DiskID, w.layout.Width()), Digests: make([]uint64, w.layout.Width()),
	}
	for i := range b.Disks {
		b.Disks[i], b.Digests[i] = ids.DiskID(i+1), xxh3.Hash(w.data)
	}
	return b, nil
}

func (w *memWriter) Committed() {}

func (w *memWriter) Abandon() {
	w.m.mu.Lock()
	delete(w.m.all, w.id)
	w.m.mu.Unlock()
}

// servers registers the disks that blocks name.
func (s *service) servers() error {
	for i := range byte(6) {
		err := s.do(context.Background(), 0, &api.RegisterServer{
			UUID: ids.UUID{9, i}, Addr: "host:" + string('0'+rune(i)), Host: "host" + string('0'+rune(i)),
			Disks: []api.DiskReport{{UUID: ids.UUID{8, i}, Capacity: 1 << 40, Free: 1 << 40}},
		}, &api.Registered{})
		if err != nil {
			return err
		}
	}
	return nil
}
