package server

import (
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// writer sends the replies of one connection. What waits together leaves with
// one system call; Conn bounds how much that can be.
type writer struct {
	stream net.Conn
	raw    syscall.RawConn // nil when sendfile cannot be used
	wake   chan struct{}
	mu     struct {
		sync.Mutex
		queue   []*Reply
		stopped bool
	}

	// Of the goroutine in run.
	heads []byte
	ends  []int
	bufs  net.Buffers
}

func newWriter(stream net.Conn, raw syscall.RawConn) *writer {
	return &writer{stream: stream, raw: raw, wake: make(chan struct{}, 1)}
}

// push queues a reply; it never blocks.
func (w *writer) push(r *Reply) {
	if r.Op == wire.OpCancel {
		r.Release()
		return
	}
	w.mu.Lock()
	stopped := w.mu.stopped
	if !stopped {
		w.mu.queue = append(w.mu.queue, r)
	}
	w.mu.Unlock()
	if stopped {
		r.Release()
		return
	}
	w.signal()
}

func (w *writer) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// stop ends run; what is still queued is released unsent.
func (w *writer) stop() {
	w.mu.Lock()
	w.mu.stopped = true
	w.mu.Unlock()
	w.signal()
}

// next waits for replies; none when stopped.
func (w *writer) next() []*Reply {
	for {
		w.mu.Lock()
		batch, stopped := w.mu.queue, w.mu.stopped
		w.mu.queue = nil
		w.mu.Unlock()
		if len(batch) > 0 || stopped {
			return batch
		}
		<-w.wake
	}
}

// run sends until stop or an error; either way every reply is released.
func (w *writer) run() error {
	var failed error
	for {
		batch := w.next()
		if len(batch) == 0 {
			return failed
		}
		for len(batch) > 0 {
			n := w.span(batch)
			if failed == nil {
				failed = w.send(batch[:n])
			}
			for _, r := range batch[:n] {
				r.Release()
			}
			batch = batch[n:]
		}
		if failed != nil {
			w.stop() // from here on push releases
		}
	}
}

// span is how many replies leave together: those up to the first with a file.
func (w *writer) span(batch []*Reply) int {
	for i, r := range batch {
		if r.File != nil {
			return i + 1
		}
		if i+1 == maxBatchReplies {
			return i + 1
		}
	}
	return len(batch)
}

// send writes replies, of which only the last may come from a file.
func (w *writer) send(batch []*Reply) error {
	if err := w.stream.SetWriteDeadline(time.Now().Add(writeBound)); err != nil {
		return err
	}
	w.heads, w.ends = w.heads[:0], w.ends[:0]
	for _, r := range batch {
		var err error
		w.heads, err = wire.AppendReply(w.heads, r.Op, r.ID, &r.Response, r.PayloadLen())
		if err != nil {
			short := wire.Response{Status: errkind.Internal, Text: "the reply does not fit a frame"}
			r.Payload, r.File = nil, nil
			if w.heads, err = wire.AppendReply(w.heads, r.Op, r.ID, &short, 0); err != nil {
				return err
			}
		}
		w.ends = append(w.ends, len(w.heads))
	}
	last := batch[len(batch)-1]
	if last.File != nil && len(batch) == 1 {
		if err := sendMore(w.raw, w.heads); err != nil {
			return err
		}
		return sendFile(w.raw, last.File, last.FileOff, last.FileLen)
	}
	w.bufs = w.bufs[:0]
	from := 0
	for i, r := range batch {
		if len(r.Payload) == 0 && i+1 < len(batch) {
			continue // its bytes go out with the next head
		}
		w.bufs = append(w.bufs, w.heads[from:w.ends[i]])
		from = w.ends[i]
		if len(r.Payload) > 0 {
			w.bufs = append(w.bufs, r.Payload)
		}
	}
	all := w.bufs
	_, err := w.bufs.WriteTo(w.stream)
	clear(all)
	w.bufs = all[:0]
	if err == nil && last.File != nil {
		return sendFile(w.raw, last.File, last.FileOff, last.FileLen)
	}
	return err
}
