// Package chunktest is the contract of chunk.Store as tests: every store must
// pass them, the flash engine and those that stand in for it elsewhere.
package chunktest

import (
	"io"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Key returns a chunk key that differs with n and index.
func Key(n uint64, index uint8) ids.ChunkKey {
	return ids.ChunkKey{Block: ids.MakeBlockID(3, 1, 7, n), Index: index}
}

// Header returns a header for a coded chunk with granules of 64 KiB.
func Header(key ids.ChunkKey, reserve uint32) chunk.Header {
	return chunk.Header{
		Key: key, Layout: ids.RS(4, 2), Ino: 42, FileOff: 64 << 20,
		Reserve: reserve, Granule: 16, Siblings: []ids.DiskID{1, 2, 3, 4, 5, 6},
	}
}

// Bytes returns n bytes that depend on the key.
func Bytes(key ids.ChunkKey, n int) []byte {
	p := make([]byte, n)
	x := key.Block.Lo*31 + uint64(key.Index) + 1
	for i := range p {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		p[i] = byte(x)
	}
	return p
}

// Sums returns the checksum of each granule of data.
func Sums(data []byte, granule uint8) []uint64 {
	sums := []uint64{}
	for g := 1 << granule; len(data) > 0; data = data[min(g, len(data)):] {
		sums = append(sums, xxh3.Hash(data[:min(g, len(data))]))
	}
	return sums
}

// Store writes a whole chunk through Open, Put and Seal, and syncs it.
func Store(t require.TestingT, s chunk.Store, h chunk.Header, data []byte) {
	require.NoError(t, s.Open(h))
	PutAll(t, s, h, data)
	done, err := s.Seal(h.Key, uint32(len(data)))
	require.NoError(t, err)
	require.NoError(t, s.Sync(done.Ticket))
}

// PutAll puts data in pieces of up to 256 KiB.
func PutAll(t require.TestingT, s chunk.Store, h chunk.Header, data []byte) {
	const piece = 256 << 10
	for off := 0; off < len(data); off += piece {
		p := data[off:min(off+piece, len(data))]
		require.NoError(t, s.Put(h.Key, uint32(off), p, Sums(p, h.Granule)))
	}
}

// RequireChunk reads the chunk back and compares it with data.
func RequireChunk(t require.TestingT, s chunk.Store, key ids.ChunkKey, data []byte) {
	r, err := s.Pin(key)
	require.NoError(t, err)
	defer r.Close()
	require.Equal(t, uint32(len(data)), r.Length())
	require.Equal(t, key, r.Header().Key)
	got := make([]byte, len(data)+1)
	n, err := r.ReadAt(got, 0)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, len(data), n)
	if string(data) != string(got[:n]) {
		require.Fail(t, "wrong bytes", "chunk %s of %d bytes", key, len(data))
	}
	require.Equal(t, Sums(data, r.Header().Granule), append([]uint64{}, r.Sums()...))
}

