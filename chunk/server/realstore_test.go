package server_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/store"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

func openReal(t *testing.T, fs vfs.FS) *store.Store {
	s, err := store.Open(store.Config{FS: fs, Sched: new(sched.Real), Log: quiet(), SegmentSize: 32 * mib, ReserveBytes: mib})
	require.NoError(t, err)
	return s
}

// TestRealStore writes through the flash engine, in memory and on the machine's
// file system, restarts the server, and reads everything back.
func TestRealStore(t *testing.T) {
	machine, err := vfs.NewOS(t.TempDir())
	require.NoError(t, err)
	mem := vfs.NewMem()
	mem.SetCapacity(512 * mib)
	for name, fs := range map[string]vfs.FS{"memory": mem, "machine": machine} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, store.Format(fs, store.Identity{Disk: ids.UUID{1}, Server: ids.UUID{2}, Cluster: testCluster, DiskID: 1, ServerID: 1}))
			tr := newTransport(t, transport.Config{})
			s := openReal(t, fs)
			b := newBedOf(t, bedConfig{boot: 1}, chunk.Store(s))
			for i := range 5 {
				require.NoError(t, writeOver(tr, b.addr, 1, ckey(i), pattern(2*mib+i*4096, i)))
			}
			must(t, tr, b.addr, storeReq(1, ckey(10), pattern(20<<10, 10)))
			must(t, tr, b.addr, openReq(1, ckey(11), mib))
			must(t, tr, b.addr, putReq(1, ckey(11), 0, pattern(1<<16, 11)))
			r, err := ask(tr, b.addr, putReq(1, ckey(11), 0, pattern(1<<16, 12)))
			require.NoError(t, err)
			require.Equal(t, errkind.Conflict, r.Status, "other bytes for the same range")
			must(t, tr, b.addr, putReq(1, ckey(11), 0, pattern(1<<16, 11)))

			b.close()
			require.NoError(t, s.Close())
			s = openReal(t, fs)
			n, err := s.AbandonOpen()
			require.NoError(t, err)
			require.Equal(t, 1, n)
			b = newBedOf(t, bedConfig{boot: 2, addr: b.addr}, chunk.Store(s))
			t.Cleanup(func() { require.NoError(t, s.Close()) })
			t.Cleanup(b.close)
			for i := range 5 {
				require.Eventually(t, func() bool {
					err := readOver(tr, b.addr, 1, ckey(i), pattern(2*mib+i*4096, i))
					return err == nil || errkind.Of(err) != errkind.Unavailable
				}, reconnectBound, reconnectStep)
				require.NoError(t, readOver(tr, b.addr, 1, ckey(i), pattern(2*mib+i*4096, i)))
			}
			require.NoError(t, readOver(tr, b.addr, 1, ckey(10), pattern(20<<10, 10)))
			sealed, err := ask(tr, b.addr, sealReq(1, ckey(11), pattern(1<<16, 11)))
			require.NoError(t, err)
			require.Equal(t, errkind.NoChunk, sealed.Status, "an unsealed chunk does not survive its server")
			st := must(t, tr, b.addr, &wire.Request{Op: wire.OpStat, Body: &wire.ChunkRef{Disk: 1, Key: ckey(10)}})
			require.Equal(t, ec.Digest(ec.Sums(nil, pattern(20<<10, 10), granule)), st.Body.(*wire.Stat).Digest)
		})
	}
}
