package testcluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var (
	modelFor  = flag.Duration("model.for", 10*time.Second, "how long the model test of files runs")
	modelSeed = flag.Uint64("model.seed", 0, "seed of the model test; 0: from the clock")
)

// modelMax bounds the file of the model test, bytes.
const modelMax = 12 << 20

// fileModel is one file as an array of bytes, next to the real one, which is
// changed through mount A and looked at through both.
type fileModel struct {
	rng   *rand.Rand
	a, b  string // mount points
	names int    // given so far
	name  string // "" when it is unlinked
	want  []byte
	next  int // where a sequential writer goes on
	fds   []modelFD
	mem   []byte // a mapping that lives for a while, or nil
	log   []string
	steps int
}

type modelFD struct {
	*os.File
	app, ro bool
}

// TestFileModel does random operations on one file after another through one
// mount, and compares it with a model through that mount at any moment and
// through another one after fsync, close and rename (close-to-open).
func TestFileModel(t *testing.T) {
	NeedMount(t)
	seed := *modelSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-model.seed=%d", seed)
	c := New(t, Config{})
	a, b := c.Mount("a"), c.Mount("b")
	m := &fileModel{rng: rand.New(rand.NewPCG(seed, 3)), a: a.Path, b: b.Path}
	if err := m.run(time.Now().Add(*modelFor)); err != nil {
		t.Logf("-model.seed=%d: %v\nthe last operations:\n%s", seed, err, strings.Join(m.log, "\n"))
		t.Fail()
		a.Kill() // or closing the files might hang, too
	}
	m.forget()
	t.Logf("%d operations on %d files", m.steps, m.names)
}

func (m *fileModel) run(end time.Time) error {
	// A store that the file system cannot serve is an error of this test, not a crash.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	if err := m.fresh(); err != nil {
		return err
	}
	for time.Now().Before(end) {
		if err := m.step(); err != nil {
			return fmt.Errorf("step %d: %w", m.steps, err)
		}
		m.steps++
	}
	return m.closeAll()
}

func (m *fileModel) note(format string, args ...any) {
	if m.log = append(m.log, fmt.Sprintf("%d: ", m.steps)+fmt.Sprintf(format, args...)); len(m.log) > 60 {
		m.log = m.log[1:]
	}
}

// modelOp is one operation with how often it comes.
type modelOp struct {
	weight int
	name   string
	do     func(*fileModel) error
}

func modelOps() []modelOp {
	return []modelOp{
		{14, "write", (*fileModel).write},
		{10, "write on", (*fileModel).writeOn},
		{8, "append", (*fileModel).append},
		{6, "truncate", (*fileModel).truncate},
		{6, "punch or zero", (*fileModel).allocate},
		{8, "store", (*fileModel).store},
		{3, "store and sync", (*fileModel).storeLong},
		{16, "read", (*fileModel).read},
		{6, "read a new mapping", (*fileModel).readMapped},
		{4, "read all", func(m *fileModel) error { return m.look(m.a) }},
		{5, "stat", (*fileModel).stat},
		{3, "seek", (*fileModel).seek},
		{8, "fsync", (*fileModel).fsync},
		{4, "close and open", (*fileModel).reopen},
		{2, "rename", (*fileModel).rename},
		{1, "unlink", (*fileModel).unlink},
		{1, "new file", (*fileModel).fresh},
		{2, "pause", func(m *fileModel) error { time.Sleep(time.Duration(m.rng.IntN(300)) * time.Millisecond); return nil }},
	}
}

func (m *fileModel) step() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	ops, total := modelOps(), 0
	for _, o := range ops {
		total += o.weight
	}
	at := m.rng.IntN(total)
	for _, o := range ops {
		if at -= o.weight; at < 0 {
			if err := o.do(m); err != nil {
				return fmt.Errorf("%s: %w", o.name, err)
			}
			break
		}
	}
	return nil
}

func (m *fileModel) bytes(n int) []byte {
	p := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(p[i:], m.rng.Uint64()|0x0101010101010101) // no zeros: they are holes
	}
	return p[:n]
}

// place draws a range, mostly a small one, often aligned to pages, inside the
// file or a little behind it.
func (m *fileModel) place() (off, n int) {
	n = 1 + m.rng.IntN(1<<(3+m.rng.IntN(18)))
	off = m.rng.IntN(min(modelMax-n, len(m.want)+1+m.rng.IntN(1<<m.rng.IntN(21))))
	if m.rng.IntN(3) == 0 {
		off, n = off&^4095, (n+4095)&^4095
	}
	return off, min(n, modelMax-off)
}

// fd draws a descriptor that ok accepts; there is always one of each kind.
func (m *fileModel) fd(ok func(modelFD) bool) modelFD {
	for {
		if f := m.fds[m.rng.IntN(len(m.fds))]; ok(f) {
			return f
		}
	}
}

func anyFD(modelFD) bool       { return true }
func writable(f modelFD) bool  { return !f.ro }
func atOffset(f modelFD) bool  { return !f.ro && !f.app }
func appending(f modelFD) bool { return f.app }

func (m *fileModel) grow(n int) {
	if n > len(m.want) {
		m.want = append(m.want, make([]byte, n-len(m.want))...)
	}
}

func (m *fileModel) write() error {
	off, n := m.place()
	return m.writeAt(off, n)
}

func (m *fileModel) writeOn() error {
	n := 1 + m.rng.IntN(1<<(10+m.rng.IntN(11)))
	if m.next+n > modelMax {
		m.next = 0
	}
	return m.writeAt(m.next, n)
}