// Run runs the contract; open returns a fresh, empty store of at least 64 MiB.
func Run(t *testing.T, open func(t *testing.T) chunk.Store) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s chunk.Store)
	}{
		{"round trip", roundTrip},
		{"short chunks", shortChunks},
		{"open again", openAgain},
		{"put again", putAgain},
		{"put wrongly", putWrongly},
		{"seal", seal},
		{"unsealed is unreadable", unsealed},
		{"write", write},
		{"delete", remove},
		{"pin outlives delete", pinned},
		{"inventory", inventory},
		{"sync", syncs},
		{"concurrent", concurrent},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

func roundTrip(t *testing.T, s chunk.Store) {
	for i, n := range []int{0, 4096, 64 << 10, 68 << 10, 1 << 20, 5<<20 + 4096} {
		h := Header(Key(uint64(i), 2), 6<<20)
		data := Bytes(h.Key, n)
		Store(t, s, h, data)
		RequireChunk(t, s, h.Key, data)
		r, err := s.Pin(h.Key)
		require.NoError(t, err)
		require.Equal(t, h, r.Header())
		if n > 100 {
			p := make([]byte, 50)
			_, err = r.ReadAt(p, 50)
			require.NoError(t, err)
			require.Equal(t, data[50:100], p)
		}
		_, err = r.ReadAt(make([]byte, 1), int64(n))
		require.ErrorIs(t, err, io.EOF)
		r.Close()
		r.Close()
	}
}

func shortChunks(t *testing.T, s chunk.Store) {
	// The last granule may be short, and the reserve larger than what comes.
	h := Header(Key(1, 0), 1<<20)
	h.Granule, h.Layout = 12, ids.Copies(3)
	data := Bytes(h.Key, 10000)
	Store(t, s, h, data)
	RequireChunk(t, s, h.Key, data)
}

func openAgain(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 1<<20)
	require.NoError(t, s.Open(h))
	require.NoError(t, s.Open(h))
	other := h
	other.Ino++
	require.ErrorIs(t, s.Open(other), errkind.Conflict)
	other = h
	other.Session = 9
	require.ErrorIs(t, s.Open(other), errkind.Conflict)
	other = h
	other.Siblings = []ids.DiskID{9}
	require.ErrorIs(t, s.Open(other), errkind.Conflict)

	bad := Header(Key(2, 0), ids.MaxChunk+1)
	require.ErrorIs(t, s.Open(bad), errkind.Invalid)
	bad = Header(Key(2, 0), 2<<20)
	bad.Granule = 12 // more granules than a table holds
	require.ErrorIs(t, s.Open(bad), errkind.Invalid)
	bad = Header(Key(2, 6), 4096) // rs-4-2 has no chunk 6
	require.ErrorIs(t, s.Open(bad), errkind.Invalid)
}

func putAgain(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 1<<20)
	require.NoError(t, s.Open(h))
	data := Bytes(h.Key, 128<<10)
	sums := Sums(data, 16)
	require.NoError(t, s.Put(h.Key, 0, data, sums))
	require.NoError(t, s.Put(h.Key, 0, data, sums))
	require.NoError(t, s.Put(h.Key, 64<<10, data[64<<10:], sums[1:]))
	require.ErrorIs(t, s.Put(h.Key, 0, data, []uint64{sums[0], 5}), errkind.Conflict)
	_, err := s.Seal(h.Key, 128<<10)
	require.NoError(t, err)
	require.NoError(t, s.Put(h.Key, 0, data, sums), "a repetition after the seal")
	require.ErrorIs(t, s.Put(h.Key, 0, data[:64<<10], []uint64{5}), errkind.Conflict)
	require.ErrorIs(t, s.Put(h.Key, 128<<10, data, sums), errkind.Conflict, "more after the seal")
	RequireChunk(t, s, h.Key, data)
}

func putWrongly(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 128<<10)
	data := Bytes(h.Key, 192<<10)
	require.ErrorIs(t, s.Put(h.Key, 0, data[:65536], Sums(data[:65536], 16)), errkind.NoChunk)
	require.NoError(t, s.Open(h))
	require.ErrorIs(t, s.Put(h.Key, 4096, data[:4096], []uint64{1}), errkind.Invalid, "offset within a granule")
	require.ErrorIs(t, s.Put(h.Key, 0, data, Sums(data, 16)), errkind.Invalid, "beyond the reserve")
	require.ErrorIs(t, s.Put(h.Key, 0, data[:65536], []uint64{1, 2}), errkind.Invalid, "one sum too many")
	require.ErrorIs(t, s.Put(h.Key, 0, nil, nil), errkind.Invalid)
}

