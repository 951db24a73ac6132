package server_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// sink is a store that throws puts away, so that a benchmark sees the protocol alone.
type sink struct{ *fakeStore }

func (sink) Put(ids.ChunkKey, uint32, []byte, []uint64) error { return nil }

func cpuSeconds() float64 {
	var ru unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &ru)
	return float64(ru.Utime.Sec+ru.Stime.Sec) + float64(ru.Utime.Usec+ru.Stime.Usec)/1e6
}

// pipeline keeps depth requests in flight until n are done.
func pipeline(b *testing.B, n, depth int, start func(slot, i int, done func(*wire.Response, error))) {
	free := make(chan int, depth)
	for i := range depth {
		free <- i
	}
	for i := range n {
		slot := <-free
		start(slot, i, func(r *wire.Response, err error) {
			if err != nil || r.Err() != nil {
				b.Error(err, r)
			}
			free <- slot
		})
	}
	for range depth {
		<-free
	}
}

func report(b *testing.B, cpu float64) {
	b.ReportMetric((cpuSeconds()-cpu)/(float64(b.N)*mib/1e9), "cpu-s/GB")
}

// BenchmarkPut sends 1 MiB puts and verifies them, both ends in this process.
func BenchmarkPut(b *testing.B) {
	bd := newBedOf(b, bedConfig{}, sink{newFake()})
	tr := newTransport(b, transport.Config{})
	data := pattern(mib, 1)
	must(b, tr, bd.addr, openReq(1, ckey(1), 2*mib))
	req := putReq(1, ckey(1), 0, data)
	b.SetBytes(mib)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuSeconds()
	pipeline(b, b.N, 8, func(_, _ int, done func(*wire.Response, error)) {
		r := *req
		tr.Send(bd.addr, &r, done)
	})
	report(b, cpu)
}

// BenchmarkRead reads 1 MiB from the page cache, with sendfile and without.
func BenchmarkRead(b *testing.B) {
	for name, no := range map[string]bool{"sendfile": false, "memory": true} {
		b.Run(name, func(b *testing.B) {
			store := newFake()
			store.file = tempFile(b)
			bd := newBedOf(b, bedConfig{shell: server.ShellConfig{NoSendfile: no}}, store)
			tr := newTransport(b, transport.Config{})
			data := pattern(4*mib, 1)
			require.NoError(b, writeOver(tr, bd.addr, 1, ckey(1), data))
			const depth = 8
			var dst [depth][]byte
			for i := range dst {
				dst[i] = make([]byte, mib)
			}
			b.SetBytes(mib)
			b.ReportAllocs()
			b.ResetTimer()
			cpu := cpuSeconds()
			pipeline(b, b.N, depth, func(slot, i int, done func(*wire.Response, error)) {
				req := readReq(1, ckey(1), i%4*mib, mib)
				req.Dst = dst[slot]
				tr.Send(bd.addr, req, done)
			})
			report(b, cpu)
		})
	}
}
