package simcluster

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var ctx = context.Background()

// save writes a file through a mount and closes it.
func save(m *Mount, name string, data []byte) (ids.Ino, error) {
	var e api.Entry
	err := m.Meta.Do(ctx, &api.Create{
		Parent: ids.RootIno, Name: []byte(name), Mode: api.ModeRegular | 0o644, Exclusive: true, Open: true,
	}, &e)
	if err != nil {
		return 0, err
	}
	h := m.Engine.OpenCreated(e.Attr, file.OpenFlags{Write: true})
	defer h.Release()
	if _, err := h.WriteAt(ctx, data, 0, file.WriteFlags{}); err != nil {
		return 0, err
	}
	return e.Attr.Ino, h.Flush(ctx)
}

func load(m *Mount, ino ids.Ino) ([]byte, error) {
	h, err := m.Engine.Open(ctx, ino, file.OpenFlags{})
	if err != nil {
		return nil, err
	}
	defer h.Release()
	data := make([]byte, h.Attr().Size)
	n, err := h.ReadAt(ctx, data, 0)
	return data[:n], err
}

// scenario saves through one mount and loads through another, over the crash of
// what may crash.
func scenario(c *Cluster) error {
	if err := c.Boot(); err != nil {
		return err
	}
	a, err := c.Mount("a")
	if err != nil {
		return err
	}
	b, err := c.Mount("b")
	if err != nil {
		return err
	}
	data := make([]byte, 900_000)
	for i := range data {
		data[i] = byte(c.World.Uint64())
	}
	ino, err := save(a, "file", data)
	if err != nil {
		return err
	}
	c.CrashChunk(1)
	c.CrashChunk(4)
	c.CrashMeta(0)
	if err := c.RestartMeta(0); err != nil {
		return err
	}
	got, err := load(b, ino)
	if err != nil {
		return err
	}
	if !bytes.Equal(data, got) {
		c.violate("other bytes")
	}
	c.World.Trace("read %d bytes", len(got))
	for _, i := range []int{1, 4} {
		if err := c.RestartChunk(i); err != nil {
			return err
		}
	}
	c.World.Sleep(20 * time.Second)
	_, err = c.Check()
	return err
}

func run(t *testing.T, seed uint64, cfg Config) []string {
	c := New(seed, cfg)
	defer c.Close()
	var lines []string
	c.World.OnTrace(func(line string) { lines = append(lines, line) })
	c.World.OnStep(func(line string) { lines = append(lines, line) })
	require.NoError(t, c.Run(time.Hour, func() error { return scenario(c) }))
	return lines
}

func TestSaveAndLoadOverCrashes(t *testing.T) {
	for _, metas := range []int{1, 3} {
		a, b := run(t, 1, Config{Metas: metas}), run(t, 1, Config{Metas: metas})
		for i := range min(len(a), len(b)) {
			require.Equal(t, a[i], b[i], "after %q", a[max(0, i-5):i])
		}
		require.Len(t, b, len(a))
	}
}
