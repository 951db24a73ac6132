package server_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// How long a test waits for a reconnection, and how often it looks.
const (
	reconnectBound = 30 * time.Second
	reconnectStep  = 10 * time.Millisecond
)

var testCluster = ids.UUID{1, 2, 3}

// bed is a server on loopback.
type bed struct {
	t     testing.TB
	srv   *server.Server
	shell *server.Shell
	addr  string
	once  sync.Once
}

type bedConfig struct {
	addr   string
	boot   uint64
	limits server.Limits
	shell  server.ShellConfig
	token  []byte
}

func newBed(t testing.TB, cfg bedConfig, stores ...*fakeStore) *bed {
	var all []chunk.Store
	for _, f := range stores {
		all = append(all, f)
	}
	return newBedOf(t, cfg, all...)
}

func newBedOf(t testing.TB, cfg bedConfig, stores ...chunk.Store) *bed {
	if cfg.addr == "" {
		cfg.addr = "127.0.0.1:0"
	}
	lis, err := net.Listen("tcp", cfg.addr)
	require.NoError(t, err)
	sc := server.Config{Cluster: testCluster, Boot: max(cfg.boot, 1), Sched: new(sched.Real), Log: quiet(), Limits: cfg.limits, Token: cfg.token}
	for i, f := range stores {
		sc.Disks = append(sc.Disks, server.Disk{ID: ids.DiskID(i + 1), Store: f})
	}
	b := &bed{t: t, srv: server.New(sc), addr: lis.Addr().String()}
	cfg.shell.Log = quiet()
	b.shell = server.Serve(b.srv, lis, cfg.shell)
	t.Cleanup(b.close)
	return b
}

func (b *bed) close() { b.once.Do(func() { require.NoError(b.t, b.shell.Close(10*time.Second)) }) }

func newTransport(t testing.TB, cfg transport.Config) *transport.Transport {
	cfg.Cluster, cfg.Sched = testCluster, new(sched.Real)
	cfg.DialTimeout = time.Minute // the machine may be busy
	tr := transport.New(cfg)
	t.Cleanup(tr.Close)
	return tr
}

type outcome struct {
	resp *wire.Response
	err  error
}

// ask sends a request and waits for its outcome.
func ask(tr *transport.Transport, addr string, req *wire.Request) (*wire.Response, error) {
	ch := make(chan outcome, 1)
	tr.Send(addr, req, func(r *wire.Response, err error) { ch <- outcome{r, err} })
	o := <-ch
	return o.resp, o.err
}

// must is ask for a request that has to succeed.
func must(t testing.TB, tr *transport.Transport, addr string, req *wire.Request) *wire.Response {
	r, err := ask(tr, addr, req)
	require.NoError(t, err)
	require.NoError(t, r.Err())
	return r
}

// writeOver writes a chunk through a transport, backing off when busy.
func writeOver(tr *transport.Transport, addr string, disk ids.DiskID, key ids.ChunkKey, data []byte) error {
	for {
		r, err := ask(tr, addr, openReq(disk, key, len(data)))
		if err != nil {
			return err
		}
		if r.Status == errkind.Busy {
			time.Sleep(retryAfter(r))
			continue
		}
		if r.Err() != nil {
			return r.Err()
		}
		break
	}
	for off := 0; off < len(data); off += mib {
		r, err := ask(tr, addr, putReq(disk, key, off, data[off:min(off+mib, len(data))]))
		if err != nil {
			return err
		}
		if r.Err() != nil {
			return r.Err()
		}
	}
	r, err := ask(tr, addr, sealReq(disk, key, data))
	if err != nil {
		return err
	}
	return r.Err()
}

func readOver(tr *transport.Transport, addr string, disk ids.DiskID, key ids.ChunkKey, want []byte) error {
	for off := 0; off < len(want); off += mib {
		n := min(mib, len(want)-off)
		req := readReq(disk, key, off, n)
		req.Dst = make([]byte, n)
		r, err := ask(tr, addr, req)
		if err != nil {
			return err
		}
		if r.Err() != nil {
			return r.Err()
		}
		if &r.Payload[0] != &req.Dst[0] || !bytes.Equal(r.Payload, want[off:off+n]) {
			return fmt.Errorf("wrong bytes at %d", off)
		}
	}
	return nil
}

