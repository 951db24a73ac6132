package fs

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

func (t *table[T]) len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.mu.all.m)
}

func (l *lockOwners) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.all.m)
}

func (n *nodes) len() int {
	sum := 0
	for i := range n.shards {
		s := &n.shards[i]
		s.mu.Lock()
		sum += len(s.mu.all.m)
		s.mu.Unlock()
	}
	return sum
}

// TestErrnoIsExhaustive walks all kinds: the first number without a name of
// its own is behind the last.
func TestErrnoIsExhaustive(t *testing.T) {
	n := errkind.OK
	for ; !strings.HasPrefix(n.Error(), "error kind "); n++ {
		no, ok := errnos[n]
		require.True(t, ok, "no errno for %q", n.Error())
		require.Equal(t, n == errkind.OK, no == 0, n.Error())
		require.Equal(t, no, errnoOf(fmt.Errorf("wrapped: %w", n)))
	}
	require.Len(t, errnos, int(n))
	require.Equal(t, syscall.EIO, errnoOf(n), "a kind of a later version")
	require.Equal(t, syscall.EINTR, errnoOf(context.Canceled))
	require.Equal(t, syscall.ETIMEDOUT, errnoOf(context.DeadlineExceeded))
	require.Equal(t, syscall.ELOOP, errnoOf(fmt.Errorf("x: %w", syscall.ELOOP)))
	require.Equal(t, syscall.EIO, errnoOf(fmt.Errorf("unknown")))
	require.EqualValues(t, 0, errnoOf(nil))
}

// TestNodesShrink: the memory of a large walk comes back (S48).
func TestNodesShrink(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var n nodes
	before := heap()
	const count = 200_000
	for i := range count {
		a := api.Attr{Ino: ids.Ino(i + 2), Mode: api.ModeRegular | 0o644}
		n.see(&a, true)
		n.see(&a, true)
	}
	require.Equal(t, count, n.len())
	full := heap() - before
	for i := range count {
		n.forget(ids.Ino(i+2), 1)
	}
	require.Equal(t, count, n.len())
	for i := range count {
		n.forget(ids.Ino(i+2), 1)
	}
	require.Zero(t, n.len())
	require.Less(t, heap()-before, full/10)
	runtime.KeepAlive(&n)
}

func TestNodeBits(t *testing.T) {
	var n nodes
	a := api.Attr{Ino: 7, Mode: api.ModeRegular | 0o4755, Flags: api.FlagACL}
	n.see(&a, false)
	require.Zero(t, n.bits(7), "what the kernel does not reference is not kept")
	n.see(&a, true)
	require.Equal(t, nodeKnown|nodeACL|nodeSetID, n.bits(7))
	a.Mode, a.Flags = api.ModeRegular|0o2745, api.FlagCaps
	n.see(&a, false)
	require.Equal(t, nodeKnown|nodeCaps, n.bits(7), "set-gid without group execution is not a privilege")
	n.forget(7, 1)
	require.Zero(t, n.len())
}

func TestShrinkMap(t *testing.T) {
	var m shrinkMap[int, int]
	for i := range 1000 {
		m.set(i, i*i)
	}
	for i := range 900 {
		m.remove(i)
	}
	require.Len(t, m.m, 100)
	for i := 900; i < 1000; i++ {
		require.Equal(t, i*i, m.m[i])
	}
	require.Less(t, m.peak, 1000)
}

func TestOpContext(t *testing.T) {
	f := &FS{cfg: Config{OpTimeout: time.Hour, Grace: 20 * time.Millisecond}}
	cancel := make(chan struct{})
	o := f.begin(cancel)
	defer o.end()
	started := time.Now()
	close(cancel)
	require.NoError(t, o.Err(), "a signal does not end it at once")
	<-o.Done()
	require.GreaterOrEqual(t, time.Since(started), 20*time.Millisecond)
	require.ErrorIs(t, o.Err(), context.Canceled)

	f.cfg.OpTimeout = 10 * time.Millisecond
	o = f.begin(nil)
	<-o.Done()
	require.ErrorIs(t, o.Err(), context.DeadlineExceeded)
	o.end()
	require.ErrorIs(t, o.Err(), context.DeadlineExceeded)

	late := f.begin(nil)
	time.Sleep(15 * time.Millisecond)
	require.ErrorIs(t, late.Err(), context.DeadlineExceeded, "without a watcher, too")
	<-late.Done()
	late.end()

	done := beginWait(nil)
	watched := done.Done()
	done.end()
	<-watched
	require.ErrorIs(t, done.Err(), context.Canceled)

	interrupted := make(chan struct{})
	lock := beginWait(interrupted)
	close(interrupted)
	<-lock.Done()
	require.ErrorIs(t, lock.Err(), context.Canceled)
	lock.end()
}

func TestOpRunsFunctionsAtItsEnd(t *testing.T) {
	f := &FS{cfg: Config{OpTimeout: time.Hour, Grace: time.Millisecond}}
	interrupted := make(chan struct{})
	close(interrupted)
	for name, o := range map[string]*op{
		"signal":           f.begin(interrupted),
		"signal to a wait": beginWait(interrupted),
		"end":              f.begin(nil),
	} {
		ran := make(chan struct{})
		sched.AfterFunc(o, func() { close(ran) })
		stop := sched.AfterFunc(o, func() { t.Error("it was stopped") })
		require.True(t, stop(), name)
		require.False(t, stop(), name)
		if name == "end" {
			o.end()
		}
		<-ran
		require.Error(t, o.Err(), name)
		late := make(chan struct{})
		require.False(t, sched.AfterFunc(o, func() { close(late) })())
		<-late
		o.end()
	}
}

func BenchmarkOpWithAfterFunc(b *testing.B) {
	f := &FS{cfg: Config{OpTimeout: time.Hour, Grace: time.Second}}
	for b.Loop() {
		o := f.begin(nil)
		sched.AfterFunc(o, func() {})()
		o.end()
	}
}
