package file_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
)

// A view stays what it is while everything else passes through the cache.
func TestViewOutlivesEviction(t *testing.T) {
	const size = 40 << 20 // the cache has 16 MiB
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "f")
	w := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	want := random(3, size)
	for off := 0; off < size; off += 1 << 20 {
		write(t, w, want[off:off+1<<20], int64(off))
	}
	require.NoError(t, w.Flush(ctx))
	w.Release()
	h, err := p.b.Open(ctx, attr.Ino, file.OpenFlags{})
	require.NoError(t, err)
	defer h.Release()
	const step = 700_000 // some reads lie in two pieces
	var first file.View
	n, err := h.ReadView(ctx, make([]byte, step), 0, &first)
	require.NoError(t, err)
	require.Equal(t, step, n)
	require.True(t, first.Parts != nil)
	views, split := 0, 0
	for off := step; off < size; {
		var v file.View
		buf := make([]byte, step)
		n, err := h.ReadView(ctx, buf, int64(off), &v)
		require.NoError(t, err)
		require.Equal(t, min(step, size-off), n)
		got := buf[:n]
		if v.Parts != nil {
			views++
			got = bytes.Join(v.Parts, nil)
			split += len(v.Parts) - 1
		}
		require.True(t, bytes.Equal(want[off:off+n], got), "at %d", off)
		v.Release()
		off += n
	}
	require.NotZero(t, views)
	require.NotZero(t, split)
	require.True(t, bytes.Equal(want[:step], bytes.Join(first.Parts, nil)))
	require.Positive(t, p.b.CacheReferences())
	first.Release()
	require.Eventually(t, func() bool { return p.b.CacheReferences() == 0 }, 10*time.Second, time.Millisecond)
}

func TestShortReadIsACopy(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "f")
	w := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	defer w.Release()
	want := random(4, 3<<20)
	write(t, w, want, 0)
	require.NoError(t, w.Flush(ctx))
	for off := 0; off < len(want); off += 60_000 {
		var v file.View
		buf := make([]byte, 60_000)
		n, err := w.ReadView(ctx, buf, int64(off), &v)
		require.NoError(t, err)
		require.Empty(t, v.Parts)
		require.True(t, bytes.Equal(want[off:off+n], buf[:n]), "at %d", off)
		v.Release()
	}
}