func (m *fileModel) writeAt(off, n int) error {
	p := m.bytes(n)
	m.note("write %d+%d", off, n)
	if c, err := m.fd(atOffset).WriteAt(p, int64(off)); err != nil {
		return fmt.Errorf("wrote %d of %d: %w", c, n, err)
	}
	m.grow(off + n)
	copy(m.want[off:], p)
	m.next = off + n
	return nil
}

func (m *fileModel) append() error {
	n := min(1+m.rng.IntN(1<<(3+m.rng.IntN(15))), modelMax-len(m.want))
	p := m.bytes(n)
	m.note("append %d at %d", n, len(m.want))
	if c, err := m.fd(appending).Write(p); err != nil || c != n {
		return fmt.Errorf("appended %d of %d: %w", c, n, err)
	}
	m.want = append(m.want, p...)
	return nil
}

func (m *fileModel) truncate() error {
	size := m.rng.IntN(len(m.want) + 1)
	switch m.rng.IntN(6) {
	case 0:
		size = 0
	case 1, 2:
		size = min(modelMax, len(m.want)+m.rng.IntN(1<<20))
	}
	m.note("truncate %d to %d", len(m.want), size)
	if err := m.unmap(); err != nil {
		return err
	}
	if err := m.fd(writable).Truncate(int64(size)); err != nil {
		return err
	}
	m.grow(size)
	m.want = m.want[:size:size]
	return nil
}

func (m *fileModel) allocate() error {
	off, n := m.place()
	mode := []uint32{
		0, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE,
		unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE,
	}[m.rng.IntN(5)]
	m.note("fallocate %x %d+%d of %d", mode, off, n, len(m.want))
	if err := unix.Fallocate(int(m.fd(writable).Fd()), mode, int64(off), int64(n)); err != nil {
		return err
	}
	if mode&unix.FALLOC_FL_KEEP_SIZE == 0 {
		m.grow(off + n)
	}
	if mode != 0 {
		clear(m.want[min(off, len(m.want)):min(off+n, len(m.want))])
	}
	return nil
}

func (m *fileModel) fsync() error {
	m.note("fsync")
	if err := m.fd(writable).Sync(); err != nil {
		return err
	}
	return m.both()
}

func (m *fileModel) rename() error {
	if m.name == "" {
		return nil
	}
	old := m.name
	m.names++
	m.name = fmt.Sprintf("model%d", m.names)
	m.note("rename %s to %s", old, m.name)
	if err := os.Rename(filepath.Join(m.a, old), filepath.Join(m.a, m.name)); err != nil {
		return err
	}
	if err := gone(filepath.Join(m.b, old)); err != nil {
		return err
	}
	return m.look(m.b)
}

func gone(path string) error {
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is there after it was removed: %w", path, err)
	}
	return nil
}

func (m *fileModel) unlink() error {
	if m.name == "" {
		return nil
	}
	m.note("unlink %s", m.name)
	name := m.name
	m.name = ""
	if err := os.Remove(filepath.Join(m.a, name)); err != nil {
		return err
	}
	return errors.Join(gone(filepath.Join(m.a, name)), gone(filepath.Join(m.b, name)))
}

// fresh goes on with a new file.
func (m *fileModel) fresh() error {
	if err := m.closeAll(); err != nil {
		return err
	}
	if m.name != "" {
		if err := m.unlink(); err != nil {
			return err
		}
	}
	m.names++
	m.name = fmt.Sprintf("model%d", m.names)
	m.want, m.next = nil, 0
	m.note("create %s", m.name)
	f, err := os.OpenFile(filepath.Join(m.a, m.name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	m.fds = append(m.fds, modelFD{File: f})
	return m.open()
}

// open opens descriptors of every kind.
func (m *fileModel) open() error {
	for _, flags := range []int{os.O_RDWR, os.O_RDWR | unix.O_DIRECT, os.O_RDWR | os.O_APPEND, os.O_RDONLY} {
		f, err := os.OpenFile(filepath.Join(m.a, m.name), flags, 0)
		if err != nil {
			return err
		}
		m.fds = append(m.fds, modelFD{File: f, app: flags&os.O_APPEND != 0, ro: flags == os.O_RDONLY})
	}
	return nil
}

func (m *fileModel) reopen() error {
	if m.name == "" {
		return m.fresh()
	}
	if err := m.closeAll(); err != nil {
		return err
	}
	return m.open()
}

// closeAll closes what is open; that is durable, and B sees it.
func (m *fileModel) closeAll() error {
	if len(m.fds) == 0 {
		return nil
	}
	if err := m.unmap(); err != nil {
		return err
	}
	m.note("close")
	for i := range m.fds {
		if err := m.fds[i].Close(); err != nil {
			return err
		}
	}
	m.fds = nil
	return m.both()
}

// forget ends what a failed run left open.
func (m *fileModel) forget() {
	if m.mem != nil {
		_ = unix.Munmap(m.mem)
	}
	for i := range m.fds {
		_ = m.fds[i].Close()
	}
}

func differsAt(want, got []byte) error {
	if bytes.Equal(want, got) {
		return nil
	}
	i := 0
	for i < min(len(want), len(got)) && want[i] == got[i] {
		i++
	}
	return fmt.Errorf("%d bytes, want %d; the first difference is at %d: %x, want %x", len(got), len(want), i, got[i:min(i+8, len(got))], want[i:min(i+8, len(want))])
}
