package server_test

import (
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeStore is a chunk store in memory that counts its calls, and that a test
// can slow down, stop, or make fail.
type fakeStore struct {
	// before is called at the start of each operation, without a lock.
	before func(op string) error
	file   *os.File // when set, sealed bytes are served from it

	mu struct {
		sync.Mutex
		chunks map[ids.ChunkKey]*fakeChunk
		ticket uint64
		synced uint64
		calls  map[string]int
		fileAt int64
	}
}

type fakeChunk struct {
	header  chunk.Header
	data    []byte
	sums    map[int]uint64
	sealed  bool
	length  uint32
	ticket  uint64
	fileOff int64
}

func newFake() *fakeStore {
	f := &fakeStore{}
	f.mu.chunks = make(map[ids.ChunkKey]*fakeChunk)
	f.mu.calls = make(map[string]int)
	return f
}

func (f *fakeStore) enter(op string) error {
	f.mu.Lock()
	f.mu.calls[op]++
	f.mu.Unlock()
	if f.before != nil {
		return f.before(op)
	}
	return nil
}

func (f *fakeStore) count(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.calls[op]
}

// durable reports whether a chunk is sealed and synced.
func (f *fakeStore) durable(key ids.ChunkKey) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.mu.chunks[key]
	return c != nil && c.sealed && c.ticket <= f.mu.synced
}

func (f *fakeStore) Open(h chunk.Header) error {
	if err := f.enter("open"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.chunks[h.Key] == nil {
		f.mu.chunks[h.Key] = &fakeChunk{header: h, sums: make(map[int]uint64), data: make([]byte, 0, h.Reserve)}
	}
	return nil
}

func (f *fakeStore) Put(key ids.ChunkKey, off uint32, data []byte, sums []uint64) error {
	if err := f.enter("put"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.mu.chunks[key]
	if c == nil || c.sealed {
		return errkind.NoChunk.Wrap("put %s", key)
	}
	if need := int(off) + len(data); need > len(c.data) {
		c.data = c.data[:need]
	}
	copy(c.data[off:], data)
	for i, s := range sums {
		c.sums[int(off)>>c.header.Granule+i] = s
	}
	return nil
}

func (c *fakeChunk) table() []uint64 {
	var t []uint64
	for i := range ec.Granules(int(c.length), c.header.Granule) {
		t = append(t, c.sums[i])
	}
	return t
}

func (f *fakeStore) Seal(key ids.ChunkKey, length uint32) (chunk.Sealed, error) {
	if err := f.enter("seal"); err != nil {
		return chunk.Sealed{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.mu.chunks[key]
	if c == nil {
		return chunk.Sealed{}, errkind.NoChunk.Wrap("seal %s", key)
	}
	if !c.sealed {
		if int(length) > len(c.data) {
			return chunk.Sealed{}, errkind.Invalid.Wrap("seal %s at %d of %d", key, length, len(c.data))
		}
		f.mu.ticket++
		c.sealed, c.length, c.ticket = true, length, f.mu.ticket
		if f.file != nil {
			c.fileOff = f.mu.fileAt
			f.mu.fileAt += int64(length)
			if _, err := f.file.WriteAt(c.data[:length], c.fileOff); err != nil {
				return chunk.Sealed{}, err
			}
		}
	}
	return chunk.Sealed{Digest: ec.Digest(c.table()), Ticket: c.ticket}, nil
}

func (f *fakeStore) Write(h chunk.Header, data []byte, sums []uint64) (chunk.Sealed, error) {
	if err := f.Open(h); err != nil {
		return chunk.Sealed{}, err
	}
	if err := f.Put(h.Key, 0, data, sums); err != nil {
		return chunk.Sealed{}, err
	}
	return f.Seal(h.Key, uint32(len(data)))
}

// Sync makes durable only what was sealed before it began.
func (f *fakeStore) Sync(ticket uint64) error {
	f.mu.Lock()
	upTo := f.mu.ticket
	f.mu.Unlock()
	if err := f.enter("sync"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.synced = max(f.mu.synced, upTo)
	return nil
}

func (f *fakeStore) Pin(key ids.ChunkKey) (chunk.Reader, error) {
	if err := f.enter("pin"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.mu.chunks[key]
	if c == nil || !c.sealed {
		return nil, errkind.NoChunk.Wrap("pin %s", key)
	}
	f.mu.calls["pinned"]++
	return &fakeReader{f, c}, nil
}

func (f *fakeStore) Delete(keys []ids.ChunkKey) error {
	if err := f.enter("delete"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range keys {
		delete(f.mu.chunks, k)
	}
	return nil
}

func (f *fakeStore) Inventory() chunk.Inventory { return nil }

func (f *fakeStore) has(key ids.ChunkKey) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.chunks[key] != nil
}

type fakeReader struct {
	f *fakeStore
	c *fakeChunk
}

func (r *fakeReader) ReadAt(p []byte, off int64) (int, error) {
	if r.f.file != nil {
		return r.f.file.ReadAt(p, r.c.fileOff+off)
	}
	n := copy(p, r.c.data[min(off, int64(r.c.length)):r.c.length])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
func (r *fakeReader) Header() chunk.Header { return r.c.header }
func (r *fakeReader) Length() uint32       { return r.c.length }
func (r *fakeReader) Digest() uint64       { return ec.Digest(r.c.table()) }
func (r *fakeReader) Sums() []uint64       { return slices.Clone(r.c.table()) }
func (r *fakeReader) Section() (*os.File, int64) {
	return r.f.file, r.c.fileOff
}

func (r *fakeReader) Close() {
	r.f.mu.Lock()
	r.f.mu.calls["pinned"]--
	r.f.mu.Unlock()
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func tempFile(t testing.TB) *os.File {
	f, err := os.CreateTemp(t.TempDir(), "chunks")
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}
