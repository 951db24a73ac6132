package transport_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var cluster = ids.UUID{4, 5, 6}

// script is a server that does just what a test tells it.
type script struct {
	t    *testing.T
	lis  net.Listener
	boot uint64
	wait sync.WaitGroup
	// serve runs on each connection after the handshake.
	serve func(c *scripted)
	mu    struct {
		sync.Mutex
		conns []net.Conn
	}
}

// scripted is the script's end of a connection.
type scripted struct {
	net.Conn
	t    *testing.T
	r    *wire.Reader
	kind wire.Kind
}

func newScript(t *testing.T, credit uint32, serve func(c *scripted)) *script {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &script{t: t, lis: lis, boot: 1, serve: serve}
	s.wait.Go(func() {
		for {
			nc, err := lis.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.mu.conns = append(s.mu.conns, nc)
			boot := s.boot
			s.mu.Unlock()
			s.wait.Go(func() {
				defer nc.Close()
				var h wire.Hello
				if wire.ReadHello(nc, &h) != nil {
					return
				}
				w := wire.Answer(&h, wire.Welcome{Cluster: cluster, Boot: boot, StoreCredit: credit})
				if wire.WriteHello(nc, &w) == nil {
					s.serve(&scripted{nc, t, wire.NewReader(nc), h.Kind})
				}
			})
		}
	})
	t.Cleanup(func() {
		lis.Close()
		s.mu.Lock()
		for _, nc := range s.mu.conns {
			nc.Close()
		}
		s.mu.Unlock()
		s.wait.Wait()
	})
	return s
}

func (s *script) addr() string { return s.lis.Addr().String() }

// next takes a request off the connection; false at its end.
func (c *scripted) next() (wire.Header, *wire.Request, bool) {
	h, err := c.r.Header()
	if err != nil {
		return h, nil, false
	}
	body, err := c.r.Body(&h)
	if err != nil {
		return h, nil, false
	}
	req, err := wire.DecodeRequest(&h, body)
	if err != nil {
		c.t.Errorf("request: %v", err)
		return h, nil, false
	}
	return h, req, c.r.Discard(int(h.PayloadLen)) == nil
}

// answer replies OK, with the payload.
func (c *scripted) answer(op wire.Op, id uint64, payload []byte) {
	body, _ := wire.ReplyBody(op, errkind.OK)
	p, err := wire.AppendReply(nil, op, id, &wire.Response{Body: body}, len(payload))
	if err != nil {
		c.t.Errorf("reply: %v", err)
	}
	_, _ = c.Write(append(p, payload...))
}

// echo answers every request.
func echo(c *scripted) {
	for {
		h, _, ok := c.next()
		if !ok {
			return
		}
		if h.Op != wire.OpCancel {
			c.answer(h.Op, h.Request, nil)
		}
	}
}

// hang waits until the other side closes the connection.
func hang(c *scripted) { _, _ = io.Copy(io.Discard, c) }

func newTransport(t *testing.T, cfg transport.Config) *transport.Transport {
	cfg.Cluster, cfg.Sched = cluster, new(sched.Real)
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = time.Minute
	}
	tr := transport.New(cfg)
	t.Cleanup(tr.Close)
	return tr
}

type outcome struct {
	resp *wire.Response
	err  error
}

func send(tr *transport.Transport, addr string, req *wire.Request) (<-chan outcome, func()) {
	ch := make(chan outcome, 2) // a second done would show
	cancel := tr.Send(addr, req, func(r *wire.Response, err error) { ch <- outcome{r, err} })
	return ch, cancel
}

func ping() *wire.Request { return &wire.Request{Op: wire.OpPing} }

func put(n int) *wire.Request {
	return &wire.Request{Op: wire.OpPut, Body: &wire.Put{Disk: 1}, Payload: [][]byte{make([]byte, n)}}
}

func store(n int) *wire.Request {
	return &wire.Request{Op: wire.OpStore, Body: &wire.Store{}, Payload: [][]byte{make([]byte, n)}}
}

// TestDoneIsNeverOnTheCallersStack: a caller may hold its lock in Send and in
// cancel, and done comes once, whoever wins.
func TestDoneIsNeverOnTheCallersStack(t *testing.T) {
	s := newScript(t, 0, echo)
	tr := newTransport(t, transport.Config{MaxQueued: 2})
	var mu sync.Mutex
	counts := make([]int, 200)
	var all sync.WaitGroup
	for i := range counts {
		all.Add(1)
		mu.Lock()
		cancel := tr.Send(s.addr(), ping(), func(r *wire.Response, err error) {
			mu.Lock()
			defer mu.Unlock()
			counts[i]++
			if counts[i] == 1 {
				all.Done()
			}
		})
		if i%2 == 0 {
			cancel()
			cancel()
		}
		mu.Unlock()
	}
	all.Wait()
	tr.Close()
	mu.Lock()
	defer mu.Unlock()
	for _, n := range counts {
		require.Equal(t, 1, n)
	}
}