// TestManyClientsOverLoopback: 200 writers over many connections; the budget
// holds, and every byte comes back, from files and from memory.
func TestManyClientsOverLoopback(t *testing.T) {
	for name, files := range map[string]bool{"memory": false, "sendfile": true} {
		t.Run(name, func(t *testing.T) {
			one, two := newFake(), newFake()
			if files {
				one.file, two.file = tempFile(t), tempFile(t)
			}
			b := newBed(t, bedConfig{limits: server.Limits{PutBuffers: 16 * mib, Window: mib}}, one, two)
			var wait sync.WaitGroup
			for c := range 10 {
				tr := newTransport(t, transport.Config{})
				for i := range 20 {
					wait.Go(func() {
						n := c*20 + i
						data := pattern(64<<10+n*4096, n)
						disk := ids.DiskID(n%2 + 1)
						if err := writeOver(tr, b.addr, disk, ckey(n), data); err != nil {
							t.Errorf("write %d: %v", n, err)
							return
						}
						if err := readOver(tr, b.addr, disk, ckey(n), data); err != nil && errkind.Of(err) != errkind.Busy {
							t.Errorf("read %d: %v", n, err)
						}
					})
				}
			}
			wait.Wait()
			st := b.srv.Stats()
			require.LessOrEqual(t, st.PutPeak, int64(16*mib))
			require.Zero(t, st.PutBytes)
			b.close()
			require.Zero(t, one.count("pinned")+two.count("pinned"), "every pin was closed")
		})
	}
}

func TestEveryOperationOverLoopback(t *testing.T) {
	b := newBed(t, bedConfig{}, newFake())
	tr := newTransport(t, transport.Config{})
	must(t, tr, b.addr, &wire.Request{Op: wire.OpPing})
	small := pattern(64<<10, 2)
	must(t, tr, b.addr, storeReq(1, ckey(1), small))
	large := pattern(mib, 3)
	must(t, tr, b.addr, storeReq(1, ckey(2), large))
	require.NoError(t, readOver(tr, b.addr, 1, ckey(1), small))
	require.NoError(t, readOver(tr, b.addr, 1, ckey(2), large))
	st := must(t, tr, b.addr, &wire.Request{Op: wire.OpStat, Body: &wire.ChunkRef{Disk: 1, Key: ckey(2)}})
	require.Equal(t, uint32(mib), st.Body.(*wire.Stat).Length)
	must(t, tr, b.addr, openReq(1, ckey(3), mib))
	must(t, tr, b.addr, abortReq(1, ckey(3)))
	r, err := ask(tr, b.addr, putReq(1, ckey(3), 0, large))
	require.NoError(t, err)
	require.Equal(t, errkind.NoChunk, r.Status)
	boot, known := tr.BootID(b.addr)
	require.True(t, known)
	require.Equal(t, uint64(1), boot)
}

// TestServerRestart: the transport reconnects by itself and tells of the new life.
func TestServerRestart(t *testing.T) {
	store := newFake()
	b := newBed(t, bedConfig{boot: 1}, store)
	var mu sync.Mutex
	var boots []uint64
	tr := newTransport(t, transport.Config{OnRestart: func(addr string, boot uint64) {
		mu.Lock()
		boots = append(boots, boot)
		mu.Unlock()
	}})
	require.NoError(t, writeOver(tr, b.addr, 1, ckey(1), pattern(mib, 1)))
	b.close()
	_, err := ask(tr, b.addr, &wire.Request{Op: wire.OpPing})
	require.ErrorIs(t, err, errkind.Unavailable)
	require.ErrorContains(t, err, b.addr)
	again := newBed(t, bedConfig{addr: b.addr, boot: 2}, store)
	require.Eventually(t, func() bool {
		return readOver(tr, again.addr, 1, ckey(1), pattern(mib, 1)) == nil
	}, reconnectBound, reconnectStep)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []uint64{2}, boots)
}

// TestWrongPeers: garbage, half frames and broken sums end the connection, and
// the server goes on.
func TestWrongPeers(t *testing.T) {
	b := newBed(t, bedConfig{limits: server.Limits{Window: mib}}, newFake())
	tr := newTransport(t, transport.Config{})
	must(t, tr, b.addr, openReq(1, ckey(1), 4*mib))
	hello := wire.Hello{MinVersion: 1, MaxVersion: 1, Cluster: testCluster, Kind: wire.KindBulk, MaxPayload: wire.MaxPayload}
	good := wire.AppendHello(nil, &hello)
	frame := func(req *wire.Request) []byte {
		p, err := wire.AppendRequest(nil, 1, req)
		require.NoError(t, err)
		for _, part := range req.Payload {
			p = append(p, part...)
		}
		return p
	}
	put := frame(putReq(1, ckey(1), 0, pattern(mib, 1)))
	flipped := bytes.Clone(put)
	flipped[wire.HeaderSize+3] ^= 4
	for name, p := range map[string][]byte{
		"garbage":        []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
		"half hello":     good[:10],
		"garbage after":  append(bytes.Clone(good), bytes.Repeat([]byte("x"), 100)...),
		"half a header":  append(bytes.Clone(good), put[:30]...),
		"half a payload": append(bytes.Clone(good), put[:len(put)/2]...),
		"body checksum":  append(bytes.Clone(good), flipped...),
		"over credit":    append(bytes.Clone(good), frame(putReq(1, ckey(1), mib, pattern(1<<16, 1)))...),
		"a reply":        append(bytes.Clone(good), (&wire.Header{Version: 1, Op: wire.OpPing, Flags: wire.FlagReply}).Append(nil)...),
	} {
		nc, err := net.Dial("tcp", b.addr)
		require.NoError(t, err, name)
		// The server may have cut us off before everything was written.
		_, _ = nc.Write(p)
		_ = nc.(*net.TCPConn).CloseWrite()
		require.NoError(t, nc.SetReadDeadline(time.Now().Add(20*time.Second)))
		rest, err := io.ReadAll(nc)
		if err != nil { // a reset, because the server did not read everything
			require.NotErrorIs(t, err, net.ErrClosed, name)
		}
		require.Less(t, len(rest), 256, "%s: nothing but the welcome comes back", name)
		nc.Close()
	}
	require.NoError(t, writeOver(tr, b.addr, 1, ckey(2), pattern(2*mib, 2)))
	require.Eventually(t, func() bool { return b.srv.Stats().Pending == 0 }, 5*time.Second, time.Millisecond)
}

