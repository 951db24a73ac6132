package file_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/meta/api"
)

// step is one operation of the model test; the numbers mean what the kind makes of them.
type step struct {
	kind     string
	off, len int
	handle   int
}

const modelSize = 3 << 20

func drawSteps(t *rapid.T) []step {
	kinds := []string{
		"write", "write", "page", "page", "page", "next", "next", "next", "next", "append", "read", "read",
		"truncate", "punch", "zero", "extend", "flush", "verify", "sleep", "reopen", "seek", "copy", "stat", "rename",
	}
	one := rapid.Custom(func(t *rapid.T) step {
		return step{
			kind:   rapid.SampledFrom(kinds).Draw(t, "kind"),
			off:    rapid.IntRange(0, modelSize).Draw(t, "off"),
			len:    rapid.OneOf(rapid.IntRange(1, 9000), rapid.IntRange(1, 400_000)).Draw(t, "len"),
			handle: rapid.IntRange(0, 1).Draw(t, "handle"),
		}
	})
	return rapid.OneOf(rapid.SliceOfN(one, 1, 40), rapid.SliceOfN(one, 50, 200)).Draw(t, "steps")
}

// model is a file as an array of bytes, next to the engine's.
type model struct {
	a, b  *rig
	ino   ids.Ino
	h     [2]*file.Handle
	bytes []byte
	next  int // where a sequential writer goes on
	seed  uint64
	world *sim.World
}

func (m *model) fill(n int) []byte {
	m.seed++
	return random(m.seed, n)
}

func (m *model) write(s step, off int, fl file.WriteFlags) error {
	p := m.fill(s.len)
	n, err := m.h[s.handle].WriteAt(ctx, p, int64(off), fl)
	if err != nil || n != len(p) {
		return fmt.Errorf("wrote %d of %d: %w", n, len(p), err)
	}
	clear(p[n:])
	if end := off + len(p); end > len(m.bytes) {
		m.bytes = append(m.bytes, make([]byte, end-len(m.bytes))...)
	}
	copy(m.bytes[off:], p)
	m.next = off + len(p)
	return nil
}

func (m *model) zero(lo, hi int) {
	lo, hi = min(lo, len(m.bytes)), min(hi, len(m.bytes))
	clear(m.bytes[lo:hi])
}

func (m *model) resize(n int) {
	if n <= len(m.bytes) {
		m.bytes = m.bytes[:n:n]
		return
	}
	m.bytes = append(m.bytes, make([]byte, n-len(m.bytes))...)
}

func (m *model) do(s step) error {
	h := m.h[s.handle]
	switch s.kind {
	case "write":
		return m.write(s, s.off, file.WriteFlags{})
	case "page":
		s.len = min(s.len, 4096)
		return m.write(s, s.off/4096*4096%(1<<20), file.WriteFlags{KillPriv: true})
	case "next":
		if m.next > modelSize {
			m.next = 0
		}
		return m.write(s, m.next, file.WriteFlags{})
	case "append":
		return m.write(s, len(m.bytes), file.WriteFlags{Append: true})
	case "read":
		return m.read(h, s.off, s.len)
	case "truncate":
		m.resize(s.off)
		a, err := m.a.Truncate(ctx, m.ino, int64(s.off))
		if err == nil && a.Size != uint64(s.off) {
			err = fmt.Errorf("size %d after truncation to %d", a.Size, s.off)
		}
		return err
	case "punch":
		m.zero(s.off, s.off+s.len)
		return h.Allocate(ctx, file.AllocPunch, int64(s.off), int64(s.len))
	case "zero":
		m.resize(max(len(m.bytes), s.off+s.len))
		m.zero(s.off, s.off+s.len)
		return h.Allocate(ctx, file.AllocZero, int64(s.off), int64(s.len))
	case "extend":
		m.resize(max(len(m.bytes), s.off+s.len))
		return h.Allocate(ctx, file.AllocExtend, int64(s.off), int64(s.len))
	case "flush":
		return h.Flush(ctx)
	case "verify":
		return m.verify(s)
	case "sleep":
		m.world.Sleep(time.Duration(s.len) * 20 * time.Microsecond)
	case "reopen":
		h.Release()
		var err error
		m.h[s.handle], err = m.a.Open(ctx, m.ino, file.OpenFlags{Write: true})
		return err
	case "seek":
		return m.seek(h, s.off)
	case "copy":
		return m.copy(s)
	case "stat":
		return m.stat()
	case "rename":
		return m.a.FlushIno(ctx, m.ino)
	}
	return nil
}

func (m *model) read(h *file.Handle, off, n int) error {
	got := make([]byte, n)
	c, err := h.ReadAt(ctx, got, int64(off))
	if err != nil {
		return err
	}
	want := m.bytes[min(off, len(m.bytes)):min(off+n, len(m.bytes))]
	if !bytes.Equal(want, got[:c]) {
		return fmt.Errorf("read %d+%d of %d: %d bytes, want %d, first difference at %d", off, n, len(m.bytes), c, len(want), off+differ(want, got[:c]))
	}
	return nil
}

