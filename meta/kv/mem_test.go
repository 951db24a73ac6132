package kv_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/kv/kvtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemContract(t *testing.T) {
	kvtest.Run(t, func(*testing.T) kvtest.Store { return kv.NewMem() },
		func(_ *testing.T, s kvtest.Store) kvtest.Store { return s.(*kv.Mem).Crash() })
}

func TestMemCrashDropsTheUpdateUnderWay(t *testing.T) {
	m := kv.NewMem()
	var after *kv.Mem
	m.BeforeCommit = func() error {
		after = m.Crash()
		return nil
	}
	err := m.Update(func(txn kv.Txn) error {
		txn.Set([]byte("k"), []byte("v"))
		return nil
	})
	require.ErrorIs(t, err, kv.ErrCrashed)
	require.NoError(t, after.View(func(r kv.Reader) error {
		v, err := r.Get([]byte("k"))
		require.Nil(t, v)
		return err
	}))
	require.ErrorIs(t, m.View(func(kv.Reader) error { return nil }), kv.ErrCrashed)
}
