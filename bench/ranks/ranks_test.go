package ranks

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSaveThenLoad(t *testing.T) {
	j := Job{Dir: t.TempDir(), Size: 3<<20 + 8192, Block: 1 << 20, Fsync: true}
	s, err := Save(j, 3)
	require.NoError(t, err)
	require.Equal(t, j.Size, s.Bytes)
	l, err := Load(j, 3)
	require.NoError(t, err)
	require.Equal(t, j.Size, l.Bytes)

	f, err := os.OpenFile(Shard(j.Dir, 3), os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{0}, 1<<20+77)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = Load(j, 3)
	require.ErrorContains(t, err, "wrong bytes", "one flipped byte must be seen")
}

func TestLoadSeesShortAndForeignShards(t *testing.T) {
	j := Job{Dir: t.TempDir(), Size: 1 << 20, Block: 1 << 20}
	_, err := Save(j, 0)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(Shard(j.Dir, 0), 4096))
	_, err = Load(j, 0)
	require.ErrorContains(t, err, "want")
	_, err = Save(j, 0)
	require.NoError(t, err)
	require.NoError(t, os.Rename(Shard(j.Dir, 0), Shard(j.Dir, 1)))
	_, err = Load(j, 1)
	require.ErrorContains(t, err, "wrong bytes")
}

func TestSmallCountsThreeOperationsAFile(t *testing.T) {
	j := Job{Dir: t.TempDir(), Files: 7, Own: true}
	r, err := Small(j, 2)
	require.NoError(t, err)
	require.Equal(t, int64(21), r.Ops)
}

func TestMachineCPUGrows(t *testing.T) {
	a, err := MachineCPU()
	require.NoError(t, err)
	require.Positive(t, a)
}
