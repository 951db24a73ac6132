package file_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// layout has stripes of 256 KiB, so that tests meet many of them.
var layout = ids.Layout{Kind: ids.LayoutRS, K: 4, M: 2, CellLog: ids.MinCellLog}

const disks = 6

// service is the metadata state machine in memory.
type service struct {
	sched sched.Sched
	m     *meta.Machine
	mu    struct {
		sync.Mutex
		store *kv.Mem
		index uint64
		clock int64
		open  map[openKey]int
	}
}

type openKey struct {
	s   ids.Session
	ino ids.Ino
}

func newService(t require.TestingT, s sched.Sched) *service {
	v := &service{sched: s, m: meta.New()}
	v.mu.store = kv.NewMem()
	v.mu.clock = 1_700_000_000_000_000_000
	v.mu.open = map[openKey]int{}
	require.NoError(t, v.call(0, 0, &api.Found{Cluster: ids.UUID{1}, Layout: layout}, &api.Empty{}))
	for i := range disks {
		require.NoError(t, v.call(0, 0, &api.RegisterServer{
			UUID: ids.UUID{9, byte(i)}, Addr: fmt.Sprintf("h%d:1", i), Host: fmt.Sprintf("h%d", i),
			Disks: []api.DiskReport{{UUID: ids.UUID{8, byte(i)}, Capacity: 1 << 40, Free: 1 << 40}},
		}, &api.Registered{}))
	}
	return v
}

// call runs one request to its answer.
func (v *service) call(s ids.Session, seq uint64, req api.Request, reply codec.Message) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.clock += 1000
	h := &api.Header{Time: v.mu.clock, Session: s, Seq: seq, Place: uint8(seq % api.Places)}
	switch r := req.(type) {
	case *api.Release:
		for _, ino := range r.Inos {
			delete(v.mu.open, openKey{s, ino})
		}
		return nil
	case *api.Open:
		v.mu.open[openKey{s, r.Ino}]++
	}
	var raw []byte
	if req.Kind().Mutation() {
		v.mu.index++
		cmd := api.EncodeRequest(h, req)
		if err := v.mu.store.Update(func(t kv.Txn) (err error) {
			raw, err = v.m.Apply(t, v.mu.index, cmd)
			return err
		}); err != nil {
			return err
		}
	} else {
		if err := v.mu.store.View(func(r kv.Reader) error {
			body, err := v.m.Query(r, h, req)
			if err != nil {
				raw = api.EncodeError(err, 0)
				return nil
			}
			raw = api.EncodeReply(&api.Reply{}, body)
			return nil
		}); err != nil {
			return err
		}
	}
	var head api.Reply
	rest, err := codec.DecodePrefix(raw, &head)
	if err != nil {
		return err
	}
	if head.Err != errkind.OK {
		return head.Err.Wrap("%s", head.Text)
	}
	return codec.Decode(rest, reply)
}

// registered reports whether the session has the inode open.
func (v *service) registered(s ids.Session, ino ids.Ino) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.mu.open[openKey{s, ino}] > 0
}

// session is one mount's view of the service.
type session struct {
	v   *service
	id  ids.Session
	inc ids.Incarnation
	// before is called with each request; an error is returned instead of
	// sending it. after may replace the answer.
	before func(api.Request) error
	after  func(api.Request) error
	mu     struct {
		sync.Mutex
		seq, block uint64
		commits    int
		requests   int
	}
}

func newSession(t require.TestingT, v *service, secret byte) *session {
	var opened api.SessionOpened
	require.NoError(t, v.call(0, 0, &api.CreateSession{Name: "/mnt", Secret: ids.UUID{7, secret}}, &opened))
	return &session{v: v, id: opened.Session, inc: opened.Incarnation}
}

func (s *session) Do(ctx context.Context, req api.Request, reply codec.Message) error {
	if err := ctx.Err(); err != nil {
		return errkind.Interrupted
	}
	if s.before != nil {
		if err := s.before(req); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.mu.seq++
	seq := s.mu.seq
	s.mu.requests++
	if c, ok := req.(*api.Commit); ok {
		s.mu.commits++
		if len(codec.Encode(nil, c)) > api.MaxCommit {
			s.mu.Unlock()
			return errkind.TooBig.Wrap("commit of %d operations", len(c.Ops))
		}
		if old, ok := refersToOld(c); ok {
			s.mu.Unlock()
			return errkind.Invalid.Wrap("an operation refers to block %s of another commit", old)
		}
	}
	s.mu.Unlock()
	if err := s.v.call(s.id, seq, req, reply); err != nil {
		return err
	}
	if s.after != nil {
		return s.after(req)
	}
	return nil
}

// refersToOld finds a block in the operations that is not new: all extents of a
// block belong in the commit that brings it (rule 13). The state machine sees
// to it that no block is brought twice.
func refersToOld(c *api.Commit) (ids.BlockID, bool) {
	fresh := map[ids.BlockID]bool{{}: true}
	for i := range c.Blocks {
		fresh[c.Blocks[i].ID] = true
	}
	for i := range c.Ops {
		if !fresh[c.Ops[i].Block] {
			return c.Ops[i].Block, true
		}
		for _, x := range c.Ops[i].Extents {
			if !fresh[x.Block] {
				return x.Block, true
			}
		}
	}
	return ids.BlockID{}, false
}

func (s *session) NextBlockID(slot ids.Slot) ids.BlockID {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.block++
	return ids.MakeBlockID(slot, s.inc, s.id, s.mu.block)
}

func (s *session) commits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.commits
}

// create makes a file in the root, open.
func (s *session) create(t require.TestingT, name string) api.Attr {
	var e api.Entry
	require.NoError(t, s.Do(context.Background(), &api.Create{
		Parent: ids.RootIno, Name: []byte(name), Mode: api.ModeRegular | 0o4755, Open: true, Exclusive: true,
	}, &e))
	return e.Attr
}

// rig is one engine on a session.
type rig struct {
	*file.Engine
	s *session
}

func newEngine(s *session, b chunk.Blocks, sc sched.Sched, budget int64) *rig {
	return newEngineWith(s, b, file.Config{Sched: sc, Budget: budget})
}

func newEngineWith(s *session, b chunk.Blocks, cfg file.Config) *rig {
	cfg.Meta, cfg.IDs, cfg.Blocks = s, s, b
	if os.Getenv("FILE_TEST_LOG") != "" {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if cfg.OpTimeout == 0 {
		cfg.OpTimeout = 20 * time.Second
	}
	return &rig{Engine: file.New(cfg), s: s}
}

// readAll reads the whole file.
func readAll(h *file.Handle, size int) ([]byte, error) {
	out := make([]byte, size+10)
	done := 0
	for done < len(out) {
		n, err := h.ReadAt(context.Background(), out[done:min(len(out), done+200_000)], int64(done))
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		done += n
	}
	return out[:done], nil
}
