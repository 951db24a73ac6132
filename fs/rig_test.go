package fs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// How long tests wait for what happens in the background, and how often they look.
const (
	testWait = 20 * time.Second
	testPoll = 5 * time.Millisecond
)

// childVerb makes the test binary do something as a process of its own.
const childVerb = "CKPTFS_FS_TEST_CHILD"

func TestMain(m *testing.M) {
	if verb := os.Getenv(childVerb); verb != "" {
		os.Exit(child(verb, os.Args[1:]))
	}
	goleak.VerifyTestMain(m)
}

// service is a metadata service: the real state machine over a store in memory.
type service struct {
	machine *meta.Machine
	over    *kv.Overlay
	mu      struct {
		sync.Mutex
		index uint64
		clock int64
	}
	unlocked sched.Cond
}

func newService() *service {
	s := &service{machine: meta.New(), over: kv.NewOverlay(kv.NewMem(), 0)}
	s.unlocked = new(sched.Real).NewCond(&s.mu)
	if err := s.do(context.Background(), 0, &api.Found{Cluster: ids.UUID{1}, Layout: ids.RS(4, 2)}, &api.Empty{}); err != nil {
		panic(err)
	}
	if err := s.servers(); err != nil {
		panic(err)
	}
	return s
}

// open opens a session.
func (s *service) open() (*session, error) {
	var r api.SessionOpened
	s.mu.Lock()
	secret := ids.UUID{1, byte(s.mu.index), byte(s.mu.index >> 8), byte(s.mu.index >> 16)}
	s.mu.Unlock()
	err := s.do(context.Background(), 0, &api.CreateSession{Name: "test", Secret: secret}, &r)
	return &session{service: s, id: r.Session}, err
}

func (s *service) do(ctx context.Context, id ids.Session, req api.Request, reply codec.Message) error {
	switch req.(type) {
	case *api.Release:
		return nil // the leader's memory, which is not part of this
	case *api.StatFS:
		*reply.(*api.Totals) = api.Totals{Capacity: 6 << 40, Free: 3 << 40, Layout: ids.RS(4, 2)}
		return nil
	}
	for {
		s.mu.Lock()
		s.mu.clock = max(s.mu.clock+1, time.Now().UnixNano())
		h := api.Header{Session: id, Time: s.mu.clock}
		p := api.EncodeRequest(&h, req)
		var answer []byte
		var err error
		if req.Kind().Mutation() {
			s.mu.index++
			err = s.over.Apply(func(b *kv.Batch) error {
				return b.Do(func(t kv.Txn) (err error) {
					answer, err = s.machine.Apply(t, s.mu.index, p)
					return err
				})
			})
		} else {
			err = s.over.View(func(r kv.Reader) error {
				// Through the wire form, so that nobody shares memory.
				m, err := s.machine.Query(r, &h, req)
				if err == nil {
					answer = api.EncodeReply(&api.Reply{}, m)
				}
				return err
			})
		}
		if err == nil {
			err = decodeReply(answer, reply)
		}
		lock, ok := req.(*api.Lock)
		if ok && err == nil {
			s.unlocked.Broadcast()
		}
		if !ok || !lock.Wait || !errors.Is(err, errkind.WouldBlock) {
			s.mu.Unlock()
			return err
		}
		s.unlocked.WaitFor(10 * time.Millisecond)
		s.mu.Unlock()
		if ctx.Err() != nil {
			return errkind.Interrupted.Wrap("wait for a lock")
		}
	}
}

func decodeReply(p []byte, reply codec.Message) error {
	var h api.Reply
	rest, err := codec.DecodePrefix(p, &h)
	if err != nil {
		return err
	}
	if h.Err != errkind.OK {
		return h.Err.Wrap("%s", h.Text)
	}
	return codec.Decode(rest, reply)
}

// session is one client's way to the service. It counts requests, and before
// may hold one up or fail it.
type session struct {
	*service
	id     ids.Session
	before atomic.Pointer[func(ctx context.Context, req api.Request) error]
	counts struct {
		sync.Mutex
		all map[api.Kind]int
	}
}

func (s *session) Do(ctx context.Context, req api.Request, reply codec.Message) error {
	s.counts.Lock()
	if s.counts.all == nil {
		s.counts.all = make(map[api.Kind]int)
	}
	s.counts.all[req.Kind()]++
	s.counts.Unlock()
	if fn := s.before.Load(); fn != nil {
		if err := (*fn)(ctx, req); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return errkind.Interrupted.Wrap("%s: %v", req.Kind(), err)
	}
	return s.do(ctx, s.id, req, reply)
}

// hold lets fn look at every request first.
func (s *session) hold(fn func(ctx context.Context, req api.Request) error) { s.before.Store(&fn) }

// take returns the count of a kind since the last time.
func (s *session) take(k api.Kind) int {
	s.counts.Lock()
	defer s.counts.Unlock()
	n := s.counts.all[k]
	delete(s.counts.all, k)
	return n
}

// cluster is what several mounts share.
type cluster struct {
	meta   *service
	data   *memStore
	blocks *memBlocks // nil: the engine in memory
}

func newCluster() *cluster { return &cluster{meta: newService(), data: newMemStore()} }

// mounted is one mount of a cluster, for a test.
type mounted struct {
	*Server
	f       *FS
	session *session
	engine  *memEngine // nil with the real engine
}

func testLog() *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

// mount mounts the cluster on a directory of the test's own, and sees to it
// that no mount outlives the test.
func (c *cluster) mount(t *testing.T, change ...func(*Config, *fuseconn.Options)) *mounted {
	t.Helper()
	return c.mountAt(t, t.TempDir(), change...)
}

func (c *cluster) mountAt(t *testing.T, dir string, change ...func(*Config, *fuseconn.Options)) *mounted {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Geteuid() != 0 {
		t.Skipf("NOT TESTED: mounting needs root and /dev/fuse: %v", err)
	}
	s, err := c.meta.open()
	require.NoError(t, err)
	m := &mounted{session: s}
	cfg := Config{Meta: m.session, Sched: new(sched.Real), Log: testLog(), OpTimeout: 20 * time.Second}
	o := fuseconn.Options{AllowOther: true, Dev: true, Suid: true}
	if c.blocks != nil {
		cfg.Engine = FileEngine(newRealEngine(c, m.session, testLog(), func(ino ids.Ino, off uint64, err error) { m.f.Invalidate(ino, off, err) }))
	} else {
		m.engine = newMemEngine(c.data, m.session)
		cfg.Engine = m.engine
	}
	for _, fn := range change {
		fn(&cfg, &o)
	}
	m.f = New(cfg)
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	m.Server, err = Mount(ctx, dir, m.f, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		if err := m.Unmount(ctx); err != nil {
			t.Errorf("unmount: %v", err)
			_ = m.Kill()
		}
	})
	return m
}

// path joins names below the mount.
func (m *mounted) path(format string, args ...any) string {
	return m.Dir() + "/" + fmt.Sprintf(format, args...)
}