// TestAbandonedWriteClosesTheConnection: the server does not read; after done
// the buffer must not be touched, so the frame cannot be finished (rule 25).
func TestAbandonedWriteClosesTheConnection(t *testing.T) {
	cut := make(chan struct{})
	release := make(chan struct{})
	s := newScript(t, 0, func(c *scripted) {
		<-release
		hang(c)
		close(cut)
	})
	tr := newTransport(t, transport.Config{})
	var outs []<-chan outcome
	var cancels []func()
	for range 32 { // far more than both socket buffers hold
		out, cancel := send(tr, s.addr(), put(wire.MaxPayload))
		outs, cancels = append(outs, out), append(cancels, cancel)
	}
	time.Sleep(50 * time.Millisecond) // let the socket fill
	for _, c := range cancels {
		c()
	}
	for _, out := range outs {
		require.Error(t, (<-out).err)
	}
	close(release)
	<-cut
}

// TestAbandonedRead: half of a reply has come; the rest must not land in Dst
// once done was called.
func TestAbandonedRead(t *testing.T) {
	half, rest := make(chan struct{}), make(chan struct{})
	s := newScript(t, 0, func(c *scripted) {
		h, _, _ := c.next()
		p, err := wire.AppendReply(nil, h.Op, h.Request, &wire.Response{Body: &wire.Data{}}, 1<<20)
		if err != nil {
			c.t.Error(err)
		}
		_, _ = c.Write(append(p, bytes.Repeat([]byte{7}, 1<<19)...))
		close(half)
		<-rest
		_, _ = c.Write(bytes.Repeat([]byte{8}, 1<<19))
	})
	tr := newTransport(t, transport.Config{})
	req := &wire.Request{Op: wire.OpRead, Body: &wire.Read{Disk: 1, Len: 1 << 20}, Dst: make([]byte, 1<<20)}
	out, cancel := send(tr, s.addr(), req)
	<-half
	time.Sleep(20 * time.Millisecond) // so that it is being received
	cancel()
	o := <-out
	require.ErrorIs(t, o.err, errkind.Interrupted)
	for i := range req.Dst {
		req.Dst[i] = 1 // the caller's again; the race detector watches
	}
	close(rest)
	time.Sleep(20 * time.Millisecond)
	require.NotContains(t, req.Dst, byte(8))
}

func TestSilentServerIsGivenUp(t *testing.T) {
	s := newScript(t, 0, hang)
	tr := newTransport(t, transport.Config{DeadTimeout: 3 * time.Second})
	out, _ := send(tr, s.addr(), ping())
	o := <-out
	require.ErrorIs(t, o.err, errkind.Unavailable)
	require.ErrorContains(t, o.err, "silent")
	out, _ = send(tr, s.addr(), &wire.Request{Op: wire.OpPing, Left: 20 * time.Millisecond})
	require.ErrorIs(t, (<-out).err, errkind.Timeout)
}

// TestDownServerFailsFast: while a server is known to be down nothing is dialled.
func TestDownServerFailsFast(t *testing.T) {
	var mu sync.Mutex
	dials := 0
	tr := newTransport(t, transport.Config{BackoffMax: time.Hour, Dial: func(context.Context, string) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		dials++
		return nil, io.ErrClosedPipe
	}})
	for range 3 {
		out, _ := send(tr, "server:1", ping())
		require.ErrorIs(t, (<-out).err, errkind.Unavailable)
	}
	require.Eventually(t, func() bool { // the back-off ends, and grows
		out, _ := send(tr, "server:1", ping())
		<-out
		mu.Lock()
		defer mu.Unlock()
		return dials >= 3
	}, 30*time.Second, time.Millisecond)
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return dials
	}
	before := count()
	for range 50 {
		out, _ := send(tr, "server:1", put(1<<20))
		require.ErrorIs(t, (<-out).err, errkind.Unavailable)
	}
	require.LessOrEqual(t, count(), before+3)
}

func TestIdleConnectionIsClosed(t *testing.T) {
	var mu sync.Mutex
	conns := 0
	ended := make(chan struct{}, 10)
	s := newScript(t, 0, func(c *scripted) {
		mu.Lock()
		conns++
		mu.Unlock()
		echo(c)
		ended <- struct{}{}
	})
	tr := newTransport(t, transport.Config{IdleTimeout: time.Millisecond})
	for range 2 {
		out, _ := send(tr, s.addr(), ping())
		require.NoError(t, (<-out).err)
		<-ended
	}
	require.Equal(t, 2, conns)
}

