package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// ShellConfig is what the network side of a server is made of.
type ShellConfig struct {
	Log      *slog.Logger
	TLS      *tls.Config // nil: plain TCP
	MaxConns int         // zero: 4,096
	// NoSendfile sends reads through memory.
	NoSendfile bool
}

const (
	defaultConns    = 4096
	handshakeBound  = 10 * time.Second
	idleBound       = 5 * time.Minute  // between two frames; clients close idle connections earlier
	frameBound      = 30 * time.Second // for the rest of a frame once its header has come
	writeBound      = 30 * time.Second // for a batch of replies
	peerDeadBound   = 20 * time.Second // unacknowledged data
	sendBuffer      = 2 << 20
	receiveBuffer   = 2 << 20
	acceptPauseMax  = time.Second
	maxBatchReplies = 64
)

// Shell owns the listener and the connections of a Server: one goroutine that
// reads and one that writes for each connection.
type Shell struct {
	cfg  ShellConfig
	srv  *Server
	lis  net.Listener
	wait sync.WaitGroup
	mu   struct {
		sync.Mutex
		conns  map[net.Conn]struct{}
		closed bool
	}
}

// Serve starts to accept connections from lis, which it owns from now on.
func Serve(srv *Server, lis net.Listener, cfg ShellConfig) *Shell {
	if cfg.MaxConns <= 0 {
		cfg.MaxConns = defaultConns
	}
	sh := &Shell{cfg: cfg, srv: srv, lis: lis}
	sh.mu.conns = make(map[net.Conn]struct{})
	sh.wait.Go(sh.accept)
	return sh
}

// Addr is where the shell listens.
func (sh *Shell) Addr() net.Addr { return sh.lis.Addr() }

// Close stops accepting, lets the server finish what it accepted, at most for
// bound, and closes the connections. Answers that were ready are sent.
func (sh *Shell) Close(bound time.Duration) error {
	sh.mu.Lock()
	sh.mu.closed = true
	sh.mu.Unlock()
	lerr := sh.lis.Close()
	err := sh.srv.Close(bound)
	sh.mu.Lock()
	for nc := range sh.mu.conns {
		nc.Close()
	}
	sh.mu.Unlock()
	sh.wait.Wait()
	return errors.Join(err, lerr)
}

func (sh *Shell) accept() {
	pause := time.Duration(0)
	for {
		nc, err := sh.lis.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors, most likely: wait for some to be closed.
			pause = min(max(2*pause, 5*time.Millisecond), acceptPauseMax)
			sh.cfg.Log.Warn("cannot accept connections", slog.Any("error", err), slog.Duration("retry", pause))
			time.Sleep(pause)
			continue
		}
		pause = 0
		sh.mu.Lock()
		full := len(sh.mu.conns) >= sh.cfg.MaxConns
		closed := sh.mu.closed
		if !closed && !full {
			sh.mu.conns[nc] = struct{}{}
		}
		sh.mu.Unlock()
		if closed || full {
			if full {
				sh.cfg.Log.Warn("connection refused: too many", slog.String("peer", nc.RemoteAddr().String()), slog.Int("limit", sh.cfg.MaxConns))
			}
			nc.Close()
			continue
		}
		sh.wait.Go(func() {
			defer func() {
				nc.Close()
				sh.mu.Lock()
				delete(sh.mu.conns, nc)
				sh.mu.Unlock()
			}()
			sh.serve(nc)
		})
	}
}

// serve runs one connection until it ends.
func (sh *Shell) serve(nc net.Conn) {
	peer := nc.RemoteAddr().String()
	log := sh.cfg.Log.With(slog.String("peer", peer))
	var raw syscall.RawConn
	if tc, ok := nc.(*net.TCPConn); ok {
		if rc, err := tune(tc); err != nil {
			log.Warn("cannot set socket options", slog.Any("error", err))
		} else {
			raw = rc
		}
	}
	stream := nc
	if sh.cfg.TLS != nil {
		stream, raw = tls.Server(nc, sh.cfg.TLS), nil
	}
	if err := sh.handshake(stream); err != nil {
		log.Warn("connection refused", slog.Any("error", err))
		return
	}
	conn := sh.srv.NewConn(peer, raw != nil && !sh.cfg.NoSendfile)
	w := newWriter(stream, raw)
	var writing sync.WaitGroup
	writing.Go(func() {
		if err := w.run(); err != nil {
			log.Debug("connection lost while writing", slog.Any("error", err))
			nc.Close()
		}
	})
	if err := readFrames(stream, conn, w); err != nil {
		log.Warn("connection closed", slog.Any("error", err))
	}
	conn.Close()
	nc.Close()
	w.stop()
	writing.Wait()
}

// tune sets what the protocol wants of a socket.
func tune(tc *net.TCPConn) (syscall.RawConn, error) {
	rc, err := tc.SyscallConn()
	if err != nil {
		return nil, err
	}
	err = errors.Join(tc.SetNoDelay(true), tc.SetWriteBuffer(sendBuffer), tc.SetReadBuffer(receiveBuffer),
		tc.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}))
	ctl := rc.Control(func(fd uintptr) {
		err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(peerDeadBound/time.Millisecond)))
	})
	return rc, errors.Join(err, ctl)
}

func (sh *Shell) handshake(stream net.Conn) error {
	if err := stream.SetDeadline(time.Now().Add(handshakeBound)); err != nil {
		return err
	}
	if tc, ok := stream.(*tls.Conn); ok {
		ctx, cancel := context.WithTimeout(context.Background(), handshakeBound)
		defer cancel()
		if err := tc.HandshakeContext(ctx); err != nil {
			return fmt.Errorf("tls: %w", err)
		}
	}
	var hello wire.Hello
	if err := wire.ReadHello(stream, &hello); err != nil {
		return err
	}
	welcome := sh.srv.Welcome(&hello)
	if err := wire.WriteHello(stream, &welcome); err != nil {
		return err
	}
	if welcome.Status != errkind.OK {
		return welcome.Status.Wrap("%s", welcome.Text)
	}
	return stream.SetDeadline(time.Time{})
}

// readFrames takes requests off the connection until it ends; nil when the
// client closed it in good order.
func readFrames(stream net.Conn, conn *Conn, w *writer) error {
	r := wire.NewReader(stream)
	for {
		if err := stream.SetReadDeadline(time.Now().Add(idleBound)); err != nil {
			return ended(err)
		}
		h, err := r.Header()
		if err != nil {
			return ended(err)
		}
		if err := stream.SetReadDeadline(time.Now().Add(frameBound)); err != nil {
			return ended(err)
		}
		body, err := r.Body(&h)
		if err != nil {
			return err
		}
		req, err := wire.DecodeRequest(&h, body)
		if err != nil {
			return err
		}
		in, err := conn.Accept(h.Request, req, int(h.PayloadLen))
		if err != nil {
			return err
		}
		if in.Buffer != nil {
			err = r.Payload(in.Buffer)
		} else {
			err = r.Discard(int(h.PayloadLen))
		}
		if err != nil {
			conn.Drop(in)
			return fmt.Errorf("payload of %s, request %d: %w", h.Op, h.Request, err)
		}
		conn.Submit(in, w.push)
	}
}

// ended tells the good ends of a connection from the bad ones.
func ended(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
}