func seal(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 1<<20)
	_, err := s.Seal(h.Key, 0)
	require.ErrorIs(t, err, errkind.NoChunk)
	require.NoError(t, s.Open(h))
	data := Bytes(h.Key, 256<<10)
	sums := Sums(data, 16)
	require.NoError(t, s.Put(h.Key, 0, data[:64<<10], sums[:1]))
	require.NoError(t, s.Put(h.Key, 128<<10, data[128<<10:], sums[2:]))
	_, err = s.Seal(h.Key, 256<<10)
	require.ErrorIs(t, err, errkind.Invalid, "a granule is missing")
	_, err = s.Seal(h.Key, 60<<10)
	require.ErrorIs(t, err, errkind.Invalid, "the sum covers more than that")
	_, err = s.Seal(h.Key, 2<<20)
	require.ErrorIs(t, err, errkind.Invalid)
	// Sealing before what was put last drops the rest.
	first, err := s.Seal(h.Key, 64<<10)
	require.NoError(t, err)
	again, err := s.Seal(h.Key, 64<<10)
	require.NoError(t, err)
	require.Equal(t, first.Digest, again.Digest)
	require.NoError(t, s.Sync(again.Ticket))
	_, err = s.Seal(h.Key, 0)
	require.ErrorIs(t, err, errkind.Conflict)
	RequireChunk(t, s, h.Key, data[:64<<10])
}

func unsealed(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 1<<20)
	require.NoError(t, s.Open(h))
	PutAll(t, s, h, Bytes(h.Key, 1<<20))
	_, err := s.Pin(h.Key)
	require.ErrorIs(t, err, errkind.NoChunk)
	_, err = s.Pin(Key(9, 9))
	require.ErrorIs(t, err, errkind.NoChunk)
}

func write(t *testing.T, s chunk.Store) {
	for i, n := range []int{0, 1, 4096, 60 << 10, 61 << 10, 100000, 1 << 20} {
		h := Header(Key(uint64(i), 1), 1<<20)
		h.Layout, h.Granule = ids.Copies(3), 12
		data := Bytes(h.Key, n)
		done, err := s.Write(h, data, Sums(data, 12))
		require.NoError(t, err)
		require.NoError(t, s.Sync(done.Ticket))
		RequireChunk(t, s, h.Key, data)
		again, err := s.Write(h, data, Sums(data, 12))
		require.NoError(t, err, "length %d", n)
		require.Equal(t, done.Digest, again.Digest)
		other := Bytes(Key(99, 1), n+1)
		if len(other) <= 1<<20 {
			_, err = s.Write(h, other, Sums(other, 12))
			require.ErrorIs(t, err, errkind.Conflict, "length %d", n)
		}
		RequireChunk(t, s, h.Key, data)
	}
	h := Header(Key(50, 1), 4<<20)
	data := Bytes(h.Key, 1<<20+1)
	_, err := s.Write(h, data, Sums(data, 16))
	require.ErrorIs(t, err, errkind.Invalid)
	_, err = s.Write(h, data[:4096], nil)
	require.ErrorIs(t, err, errkind.Invalid)
}

func remove(t *testing.T, s chunk.Store) {
	sealed, open := Header(Key(1, 0), 1<<20), Header(Key(2, 0), 1<<20)
	Store(t, s, sealed, Bytes(sealed.Key, 1<<20))
	require.NoError(t, s.Open(open))
	require.NoError(t, s.Delete([]ids.ChunkKey{sealed.Key, open.Key, Key(3, 0), sealed.Key}))
	_, err := s.Pin(sealed.Key)
	require.ErrorIs(t, err, errkind.NoChunk)
	data := Bytes(open.Key, 64<<10)
	require.ErrorIs(t, s.Put(open.Key, 0, data, Sums(data, 16)), errkind.NoChunk)
	_, err = s.Seal(open.Key, 0)
	require.ErrorIs(t, err, errkind.NoChunk)
	// The key may come again: a chunk that is repaired on the same disk.
	Store(t, s, sealed, data)
	RequireChunk(t, s, sealed.Key, data)
}

