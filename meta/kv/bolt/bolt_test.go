package bolt

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	bbolt "go.etcd.io/bbolt"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/kv/kvtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func mustOpen(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestContract(t *testing.T) {
	kvtest.Run(t,
		func(t *testing.T) kvtest.Store { return mustOpen(t, filepath.Join(t.TempDir(), "m.db")) },
		func(t *testing.T, s kvtest.Store) kvtest.Store {
			require.NoError(t, s.Close())
			return mustOpen(t, s.(*Store).path)
		})
}

func TestDamagedRecordIsNotServed(t *testing.T) {
	s := mustOpen(t, filepath.Join(t.TempDir(), "m.db"))
	for _, damage := range []func(env []byte) []byte{
		func(env []byte) []byte { env[len(env)-1] ^= 1; return env },
		func(env []byte) []byte { env[2] ^= 1; return env },
		func(env []byte) []byte { return env[:3] },
		func([]byte) []byte { return seal([]byte("other"), []byte("value")) },
	} {
		require.NoError(t, s.Update(func(txn kv.Txn) error { txn.Set([]byte("key"), []byte("value")); return nil }))
		require.NoError(t, s.mu.db.Update(func(tx *bbolt.Tx) error {
			env := append([]byte(nil), tx.Bucket(bucket).Get([]byte("key"))...)
			return tx.Bucket(bucket).Put([]byte("key"), damage(env))
		}))
		require.NoError(t, s.View(func(r kv.Reader) error {
			v, err := r.Get([]byte("key"))
			require.ErrorIs(t, err, errkind.Corrupt)
			require.ErrorContains(t, err, `"key"`)
			require.Nil(t, v)
			served := func(k, _ []byte) bool { t.Errorf("served %q", k); return true }
			require.ErrorIs(t, r.Ascend(nil, nil, served), errkind.Corrupt)
			require.ErrorIs(t, r.Descend(nil, nil, served), errkind.Corrupt)
			return nil
		}))
	}
}

func TestOpenTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.db")
	mustOpen(t, path)
	_, err := Open(path)
	require.ErrorIs(t, err, errkind.Busy)
}

func TestUnfinishedCopyIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.db")
	require.NoError(t, os.WriteFile(path+".new", []byte("x"), 0o600))
	mustOpen(t, path)
	require.NoFileExists(t, path+".new")
}

func TestEnvelopeGolden(t *testing.T) {
	want, err := os.ReadFile("testdata/envelope.golden")
	require.NoError(t, err)
	got := fmt.Sprintf("%s\n%s\n", hex.EncodeToString(seal([]byte("key"), []byte("value"))),
		hex.EncodeToString(seal([]byte{1}, nil)))
	require.Equal(t, string(want), got)
}

func FuzzEnvelope(f *testing.F) {
	f.Add([]byte("key"), seal([]byte("key"), []byte("value")))
	f.Add([]byte(""), []byte{1})
	f.Fuzz(func(t *testing.T, key, env []byte) {
		if v, ok := open(key, env); ok {
			require.Equal(t, env, seal(key, v))
		} else {
			require.False(t, len(env) >= envelopeSize && string(seal(key, env[envelopeSize:])) == string(env))
		}
	})
}
