// Package kvtest is the contract of kv.Store as a test, run over every
// implementation.
package kvtest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/meta/kv"
)

// Store is what the contract covers.
type Store interface {
	kv.Store
	kv.Replacer
}

// Run runs the contract. open returns an empty store; reopen closes and opens it again.
func Run(t *testing.T, open func(t *testing.T) Store, reopen func(t *testing.T, s Store) Store) {
	t.Run("empty and missing values differ", func(t *testing.T) { emptyValues(t, open(t)) })
	t.Run("a failed update leaves nothing", func(t *testing.T) { failedUpdate(t, open(t)) })
	t.Run("a view stays as it was", func(t *testing.T) { stableView(t, open(t)) })
	t.Run("bounds", func(t *testing.T) { bounds(t, open(t)) })
	t.Run("replace", func(t *testing.T) { replace(t, open(t), reopen) })
	t.Run("against a map", func(t *testing.T) {
		s, m := open(t), Model{}
		rapid.Check(t, func(rt *rapid.T) {
			require.NoError(rt, s.Update(func(txn kv.Txn) error {
				for range rapid.IntRange(0, 20).Draw(rt, "writes") {
					m.Write(rt, txn)
				}
				return m.Check(rt, txn)
			}))
			require.NoError(rt, s.View(func(r kv.Reader) error { return m.Check(rt, r) }))
		})
		s = reopen(t, s)
		require.NoError(t, s.View(func(r kv.Reader) error { return m.same(r) }))
	})
}

// Model is a plain map that the rapid tests compare with.
type Model map[string][]byte

// keys are few and share prefixes, so that deletions and neighbours are hit often.
var keys = rapid.Custom(func(t *rapid.T) []byte {
	return rapid.SliceOfN(rapid.SampledFrom([]byte{1, 'a', 'b', 0, 255}), 1, 3).
		Filter(func(k []byte) bool { return k[0] != 0 }).Draw(t, "key")
})

// Write draws one change and makes it in both.
func (m Model) Write(t *rapid.T, txn kv.Txn) {
	k := keys.Draw(t, "key")
	if rapid.IntRange(0, 2).Draw(t, "kind") == 0 {
		delete(m, string(k))
		txn.Delete(k)
		return
	}
	v := rapid.SliceOfN(rapid.Byte(), 0, 4).Draw(t, "value")
	m[string(k)] = bytes.Clone(v)
	txn.Set(k, v)
}

// Check compares a reader with the model by drawn lookups and walks.
func (m Model) Check(t *rapid.T, r kv.Reader) error {
	k := keys.Draw(t, "get")
	got, err := r.Get(k)
	if err != nil {
		return err
	}
	want, ok := m[string(k)]
	require.Equal(t, ok, got != nil, "presence of %q", k)
	require.True(t, bytes.Equal(want, got), "value of %q", k)

	lo, hi := keys.Draw(t, "lo"), keys.Draw(t, "hi")
	if rapid.Bool().Draw(t, "open end") {
		hi = nil
	}
	limit := rapid.IntRange(1, 40).Draw(t, "limit")
	up, err := collect(limit, func(fn func(k, v []byte) bool) error { return r.Ascend(lo, hi, fn) })
	require.NoError(t, err)
	require.Equal(t, m.list(limit, false, func(k []byte) bool {
		return bytes.Compare(k, lo) >= 0 && (hi == nil || bytes.Compare(k, hi) < 0)
	}), up, "ascend %q to %q", lo, hi)
	down, err := collect(limit, func(fn func(k, v []byte) bool) error { return r.Descend(hi, lo, fn) })
	require.NoError(t, err)
	require.Equal(t, m.list(limit, true, func(k []byte) bool {
		return bytes.Compare(k, lo) >= 0 && (hi == nil || bytes.Compare(k, hi) <= 0)
	}), down, "descend %q to %q", hi, lo)
	return nil
}

func (m Model) same(r kv.Reader) error {
	got, err := collect(1<<30, func(fn func(k, v []byte) bool) error { return r.Ascend([]byte{1}, nil, fn) })
	if err != nil {
		return err
	}
	want := m.list(1<<30, false, func([]byte) bool { return true })
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("store holds %q, want %q", got, want)
	}
	return nil
}

func collect(limit int, walk func(func(k, v []byte) bool) error) (out []string, err error) {
	err = walk(func(k, v []byte) bool {
		out = append(out, fmt.Sprintf("%q=%q", k, v))
		return len(out) < limit
	})
	return out, err
}

