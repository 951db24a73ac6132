package sched

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestContextEnds(t *testing.T) {
	parent, stop := context.WithCancel(context.Background())
	for _, try := range []struct {
		name   string
		parent context.Context
		d      time.Duration
		end    func(cancel context.CancelFunc)
		want   error
	}{
		{"by cancel", context.Background(), time.Hour, func(cancel context.CancelFunc) { cancel() }, context.Canceled},
		{"by time", context.Background(), time.Millisecond, func(context.CancelFunc) {}, context.DeadlineExceeded},
		{"with its parent", parent, time.Hour, func(context.CancelFunc) { stop() }, context.Canceled},
		{"before it began", parent, time.Hour, func(context.CancelFunc) {}, context.Canceled},
	} {
		t.Run(try.name, func(t *testing.T) {
			var r Real
			ctx, cancel := WithTimeout(try.parent, &r, try.d)
			heard := make(chan struct{})
			AfterFunc(ctx, func() { close(heard) })
			try.end(cancel)
			<-ctx.Done()
			<-heard
			require.Equal(t, try.want, ctx.Err())
			cancel()
			require.Equal(t, try.want, ctx.Err(), "the first reason stays")
			r.Wait()
		})
	}
}

func TestStoppedAfterFuncDoesNotRun(t *testing.T) {
	var r Real
	ctx, cancel := WithTimeout(context.Background(), &r, time.Hour)
	stop := AfterFunc(ctx, func() { t.Error("it ran") })
	require.True(t, stop())
	require.False(t, stop())
	cancel()
	r.Wait()
}