func TestRefusedConnections(t *testing.T) {
	b := newBed(t, bedConfig{token: []byte("secret"), shell: server.ShellConfig{MaxConns: 3}}, newFake())
	other := transport.New(transport.Config{Cluster: ids.UUID{9}, Sched: new(sched.Real)})
	defer other.Close()
	_, err := ask(other, b.addr, &wire.Request{Op: wire.OpPing})
	require.ErrorIs(t, err, errkind.WrongCluster)
	require.ErrorContains(t, err, ids.UUID{9}.String())
	tr := newTransport(t, transport.Config{})
	_, err = ask(tr, b.addr, &wire.Request{Op: wire.OpPing})
	require.ErrorIs(t, err, errkind.Access)
	good := newTransport(t, transport.Config{Token: []byte("secret")})
	must(t, good, b.addr, &wire.Request{Op: wire.OpPing})
	for range 3 { // the fourth finds the server full
		nc, err := net.Dial("tcp", b.addr)
		require.NoError(t, err)
		defer nc.Close()
	}
	full := newTransport(t, transport.Config{Token: []byte("secret")})
	_, err = ask(full, b.addr, &wire.Request{Op: wire.OpPing})
	require.ErrorIs(t, err, errkind.Unavailable)
	must(t, good, b.addr, &wire.Request{Op: wire.OpPing})
}

// TestSlowDiskAndCancel: while a slow disk holds up bulk requests, small
// ones to another disk are answered, and cancelled ones end at once.
func TestSlowDiskAndCancel(t *testing.T) {
	slow, fast := newFake(), newFake()
	gate := make(chan struct{})
	slow.before = func(op string) error {
		if op == "pin" {
			<-gate
		}
		return nil
	}
	b := newBed(t, bedConfig{}, slow, fast)
	tr := newTransport(t, transport.Config{})
	must(t, tr, b.addr, storeReq(1, ckey(1), pattern(mib, 1)))
	var cancels []func()
	ends := make(chan outcome, 40)
	for range 40 {
		req := readReq(1, ckey(1), 0, mib)
		req.Dst = make([]byte, mib)
		cancels = append(cancels, tr.Send(b.addr, req, func(r *wire.Response, err error) { ends <- outcome{r, err} }))
	}
	require.NoError(t, writeOver(tr, b.addr, 2, ckey(2), pattern(2*mib, 2)))
	require.NoError(t, readOver(tr, b.addr, 2, ckey(2), pattern(2*mib, 2)))
	for _, c := range cancels {
		c()
		c()
	}
	for range 40 {
		require.ErrorIs(t, (<-ends).err, errkind.Interrupted)
	}
	late := readReq(1, ckey(1), 0, mib)
	late.Left = 20 * time.Millisecond
	_, err := ask(tr, b.addr, late)
	require.ErrorIs(t, err, errkind.Timeout)
	close(gate)
	require.NoError(t, readOver(tr, b.addr, 1, ckey(1), pattern(mib, 1)))
}

func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "chunkserver"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	require.NoError(t, err)
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	store := newFake()
	store.file = tempFile(t)
	b := newBed(t, bedConfig{shell: server.ShellConfig{TLS: &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}}}, store)
	tr := newTransport(t, transport.Config{TLS: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}})
	require.NoError(t, writeOver(tr, b.addr, 1, ckey(1), pattern(3*mib, 1)))
	require.NoError(t, readOver(tr, b.addr, 1, ckey(1), pattern(3*mib, 1)))
	plain := newTransport(t, transport.Config{})
	_, err = ask(plain, b.addr, &wire.Request{Op: wire.OpPing, Left: time.Minute})
	require.ErrorIs(t, err, errkind.Unavailable)
}