func pinned(t *testing.T, s chunk.Store) {
	h := Header(Key(1, 0), 1<<20)
	data := Bytes(h.Key, 1<<20)
	Store(t, s, h, data)
	r, err := s.Pin(h.Key)
	require.NoError(t, err)
	require.NoError(t, s.Delete([]ids.ChunkKey{h.Key}))
	for i := range uint64(30) {
		other := Header(Key(10+i, 0), 1<<20)
		Store(t, s, other, Bytes(other.Key, 1<<20))
		require.NoError(t, s.Inventory().Maintain())
	}
	got := make([]byte, len(data))
	_, err = r.ReadAt(got, 0)
	require.NoError(t, err)
	require.True(t, string(data) == string(got))
	r.Close()
}

func inventory(t *testing.T, s chunk.Store) {
	inv := s.Inventory()
	require.False(t, inv.UUID().IsZero())
	before := inv.Usage()
	require.False(t, before.ReadOnly)
	var want []chunk.Info
	for i := range uint64(5) {
		h := Header(Key(i, uint8(i)), 1<<20)
		data := Bytes(h.Key, 64<<10*int(i))
		require.NoError(t, s.Open(h))
		PutAll(t, s, h, data)
		info := chunk.Info{Key: h.Key, State: chunk.StateOpen}
		if i%2 == 0 {
			done, err := s.Seal(h.Key, uint32(len(data)))
			require.NoError(t, err)
			info = chunk.Info{Key: h.Key, State: chunk.StateSealed, Length: uint32(len(data)), Digest: done.Digest}
		}
		want = append(want, info)
	}
	var got []chunk.Info
	var after ids.ChunkKey
	for {
		part, err := inv.List(after, 2)
		require.NoError(t, err)
		require.LessOrEqual(t, len(part), 2)
		if len(part) == 0 {
			break
		}
		got = append(got, part...)
		after = part[len(part)-1].Key
	}
	require.Equal(t, want, got)
	usage := inv.Usage()
	require.Equal(t, before.Chunks+5, usage.Chunks)
	require.Less(t, usage.Free, before.Free)
	n, err := inv.AbandonOpen()
	require.NoError(t, err)
	require.Zero(t, n, "the open chunks are this life's")
}

func syncs(t *testing.T, s chunk.Store) {
	require.NoError(t, s.Sync(0))
	require.ErrorIs(t, s.Sync(1<<40), errkind.Invalid)
	h := Header(Key(1, 0), 64<<10)
	require.NoError(t, s.Open(h))
	done, err := s.Seal(h.Key, 0)
	require.NoError(t, err)
	require.NoError(t, s.Sync(done.Ticket))
	require.NoError(t, s.Sync(done.Ticket))
}

func concurrent(t *testing.T, s chunk.Store) {
	var wg sync.WaitGroup
	for w := range uint64(6) {
		wg.Go(func() {
			for i := range uint64(12) {
				h := Header(Key(w<<16|i, uint8(w)), 256<<10)
				data := Bytes(h.Key, int(i+1)*12<<10)
				if i%3 == 0 {
					done, err := s.Write(h, data, Sums(data, h.Granule))
					if err == nil {
						err = s.Sync(done.Ticket)
					}
					if err != nil {
						t.Errorf("write %s: %v", h.Key, err)
						return
					}
				} else {
					Store(goroutineT{t}, s, h, data)
				}
				RequireChunk(goroutineT{t}, s, h.Key, data)
				if i%4 == 1 {
					if err := s.Delete([]ids.ChunkKey{h.Key}); err != nil {
						t.Errorf("delete %s: %v", h.Key, err)
					}
				}
			}
		})
	}
	for range 20 {
		if err := s.Inventory().Maintain(); err != nil {
			t.Errorf("maintain: %v", err)
		}
		s.Inventory().Usage()
	}
	wg.Wait()
	list, err := s.Inventory().List(ids.ChunkKey{}, 1000)
	require.NoError(t, err)
	require.Len(t, list, 6*(12-3))
}

// goroutineT lets require end a test from another goroutine.
type goroutineT struct{ *testing.T }

// FailNow ends the calling goroutine; Errorf has failed the test before.
func (g goroutineT) FailNow() { runtime.Goexit() }
