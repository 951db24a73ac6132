package ranks

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Job describes what every rank of one run does.
type Job struct {
	Dir   string
	Size  int64 // bytes a rank
	Block int   // bytes a write or read, a multiple of 4 KiB
	Fsync bool
	Files int  // small-file work: files a rank
	Own   bool // small-file work: a directory for each rank
}

// Result is what one rank did.
type Result struct {
	Rank    int
	Bytes   int64
	Ops     int64
	Seconds float64
	// Longest is the longest single call, in seconds, and LongestCall its name.
	Longest     float64
	LongestCall string
}

// timed runs one call and keeps the longest.
func (r *Result) timed(name string, call func() error) error {
	start := time.Now()
	err := call()
	if d := time.Since(start).Seconds(); d > r.Longest {
		r.Longest, r.LongestCall = d, name
	}
	if err != nil {
		return fmt.Errorf("rank %d: %s: %w", r.Rank, name, err)
	}
	return nil
}

// Shard is the file of one rank below dir.
func Shard(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("__%d_0.distcp", rank))
}

// aligned returns a page-aligned buffer: the kernel splits a write from an
// unaligned one into two requests.
func aligned(n int) []byte {
	raw := make([]byte, n+stampEvery)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(raw))) % stampEvery)
	return raw[skip : skip+n : skip+n]
}

// Save writes the rank's shard.
func Save(j Job, rank int) (Result, error) {
	r := Result{Rank: rank}
	p, buf := NewPattern(uint64(rank)), aligned(j.Block)
	start := time.Now()
	var f *os.File
	err := r.timed("create", func() (err error) {
		f, err = os.Create(Shard(j.Dir, rank))
		return err
	})
	if err != nil {
		return r, err
	}
	defer f.Close()
	for off := int64(0); off < j.Size; off += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), j.Size-off)]
		p.Fill(b, off)
		if err := r.timed("write", func() error { _, err := f.Write(b); return err }); err != nil {
			return r, err
		}
		r.Bytes += int64(len(b))
	}
	if j.Fsync {
		if err := r.timed("fsync", f.Sync); err != nil {
			return r, err
		}
	}
	if err := r.timed("close", f.Close); err != nil {
		return r, err
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// Load reads the rank's shard back and checks every byte.
func Load(j Job, rank int) (Result, error) {
	r := Result{Rank: rank}
	p, buf := NewPattern(uint64(rank)), aligned(j.Block)
	start := time.Now()
	var f *os.File
	err := r.timed("open", func() (err error) {
		f, err = os.Open(Shard(j.Dir, rank))
		return err
	})
	if err != nil {
		return r, err
	}
	defer f.Close()
	for off := int64(0); ; {
		var n int
		err := r.timed("read", func() (err error) {
			n, err = f.ReadAt(buf, off)
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		})
		if err != nil {
			return r, err
		}
		if n == 0 {
			break
		}
		if err := p.Check(buf[:n], off); err != nil {
			return r, err
		}
		off += int64(n)
		r.Bytes += int64(n)
	}
	if r.Bytes != j.Size {
		return r, fmt.Errorf("rank %d: shard has %d bytes, want %d", rank, r.Bytes, j.Size)
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// Small creates, stats and unlinks files of 4 KiB: three operations a file.
func Small(j Job, rank int) (Result, error) {
	r := Result{Rank: rank}
	dir := j.Dir
	if j.Own {
		dir = filepath.Join(dir, fmt.Sprintf("rank%d", rank))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return r, err
		}
	}
	buf := aligned(4096)
	NewPattern(uint64(rank)).Fill(buf, 0)
	start := time.Now()
	for i := range j.Files {
		if err := r.small(filepath.Join(dir, fmt.Sprintf("f%d.%d", rank, i)), buf); err != nil {
			return r, err
		}
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

func (r *Result) small(path string, buf []byte) error {
	err := r.timed("create+write+close", func() error {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		if _, err := f.Write(buf); err != nil {
			return errors.Join(err, f.Close())
		}
		return f.Close()
	})
	if err != nil {
		return err
	}
	err = r.timed("stat", func() error {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		if st.Size != int64(len(buf)) {
			return fmt.Errorf("%s has %d bytes, want %d", path, st.Size, len(buf))
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.Ops += 3
	return r.timed("unlink", func() error { return unix.Unlink(path) })
}