// TestStoreCredit: no more bytes of small chunks are in flight than the server
// allows, and a cancelled one counts until it is answered.
func TestStoreCredit(t *testing.T) {
	step, got := make(chan struct{}), make(chan uint64, 100)
	s := newScript(t, 128<<10, func(c *scripted) {
		if c.kind == wire.KindBulk {
			hang(c)
			return
		}
		var mu sync.Mutex
		var open []uint64
		answers, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(answers)
			for {
				select {
				case <-step:
				case <-ended:
					return
				}
				mu.Lock()
				id := open[0]
				open = open[1:]
				mu.Unlock()
				c.answer(wire.OpStore, id, nil)
			}
		}()
		defer func() { close(ended); <-answers }()
		for {
			h, req, ok := c.next()
			if !ok {
				return
			}
			if req.Op == wire.OpCancel {
				continue
			}
			mu.Lock()
			open = append(open, h.Request)
			if len(open) > 2 {
				c.t.Errorf("%d stores of 64 KiB are in flight", len(open))
			}
			mu.Unlock()
			got <- h.Request
		}
	})
	tr := newTransport(t, transport.Config{})
	out, _ := send(tr, s.addr(), store(256<<10)) // bulk
	require.ErrorIs(t, (<-out).err, errkind.TooBig)
	var outs []<-chan outcome
	for i := range 6 {
		out, cancel := send(tr, s.addr(), store(64<<10))
		outs = append(outs, out)
		if i == 0 {
			<-got
			cancel()
		}
	}
	<-got // the second; the third waits for an answer
	for range 4 {
		step <- struct{}{}
		<-got
	}
	step <- struct{}{}
	step <- struct{}{}
	for i, out := range outs {
		o := <-out
		require.Equal(t, i == 0, o.err != nil, "store %d: %v", i, o.err)
	}
}

func TestQueueIsBounded(t *testing.T) {
	s := newScript(t, 0, hang)
	tr := newTransport(t, transport.Config{MaxQueued: 5, MaxPending: 5})
	full := make(chan struct{})
	var once sync.Once
	for range 20 {
		tr.Send(s.addr(), ping(), func(_ *wire.Response, err error) {
			if errkind.Of(err) == errkind.Busy {
				once.Do(func() { close(full) })
			}
		})
	}
	<-full
}

// TestBadReplies end the connection; no request gets another's answer.
func TestBadReplies(t *testing.T) {
	for name, bad := range map[string]func(c *scripted, h wire.Header){
		"unknown request": func(c *scripted, h wire.Header) { c.answer(h.Op, h.Request+7, nil) },
		"other operation": func(c *scripted, h wire.Header) { c.answer(wire.OpAbort, h.Request, nil) },
		"garbage":         func(c *scripted, _ wire.Header) { _, _ = c.Write(bytes.Repeat([]byte("no"), 100)) },
		"half a header":   func(c *scripted, h wire.Header) { _, _ = c.Write((&wire.Header{}).Append(nil)[:20]) },
		"a request":       func(c *scripted, h wire.Header) { _, _ = c.Write((&wire.Header{Version: 1, Op: h.Op}).Append(nil)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t, 0, func(c *scripted) {
				if h, _, ok := c.next(); ok {
					bad(c, h)
				}
			})
			tr := newTransport(t, transport.Config{})
			out, _ := send(tr, s.addr(), ping())
			require.ErrorIs(t, (<-out).err, errkind.Unavailable)
		})
	}
}

// TestRestartEndsTheOtherConnection: what was sent to the life before fails at once.
func TestRestartEndsTheOtherConnection(t *testing.T) {
	s := newScript(t, 0, nil)
	s.serve = func(c *scripted) {
		if c.kind == wire.KindBulk {
			hang(c)
		} else {
			echo(c)
		}
	}
	restarts := make(chan uint64, 1)
	tr := newTransport(t, transport.Config{OnRestart: func(_ string, boot uint64) { restarts <- boot }})
	bulk, _ := send(tr, s.addr(), put(1<<20))
	require.Eventually(t, func() bool { _, known := tr.BootID(s.addr()); return known }, 10*time.Second, time.Millisecond)
	s.mu.Lock()
	s.boot = 2
	s.mu.Unlock()
	out, _ := send(tr, s.addr(), ping())
	require.NoError(t, (<-out).err)
	require.Equal(t, uint64(2), <-restarts)
	require.ErrorIs(t, (<-bulk).err, errkind.Unavailable)
}

func TestClosedTransport(t *testing.T) {
	s := newScript(t, 0, hang)
	tr := newTransport(t, transport.Config{})
	out, _ := send(tr, s.addr(), ping())
	tr.Close()
	require.ErrorIs(t, (<-out).err, errkind.Unavailable)
	out, cancel := send(tr, s.addr(), ping())
	require.ErrorIs(t, (<-out).err, errkind.Unavailable)
	cancel()
	require.Empty(t, out)
}
