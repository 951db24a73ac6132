package client

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored is one chunk on a fake disk.
type stored struct {
	open   wire.Open
	data   []byte
	sums   []uint64 // 0: not put
	sealed bool
	digest uint64
}

// fakeServer is a chunk server in memory, with faults.
type fakeServer struct {
	addr   string
	chunks map[ids.ChunkKey]*stored

	refuse  bool          // connections fail
	silent  bool          // requests are swallowed
	lag     time.Duration // added to every request
	full    bool          // new chunks are refused
	busy    int           // so many requests are put off
	garble  bool          // bytes read have a flipped bit
	forge   bool          // reads carry other bytes with matching checksums
	grows   int           // credit grows by this at each open
	credit  int           // granted beyond what is there; 0: plenty
	puts    int
	stores  int
	crashAt int // after so many puts the server restarts, forgetting open chunks
}

// fakeNet is the transport and the cluster, in a simulated world.
type fakeNet struct {
	w       *sim.World
	c       *Client
	m       *cluster.Map
	servers map[string]*fakeServer
	list    []*fakeServer
	sent    map[wire.Op]int
	bad     []string // broken promises
	placed  map[ids.ChunkKey]ids.DiskID
	damaged map[ids.ChunkKey]string
	nextID  uint64
}

// newNet makes one host with one disk per server.
func newNet(seed uint64, n int) *fakeNet {
	f := &fakeNet{
		w: sim.NewWorld(seed), servers: map[string]*fakeServer{}, sent: map[wire.Op]int{},
		placed: map[ids.ChunkKey]ids.DiskID{}, damaged: map[ids.ChunkKey]string{}, m: &cluster.Map{Version: 1},
	}
	for i := range n {
		s := &fakeServer{addr: fmt.Sprintf("s%d", i), chunks: map[ids.ChunkKey]*stored{}}
		f.servers[s.addr] = s
		f.list = append(f.list, s)
		f.m.Servers = append(f.m.Servers, cluster.Server{ID: ids.ServerID(i + 1), Addr: s.addr, Host: "h" + s.addr, Up: true})
		f.m.Disks = append(f.m.Disks, cluster.Disk{ID: ids.DiskID(i + 1), Server: ids.ServerID(i + 1), Capacity: 1 << 40, Free: 1 << 39})
	}
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("CLIENT_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	f.c = New(Config{Transport: f, Map: func() *cluster.Map { return f.m }, Reporter: f, Sched: f.w, Log: log})
	f.c.onFree = func(p []byte) {
		for i := range p {
			p[i] = 0xdb
		}
	}
	return f
}

func (f *fakeNet) ChunkPlaced(key ids.ChunkKey, disk ids.DiskID, _ uint64) { f.placed[key] = disk }
func (f *fakeNet) ChunkDamaged(key ids.ChunkKey, _ ids.DiskID, why string) { f.damaged[key] = why }

// run runs fn as a task of the world and returns its error.
func (f *fakeNet) run(t require.TestingT, fn func() error) error {
	var err error
	done := false
	f.w.Go("test", func() {
		defer func() { done = true }()
		err = fn()
		f.c.Close()
	})
	require.NoError(t, f.w.Run(time.Hour, func() bool { return done }))
	f.w.Close()
	require.Empty(t, f.bad)
	require.Zero(t, f.c.window.mu.used, "read window not given back")
	return err
}

// Send delivers the request after the server's latency, and the reply after it.
func (f *fakeNet) Send(addr string, req *wire.Request, done func(*wire.Response, error)) func() {
	f.sent[req.Op]++
	s, over, before := f.servers[addr], false, fingerprint(req.Payload)
	end := func(r *wire.Response, err error) {
		if over {
			return
		}
		over = true
		if fingerprint(req.Payload) != before {
			f.bad = append(f.bad, fmt.Sprintf("payload of a %s changed in flight", req.Op))
		}
		done(r, err)
	}
	lag := time.Duration(f.w.Rand().IntN(1000))*time.Microsecond + s.lag
	f.w.AfterFunc(lag/2, func() {
		switch {
		case over || s.silent:
		case s.refuse:
			end(nil, errkind.Unavailable.Wrap("connect %s: refused", addr))
		default:
			resp := f.handle(s, req)
			f.w.AfterFunc(lag/2, func() {
				if !over && len(resp.Payload) > 0 && len(req.Dst) >= len(resp.Payload) {
					resp.Payload = req.Dst[:copy(req.Dst, resp.Payload)]
				}
				end(resp, nil)
			})
		}
	})
	return func() { f.w.Go("cancel", func() { end(nil, errkind.Interrupted.Wrap("cancelled")) }) }
}

func fingerprint(payload [][]byte) uint64 { return xxh3.Hash(bytes.Join(payload, nil)) }

func fail(k errkind.Kind, format string, args ...any) *wire.Response {
	return &wire.Response{Status: k, Text: fmt.Sprintf(format, args...)}
}

func ok(body codec.Message) *wire.Response { return &wire.Response{Body: body} }

func (f *fakeNet) handle(s *fakeServer, req *wire.Request) *wire.Response {
	if req.Op != wire.OpPing && s.busy > 0 {
		s.busy--
		return &wire.Response{Status: errkind.Busy, Text: "busy", Body: &wire.Grant{RetryAfter: 5}}
	}
	switch m := req.Body.(type) {
	case nil:
		return ok(nil)
	case *wire.Open:
		return f.open(s, m)
	case *wire.Put:
		return f.put(s, m, bytes.Join(req.Payload, nil))
	case *wire.Seal:
		return f.seal(s, m)
	case *wire.Store:
		return f.store(s, m, bytes.Join(req.Payload, nil))
	case *wire.Read:
		return f.read(s, m)
	case *wire.ChunkRef:
		c := s.chunks[m.Key]
		if req.Op == wire.OpAbort {
			if c != nil && !c.sealed {
				delete(s.chunks, m.Key)
			}
			return ok(nil)
		}
		if c == nil || !c.sealed {
			return fail(errkind.NoChunk, "no chunk %s", m.Key)
		}
		return ok(&wire.Stat{State: uint8(chunk.StateSealed), Length: uint32(len(c.data)), Digest: c.digest, Granule: c.open.Granule, Sums: c.sums})
	}
	return fail(errkind.Unsupported, "%s", req.Op)
}

func (s *fakeServer) grant(c *stored, end int) *wire.Grant {
	if s.credit == 0 {
		return &wire.Grant{Credit: c.open.Reserve}
	}
	return &wire.Grant{Credit: uint32(end + s.credit)}
}

func (f *fakeNet) open(s *fakeServer, m *wire.Open) *wire.Response {
	if s.full {
		return fail(errkind.NoSpace, "disk full")
	}
	s.credit += s.grows
	c := s.chunks[m.Key]
	if c == nil {
		c = &stored{open: *m, data: make([]byte, m.Reserve), sums: make([]uint64, ec.Granules(int(m.Reserve), m.Granule))}
		s.chunks[m.Key] = c
	} else if !bytes.Equal(codec.Encode(nil, &c.open), codec.Encode(nil, m)) {
		return fail(errkind.Conflict, "chunk %s is open with another header", m.Key)
	}
	end := 0
	for i, sum := range c.sums {
		if sum != 0 {
			end = (i + 1) << m.Granule
		}
	}
	return ok(s.grant(c, end))
}

func (f *fakeNet) put(s *fakeServer, m *wire.Put, data []byte) *wire.Response {
	if s.puts++; s.crashAt > 0 && s.puts == s.crashAt {
		for key, c := range s.chunks {
			if !c.sealed {
				delete(s.chunks, key)
			}
		}
	}
	c := s.chunks[m.Key]
	switch {
	case c == nil:
		return fail(errkind.NoChunk, "no chunk %s", m.Key)
	case c.sealed:
		return fail(errkind.Conflict, "chunk %s is sealed", m.Key)
	case int(m.Off)%(1<<c.open.Granule) != 0 || int(m.Off)+len(data) > int(c.open.Reserve):
		f.bad = append(f.bad, fmt.Sprintf("put of [%d, %d) into %d bytes", m.Off, int(m.Off)+len(data), c.open.Reserve))
	case !ec.Check(data, m.Sums, c.open.Granule):
		f.bad = append(f.bad, "put with checksums that do not match")
	}
	copy(c.data[m.Off:], data)
	for i, sum := range m.Sums {
		at := int(m.Off)>>c.open.Granule + i
		if c.sums[at] != 0 && c.sums[at] != sum {
			f.bad = append(f.bad, "put of other bytes to the same place")
		}
		c.sums[at] = sum
	}
	return ok(s.grant(c, int(m.Off)+len(data)))
}

func (f *fakeNet) seal(s *fakeServer, m *wire.Seal) *wire.Response {
	c := s.chunks[m.Key]
	if c == nil {
		return fail(errkind.NoChunk, "no chunk %s", m.Key)
	}
	if !c.sealed {
		c.data, c.sums = c.data[:m.Length], c.sums[:ec.Granules(int(m.Length), c.open.Granule)]
		c.digest, c.sealed = ec.Digest(ec.Sums(nil, c.data, c.open.Granule)), true
	}
	if len(c.data) != int(m.Length) || c.digest != m.Digest {
		f.bad = append(f.bad, "seal with another digest")
		return fail(errkind.Conflict, "chunk %s has another digest", m.Key)
	}
	return ok(&wire.Sealed{Digest: c.digest})
}

func (f *fakeNet) store(s *fakeServer, m *wire.Store, data []byte) *wire.Response {
	s.stores++
	if s.full {
		return fail(errkind.NoSpace, "disk full")
	}
	if !ec.Check(data, m.Sums, m.Granule) {
		f.bad = append(f.bad, "store with checksums that do not match")
	}
	s.chunks[m.Key] = &stored{open: m.Open, data: data, sums: m.Sums, sealed: true, digest: ec.Digest(m.Sums)}
	return ok(&wire.Sealed{Digest: ec.Digest(m.Sums)})
}

func (f *fakeNet) read(s *fakeServer, m *wire.Read) *wire.Response {
	c := s.chunks[m.Key]
	if c == nil || !c.sealed {
		return fail(errkind.NoChunk, "no chunk %s", m.Key)
	}
	g := c.open.Granule
	lo, hi := int(m.Off), int(m.Off)+int(m.Len)
	p := bytes.Clone(c.data[lo:hi])
	sums := c.sums[lo>>g : ec.Granules(hi, g)]
	if s.garble || s.forge {
		p[f.w.Rand().IntN(len(p))] ^= 1 << f.w.Rand().IntN(8)
	}
	if s.forge {
		sums = ec.Sums(nil, p, g)
	}
	return &wire.Response{Body: &wire.Data{Length: uint32(len(c.data)), Granule: g, Digest: c.digest, Sums: sums}, Payload: p}
}

func (f *fakeNet) spec(l ids.Layout) chunk.BlockSpec {
	return chunk.BlockSpec{Layout: l, Ino: 7, NextID: func() ids.BlockID {
		f.nextID++
		return ids.MakeBlockID(0, 1, 1, f.nextID)
	}}
}

func random(f *fakeNet, n int) []byte {
	p := make([]byte, n)
	x := f.w.Uint64() | 1
	for i := range p {
		x = x*6364136223846793005 + 1442695040888963407
		p[i] = byte(x >> 56)
	}
	return p
}
