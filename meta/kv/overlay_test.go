package kv_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/kv/kvtest"
)

var metaKey = []byte("\x00m")

// do applies one command.
func do(t require.TestingT, o *kv.Overlay, fn func(kv.Txn) error) error {
	var failed error
	require.NoError(t, o.Apply(func(b *kv.Batch) error {
		failed = b.Do(fn)
		return nil
	}))
	return failed
}

// The overlay agrees with a map whatever order commands, failed commands,
// flushes (also half done ones) and crashes come in; so does its hash.
func TestOverlayAgainstAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mem, model := kv.NewMem(), kvtest.Model{}
		o := kv.NewOverlay(mem, 0)
		var frozen *kv.Frozen
		for range rapid.IntRange(1, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0, 1:
				require.NoError(rt, do(rt, o, func(txn kv.Txn) error {
					for range rapid.IntRange(0, 6).Draw(rt, "writes") {
						model.Write(rt, txn)
					}
					return model.Check(rt, txn)
				}))
			case 2:
				boom := errors.New("boom")
				require.ErrorIs(rt, do(rt, o, func(txn kv.Txn) error {
					kvtest.Model{}.Write(rt, txn)
					return boom
				}), boom)
			case 3:
				if frozen == nil {
					frozen = o.Freeze()
				} else {
					require.Nil(rt, o.Freeze())
				}
			case 4:
				if frozen != nil {
					require.NoError(rt, frozen.Write(metaKey, []byte("x")))
					frozen = nil
				}
			}
			require.NoError(rt, o.View(func(r kv.Reader) error { return model.Check(rt, r) }))
		}
		if frozen != nil {
			require.NoError(rt, frozen.Write(metaKey, nil))
		}
		require.NoError(rt, o.Freeze().Write(metaKey, nil))
		hash, err := kv.HashOf(mem)
		require.NoError(rt, err)
		require.Equal(rt, hash, o.Hash())
		require.Zero(rt, o.Bytes())
		require.NoError(rt, kv.NewOverlay(mem, hash).View(func(r kv.Reader) error { return model.Check(rt, r) }))
	})
}

func TestViewIsNotTornByAFlush(t *testing.T) {
	mem := kv.NewMem()
	o := kv.NewOverlay(mem, 0)
	set := func(v string) {
		require.NoError(t, do(t, o, func(txn kv.Txn) error {
			txn.Set([]byte("a"), []byte(v))
			txn.Set([]byte("b"), []byte(v))
			return nil
		}))
	}
	set("1")
	// The hook runs between the copy of the overlay and the opening of the
	// store's view: the moment at which a whole flush may slip in.
	slow := &lateView{Mem: mem}
	o = kv.NewOverlay(slow, 0)
	set("1")
	slow.before = func() {
		slow.before = nil
		require.NoError(t, do(t, o, func(txn kv.Txn) error {
			txn.Set([]byte("b"), []byte("2"))
			txn.Delete([]byte("a"))
			return nil
		}))
		require.NoError(t, o.Freeze().Write(metaKey, nil))
	}
	require.NoError(t, o.View(func(r kv.Reader) error {
		a, err := r.Get([]byte("a"))
		require.NoError(t, err)
		b, err := r.Get([]byte("b"))
		require.NoError(t, err)
		require.Nil(t, a)
		require.Equal(t, "2", string(b))
		return nil
	}))
}

type lateView struct {
	*kv.Mem
	before func()
}

func (l *lateView) View(fn func(kv.Reader) error) error {
	if l.before != nil {
		l.before()
	}
	return l.Mem.View(fn)
}

func TestOwnKeysAreHidden(t *testing.T) {
	mem := kv.NewMem()
	o := kv.NewOverlay(mem, 0)
	require.NoError(t, o.Freeze().Write(metaKey, []byte("secret")))
	require.NoError(t, o.View(func(r kv.Reader) error {
		v, err := r.Get(metaKey)
		require.Nil(t, v)
		require.NoError(t, err)
		none := func(k, _ []byte) bool { t.Errorf("saw %q", k); return true }
		require.NoError(t, r.Ascend(nil, nil, none))
		return r.Descend(nil, nil, none)
	}))
	require.Panics(t, func() {
		_ = do(t, o, func(txn kv.Txn) error { txn.Set(metaKey, nil); return nil })
	})
	require.Zero(t, o.Hash())
}

func TestWritesDuringAWalk(t *testing.T) {
	o := kv.NewOverlay(kv.NewMem(), 0)
	require.NoError(t, do(t, o, func(txn kv.Txn) error {
		for _, k := range []string{"a", "b", "c"} {
			txn.Set([]byte(k), nil)
		}
		seen := 0
		err := txn.Ascend(nil, nil, func(k, _ []byte) bool {
			seen++
			txn.Delete(k)
			txn.Set(append([]byte("z"), k...), nil)
			return true
		})
		require.Equal(t, 3, seen)
		return err
	}))
	require.NoError(t, o.View(func(r kv.Reader) error {
		var keys string
		err := r.Ascend(nil, nil, func(k, _ []byte) bool { keys += string(k) + " "; return true })
		require.Equal(t, "za zb zc ", keys)
		return err
	}))
}

func TestReplaceShutsViewsOut(t *testing.T) {
	o := kv.NewOverlay(kv.NewMem(), 0)
	o.BeginReplace()
	require.ErrorIs(t, o.View(func(kv.Reader) error { return nil }), errkind.Unavailable)
	o.EndReplace(7)
	require.NoError(t, o.View(func(kv.Reader) error { return nil }))
	require.EqualValues(t, 7, o.Hash())
}

func TestRecordHashIsPartOfTheFormat(t *testing.T) {
	require.Equal(t, uint64(0x84ca1da593420a3d), kv.RecordHash([]byte("key"), []byte("value")))
}
