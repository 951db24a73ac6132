package workload

import (
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/sim/simcluster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	seeds = flag.Int("seeds", 12, "seeds of each kind of run")
	first = flag.Uint64("seed", 1, "the first seed")
)

// kinds are the ways in which a cluster is run.
var kinds = []struct {
	name string
	cfg  Config
}{
	{"spared", Config{For: 15 * time.Second}},
	{"wild", Config{For: 15 * time.Second, Wild: true}},
	{"three metadata servers", Config{For: 10 * time.Second, Cluster: simcluster.Config{Metas: 3}}},
	{"exactly enough servers", Config{For: 10 * time.Second, Cluster: simcluster.Config{Servers: 6}}},
}

func TestNothingAcknowledgedIsLost(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			var all Result
			for s := *first; s < *first+uint64(*seeds); s++ {
				r, err := Run(s, k.cfg)
				require.NoError(t, err, "seed %d", s)
				all.Ops += r.Ops
				all.Faults += r.Faults
			}
			require.NotZero(t, all.Ops)
			require.NotZero(t, all.Faults)
			t.Logf("%d seeds: %d operations, %d faults", *seeds, all.Ops, all.Faults)
		})
	}
}

// Everything else rests on this: whoever breaks it makes failures that cannot
// be found again.
func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	hashes := map[uint64]bool{}
	for _, k := range kinds {
		for s := range uint64(2) {
			a, err := Run(s, k.cfg)
			require.NoError(t, err)
			b, err := Run(s, k.cfg)
			require.NoError(t, err)
			require.Equal(t, a, b, "%s, seed %d", k.name, s)
			hashes[a.Hash] = true
		}
	}
	require.Len(t, hashes, 2*len(kinds), "different seeds run differently")
}

// losing runs programs without faults, then takes the disks of some servers away.
func losing(lost int) (Result, error) {
	cfg := Config{NoFault: true, For: 5 * time.Second, Cluster: simcluster.Config{Servers: 9}}
	cfg.atEnd = func(r *run) error {
		for i := range lost {
			r.CrashChunk(i)
			r.LoseDisks(i)
		}
		r.World.Sleep(time.Second)
		return nil
	}
	return Run(1, cfg)
}

// With more disks gone than a block has chunks to spare files are lost, which
// must be found out, or the oracle is blind.
func TestTheOracleSeesALoss(t *testing.T) {
	_, err := losing(4)
	require.Error(t, err)
}

func TestLostDisksAreRepaired(t *testing.T) {
	r, err := losing(2)
	require.NoError(t, err)
	require.NotZero(t, r.Audit.Blocks)
}

func TestTheOracleSeesOtherBytes(t *testing.T) {
	e := &entry{images: [][]byte{[]byte("old bytes")}}
	require.NoError(t, e.check([]byte("old bytes")))
	require.Error(t, e.check([]byte("old byte")))
	require.Error(t, e.check([]byte("old bytez")))
	require.Error(t, e.check(make([]byte, 9)), "zeros in place of acknowledged bytes")
	e.wrote([]byte("new bytes, and more"))
	require.NoError(t, e.check([]byte("new bytes")), "a mixture of what was not acknowledged")
	require.Error(t, e.check([]byte("new bytes, or")))
	e.acknowledged()
	require.Error(t, e.check([]byte("old bytes")))
	require.NoError(t, e.check([]byte("new bytes, and more")))
}