func (m Model) list(limit int, down bool, in func([]byte) bool) (out []string) {
	sorted := make([]string, 0, len(m))
	for k := range m {
		sorted = append(sorted, k)
	}
	slices.Sort(sorted)
	if down {
		slices.Reverse(sorted)
	}
	for _, k := range sorted {
		if in([]byte(k)) && len(out) < limit {
			out = append(out, fmt.Sprintf("%q=%q", k, m[k]))
		}
	}
	return out
}

func put(t *testing.T, s kv.Store, pairs ...string) {
	t.Helper()
	require.NoError(t, s.Update(func(txn kv.Txn) error {
		for i := 0; i < len(pairs); i += 2 {
			txn.Set([]byte(pairs[i]), []byte(pairs[i+1]))
		}
		return nil
	}))
}

func get(t *testing.T, s kv.Store, key string) (v []byte) {
	t.Helper()
	require.NoError(t, s.View(func(r kv.Reader) (err error) {
		v, err = r.Get([]byte(key))
		v = bytes.Clone(v)
		return err
	}))
	return v
}

func emptyValues(t *testing.T, s Store) {
	require.NoError(t, s.Update(func(txn kv.Txn) error {
		txn.Set([]byte("a"), nil)
		txn.Set([]byte("b"), []byte{})
		return nil
	}))
	require.NotNil(t, get(t, s, "a"))
	require.NotNil(t, get(t, s, "b"))
	require.Empty(t, get(t, s, "b"))
	require.Nil(t, get(t, s, "c"))
}

func failedUpdate(t *testing.T, s Store) {
	put(t, s, "a", "1")
	boom := errors.New("boom")
	err := s.Update(func(txn kv.Txn) error {
		txn.Set([]byte("a"), []byte("2"))
		txn.Set([]byte("b"), []byte("2"))
		return boom
	})
	require.ErrorIs(t, err, boom)
	require.Equal(t, "1", string(get(t, s, "a")))
	require.Nil(t, get(t, s, "b"))
}

func stableView(t *testing.T, s Store) {
	put(t, s, "a", "1")
	require.NoError(t, s.View(func(r kv.Reader) error {
		put(t, s, "a", "2", "b", "2")
		v, err := r.Get([]byte("a"))
		require.NoError(t, err)
		require.Equal(t, "1", string(v))
		return r.Ascend(nil, nil, func(k, _ []byte) bool {
			require.Equal(t, "a", string(k))
			return true
		})
	}))
	require.Equal(t, "2", string(get(t, s, "b")))
}

func bounds(t *testing.T, s Store) {
	put(t, s, "a", "1", "b", "2", "c", "3")
	require.NoError(t, s.View(func(r kv.Reader) error {
		up, err := collect(9, func(fn func(k, v []byte) bool) error { return r.Ascend([]byte("a"), []byte("c"), fn) })
		require.NoError(t, err)
		require.Equal(t, []string{`"a"="1"`, `"b"="2"`}, up)
		down, err := collect(9, func(fn func(k, v []byte) bool) error { return r.Descend([]byte("bb"), []byte("a"), fn) })
		require.NoError(t, err)
		require.Equal(t, []string{`"b"="2"`, `"a"="1"`}, down)
		all, err := collect(9, func(fn func(k, v []byte) bool) error { return r.Descend(nil, nil, fn) })
		require.NoError(t, err)
		require.Equal(t, []string{`"c"="3"`, `"b"="2"`, `"a"="1"`}, all)
		return nil
	}))
}

func replace(t *testing.T, s Store, reopen func(t *testing.T, s Store) Store) {
	put(t, s, "a", "old", "b", "old")
	r, err := s.Replace()
	require.NoError(t, err)
	require.NoError(t, r.Put([]byte("x"), []byte("dropped")))
	r.Abort()
	require.Equal(t, "old", string(get(t, s, "a")))

	r, err = s.Replace()
	require.NoError(t, err)
	buf := []byte("b")
	require.NoError(t, r.Put(buf, []byte("new")))
	buf[0] = 'c'
	require.NoError(t, r.Put(buf, []byte("new")))
	require.Equal(t, "old", string(get(t, s, "b")))
	require.NoError(t, r.Commit())
	r.Abort()
	for range 2 {
		require.Nil(t, get(t, s, "a"))
		require.Equal(t, "new", string(get(t, s, "b")))
		require.Equal(t, "new", string(get(t, s, "c")))
		s = reopen(t, s)
	}
}
