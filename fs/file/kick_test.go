package file_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/sim"
)

// TestFlushBehindDroppedBlock flushes while a block is still being sealed of
// which nothing is left: its end must start the commit, not the next tick,
// which never comes here.
func TestFlushBehindDroppedBlock(t *testing.T) {
	for seed := range uint64(10) {
		world := sim.NewWorld(seed)
		v := newService(t, world)
		blocks := newBlocks(world)
		blocks.faults.maxDelay = 20 * time.Millisecond
		s := newSession(t, v, 1)
		e := newEngineWith(s, blocks, file.Config{Sched: world, Budget: 16 << 20, FlushEvery: 10000 * time.Hour})
		attr := s.create(t, "f")
		var err error
		done := false
		world.Go("test", func() {
			h := e.OpenCreated(attr, file.OpenFlags{Write: true})
			_, err1 := h.WriteAt(ctx, random(seed, 700_000), 0, file.WriteFlags{})
			_, err2 := e.Truncate(ctx, attr.Ino, 0)
			_, err3 := h.WriteAt(ctx, random(seed, 100), 0, file.WriteFlags{})
			err = errors.Join(err1, err2, err3, h.Flush(ctx))
			h.Release()
			err = errors.Join(err, e.Close(ctx))
			done = true
		})
		require.NoError(t, world.Run(time.Hour, func() bool { return done }))
		require.NoError(t, err)
		require.EqualValues(t, 0, e.OutstandingIDs())
		world.Close()
	}
}

// TestInlineRestOfLongPack commits a few bytes inline that lie at the end of a
// long log: the bytes before them were truncated away before they were sent.
func TestInlineRestOfLongPack(t *testing.T) {
	p := newPair(t, 64<<20)
	attr := p.a.s.create(t, "f")
	attr.Layout.CellLog = 20 // stripes of 4 MiB
	h := p.a.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 900_000), 0)
	_, err := p.a.Truncate(ctx, attr.Ino, 0)
	require.NoError(t, err)
	write(t, h, random(2, 4096), 0)
	require.NoError(t, h.Flush(ctx))
	h.Release()
	p.expect(t, attr, random(2, 4096))
	require.Zero(t, p.blocks.mu.written)
}

// TestTimeOutOfTheCallerDropsBytesOnce gives a flush no more time than the
// engine has itself: what could not be stored is given up then, and the next
// handle does not wait again.
func TestTimeOutOfTheCallerDropsBytesOnce(t *testing.T) {
	sc := &sched.Real{}
	blocks := newBlocks(sc)
	blocks.faults.deny = 100
	e := newEngineWith(newSession(t, newService(t, sc), 1), blocks, file.Config{Sched: sc, OpTimeout: 500 * time.Millisecond})
	attr := e.s.create(t, "f")
	h := e.OpenCreated(attr, file.OpenFlags{Write: true})
	write(t, h, random(1, 300_000), 0)
	short, cancel := context.WithTimeout(ctx, 480*time.Millisecond)
	defer cancel()
	err := h.Flush(short)
	require.Error(t, err)
	require.NotErrorIs(t, err, errkind.Interrupted)
	require.Empty(t, e.DirtyInos(), "the bytes are given up")
	require.NoError(t, h.Flush(ctx), "the error was told")
	h.Release()
	require.NoError(t, e.Close(ctx))
	sc.Wait()
}