// stat looks at the file as the kernel would.
func (m *model) stat() error {
	var e api.Entry
	if err := m.a.s.Do(ctx, &api.GetAttr{Ino: m.ino}, &e); err != nil {
		return err
	}
	m.a.Overlay(&e.Attr)
	if e.Attr.Size != uint64(len(m.bytes)) {
		return fmt.Errorf("stat shows %d bytes, want %d", e.Attr.Size, len(m.bytes))
	}
	return nil
}

// splitLarge refuses commits of more than limit ranges, as the metadata
// service does when they touch too many records.
func splitLarge(limit int) func(api.Request) error {
	return func(r api.Request) error {
		c, ok := r.(*api.Commit)
		if !ok {
			return nil
		}
		ranges := 0
		for _, op := range c.Ops {
			if op.Kind == api.OpWrite || op.Kind == api.OpPunch {
				ranges++
			}
		}
		if ranges > limit {
			return errkind.Split.Wrap("%d ranges", ranges)
		}
		return nil
	}
}

// verify closes on one mount and reads on the other.
func (m *model) verify(s step) error {
	if err := m.h[s.handle].Flush(ctx); err != nil {
		return err
	}
	h, err := m.b.Open(ctx, m.ino, file.OpenFlags{})
	if err != nil {
		return err
	}
	defer h.Release()
	if a := h.Attr(); a.Size != uint64(len(m.bytes)) {
		return fmt.Errorf("size %d on the other mount, want %d", a.Size, len(m.bytes))
	}
	got, err := readAll(h, len(m.bytes))
	if err == nil && !bytes.Equal(m.bytes, got) {
		err = fmt.Errorf("the other mount differs at %d of %d", differ(m.bytes, got), len(m.bytes))
	}
	return err
}

// seek checks that everything between two data ranges is zeros.
func (m *model) seek(h *file.Handle, off int) error {
	data, err := h.Seek(ctx, int64(off), file.SeekData)
	end := int(data)
	if errkind.Of(err) == errkind.NoData {
		end = len(m.bytes)
	} else if err != nil {
		return err
	}
	for i := off; i < min(end, len(m.bytes)); i++ {
		if m.bytes[i] != 0 {
			return fmt.Errorf("seek from %d finds data at %d, but there is some at %d", off, end, i)
		}
	}
	if off < len(m.bytes) {
		if hole, err := h.Seek(ctx, int64(off), file.SeekHole); err != nil || hole < int64(off) || hole > int64(len(m.bytes)) {
			return fmt.Errorf("hole from %d at %d of %d: %w", off, hole, len(m.bytes), err)
		}
	}
	return nil
}

func (m *model) copy(s step) error {
	to := s.off/2 + s.len
	n, err := m.a.CopyRange(ctx, m.h[0], int64(to), m.h[1], int64(s.off/2), int64(s.len))
	if err != nil {
		return err
	}
	part := bytes.Clone(m.bytes[min(s.off/2, len(m.bytes)):min(s.off/2+s.len, len(m.bytes))])
	if int(n) != len(part) {
		return fmt.Errorf("copied %d, want %d", n, len(part))
	}
	if n > 0 {
		m.resize(max(len(m.bytes), to+len(part)))
		copy(m.bytes[to:], part)
	}
	return nil
}

func (m *model) run(steps []step) error {
	for i, s := range steps {
		if err := m.do(s); err != nil {
			return fmt.Errorf("step %d %+v: %w", i, s, err)
		}
	}
	if err := m.verify(step{}); err != nil {
		return err
	}
	m.h[0].Release()
	m.h[1].Release()
	if err := m.a.Close(ctx); err != nil {
		return err
	}
	return m.b.Close(ctx)
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := drawSteps(t)
		world := sim.NewWorld(rapid.Uint64().Draw(t, "seed"))
		defer world.Close()
		v := newService(t, world)
		blocks := newBlocks(world)
		if rapid.Bool().Draw(t, "faults") {
			blocks.faults = faults{refuse: 15, deny: 10, narrow: 30, spill: 25, maxDelay: 30 * time.Millisecond}
		}
		budget := rapid.SampledFrom([]int64{1, 4 << 20, 64 << 20}).Draw(t, "budget")
		m := &model{world: world, seed: 1}
		s := newSession(t, v, 1)
		attr := s.create(t, "f")
		m.ino = attr.Ino
		if rapid.Bool().Draw(t, "split") {
			s.before = splitLarge(3)
		}
		m.a = newEngine(s, blocks, world, budget)
		m.b = newEngine(newSession(t, v, 2), blocks, world, budget)
		m.h[0] = m.a.OpenCreated(attr, file.OpenFlags{Write: true})
		m.h[1] = m.a.OpenCreated(attr, file.OpenFlags{Write: true})
		var err error
		done := false
		world.Go("test", func() {
			err = m.run(steps)
			done = true
		})
		require.NoError(t, world.Run(time.Hour, func() bool { return done }))
		require.NoError(t, err)
		require.Empty(t, blocks.violations())
		require.Zero(t, blocks.openWriters())
		peak, limit, used := m.a.WriteMemory()
		require.LessOrEqual(t, peak, limit)
		require.Zero(t, used)
		require.Zero(t, m.a.OutstandingIDs())
		require.Zero(t, m.a.Inodes())
	})
}
