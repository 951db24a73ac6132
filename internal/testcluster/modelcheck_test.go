package testcluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// read compares a range through some descriptor.
func (m *fileModel) read() error {
	off, n := m.place()
	m.note("read %d+%d", off, n)
	p := make([]byte, n)
	c, err := m.fd(anyFD).ReadAt(p, int64(off))
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := differsAt(m.want[min(off, len(m.want)):min(off+n, len(m.want))], p[:c]); err != nil {
		return fmt.Errorf("%d bytes at %d of %d: %w", n, off, len(m.want), err)
	}
	return nil
}

// look opens the file through a mount and compares all of it.
func (m *fileModel) look(mount string) error {
	if m.name == "" {
		return nil
	}
	path := filepath.Join(mount, m.name)
	m.note("look at %s", path)
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st.Size() != int64(len(m.want)) {
		return fmt.Errorf("stat of %s shows %d bytes, want %d", path, st.Size(), len(m.want))
	}
	got, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := differsAt(m.want, got); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// both looks through both mounts, after everything was committed, and compares
// times, too.
func (m *fileModel) both() error {
	if m.name == "" {
		return nil
	}
	if err := errors.Join(m.look(m.b), m.look(m.a)); err != nil {
		return err
	}
	a, err := os.Stat(filepath.Join(m.a, m.name))
	if err != nil {
		return err
	}
	b, err := os.Stat(filepath.Join(m.b, m.name))
	if err != nil {
		return err
	}
	if !a.ModTime().Equal(b.ModTime()) {
		return fmt.Errorf("%s was modified at %s, or at %s on the other mount", m.name, a.ModTime(), b.ModTime())
	}
	return nil
}

func (m *fileModel) stat() error {
	st, err := m.fd(anyFD).Stat()
	if err != nil {
		return err
	}
	if st.Size() != int64(len(m.want)) {
		return fmt.Errorf("fstat shows %d bytes, want %d", st.Size(), len(m.want))
	}
	return nil
}

// seek checks that all before the next data is zeros.
func (m *fileModel) seek() error {
	off := m.rng.IntN(len(m.want) + 1)
	m.note("seek data from %d", off)
	data, err := unix.Seek(int(m.fd(atOffset).Fd()), int64(off), unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		data = int64(len(m.want))
	case err != nil:
		return err
	case data < int64(off) || data >= int64(len(m.want)):
		return fmt.Errorf("data at %d of %d, from %d on", data, len(m.want), off)
	}
	for i := off; i < int(data); i++ {
		if m.want[i] != 0 {
			return fmt.Errorf("data at %d, from %d on, but there is some at %d", data, off, i)
		}
	}
	return nil
}

// window draws a range inside the file and where its first page begins.
func (m *fileModel) window() (page, off, n int) {
	off = m.rng.IntN(len(m.want))
	n = 1 + m.rng.IntN(min(len(m.want)-off, 1<<(3+m.rng.IntN(17))))
	return off &^ 4095, off, n
}

// store writes a range through a new mapping and syncs it.
func (m *fileModel) store() error {
	if len(m.want) == 0 {
		return nil
	}
	page, off, n := m.window()
	p := m.bytes(n)
	m.note("store %d+%d through a new mapping", off, n)
	mem, err := unix.Mmap(int(m.fd(writable).Fd()), int64(page), off+n-page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	if err := differsAt(m.want[off:off+n], mem[off-page:]); err != nil {
		return fmt.Errorf("before the store to %d+%d: %w", off, n, err)
	}
	copy(mem[off-page:], p)
	copy(m.want[off:], p)
	return errors.Join(unix.Msync(mem, unix.MS_SYNC), unix.Munmap(mem))
}

// storeLong stores through a mapping that stays while other things happen.
func (m *fileModel) storeLong() error {
	if len(m.want) == 0 {
		return nil
	}
	if m.mem == nil {
		mem, err := unix.Mmap(int(m.fd(writable).Fd()), 0, len(m.want), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		m.mem = mem
	}
	off := m.rng.IntN(len(m.mem))
	n := 1 + m.rng.IntN(min(len(m.mem)-off, 1<<(3+m.rng.IntN(15))))
	m.note("store %d+%d through the long mapping of %d", off, n, len(m.mem))
	if err := differsAt(m.want[off:off+n], m.mem[off:off+n]); err != nil {
		return fmt.Errorf("the long mapping at %d+%d: %w", off, n, err)
	}
	p := m.bytes(n)
	copy(m.mem[off:], p)
	copy(m.want[off:], p)
	return unix.Msync(m.mem, unix.MS_SYNC)
}

func (m *fileModel) unmap() error {
	mem := m.mem
	m.mem = nil
	if mem == nil {
		return nil
	}
	return unix.Munmap(mem)
}

// readMapped compares a range through a new mapping.
func (m *fileModel) readMapped() error {
	if len(m.want) == 0 {
		return nil
	}
	page, off, n := m.window()
	m.note("read %d+%d through a new mapping", off, n)
	mem, err := unix.Mmap(int(m.fd(anyFD).Fd()), int64(page), off+n-page, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	err = differsAt(m.want[off:off+n], mem[off-page:])
	if err != nil {
		err = fmt.Errorf("the mapping at %d+%d: %w", off, n, err)
	}
	return errors.Join(err, unix.Munmap(mem))
}
