package replica

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/meta/kv"
)

// rotten fails at one key, as a store does whose value is damaged.
type rotten struct {
	*kv.Mem
	key string
}

var errRotten = errors.New("rotten")

func (s rotten) View(fn func(kv.Reader) error) error {
	return s.Mem.View(func(r kv.Reader) error { return fn(rottenReader{r, s.key}) })
}

type rottenReader struct {
	kv.Reader
	key string
}

func (r rottenReader) Ascend(lo, hi []byte, fn func(k, v []byte) bool) error {
	bad := false
	err := r.Reader.Ascend(lo, hi, func(k, v []byte) bool {
		bad = string(k) == r.key
		return !bad && fn(k, v)
	})
	if bad {
		return errRotten
	}
	return err
}

func TestSweepReadsEverything(t *testing.T) {
	mem := kv.NewMem()
	const records = 3*sweepStep + 7
	key := func(i uint64) []byte { return binary.BigEndian.AppendUint64([]byte{'k'}, i) }
	require.NoError(t, mem.Update(func(txn kv.Txn) error {
		for i := range uint64(records) {
			txn.Set(key(i), nil)
		}
		return nil
	}))
	steps := 1
	for next, err := sweep(mem, nil); next != nil; next, err = sweep(mem, next) {
		require.NoError(t, err)
		require.Equal(t, key(uint64(steps*sweepStep)), next)
		steps++
	}
	require.Equal(t, 4, steps)
	next, err := sweep(rotten{mem, string(key(records - 1))}, key(3*sweepStep))
	require.ErrorIs(t, err, errRotten)
	require.Nil(t, next)
	next, err = sweep(rotten{mem, string(key(records - 1))}, nil)
	require.NoError(t, err)
	require.NotNil(t, next)
}
