package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sim"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a server that answers as a test tells it.
type script struct {
	*sim.World
	conn    stream.Conn // of the newest stream
	seen    []api.Header
	bodies  []api.Request
	cancels []uint64
	// answer returns the reply, or nil for none now.
	answer func(id uint64, h *api.Header, req api.Request) codec.Message
	held   []uint64 // requests that answer kept
	lease  uint32   // what a Lease gets, in milliseconds
}

// Connect starts a stream.
func (s *script) Connect(context.Context, string) (stream.Conn, error) {
	cl, sv := stream.Pipe(s.World)
	s.Go("script", func() { s.serve(sv) })
	return cl, nil
}

func (s *script) serve(c stream.Conn) {
	if _, err := stream.Welcome(c, func(*stream.Hello) stream.HelloReply {
		return stream.HelloReply{Version: 1, Leading: true}
	}); err != nil {
		return
	}
	s.conn = c
	for {
		msg, err := c.Recv()
		if err != nil {
			return
		}
		for len(msg) > 0 {
			var f stream.Frame
			if f, msg, err = stream.Next(msg); err != nil {
				return
			}
			if f.Type == stream.TypeCancel {
				s.cancels = append(s.cancels, f.ID)
				continue
			}
			s.request(c, f)
		}
	}
}

func (s *script) request(c stream.Conn, f stream.Frame) {
	h, req, err := api.DecodeRequest(f.Body)
	if err != nil {
		return
	}
	var reply codec.Message
	switch req.(type) {
	case *api.CreateSession:
		reply = &api.SessionOpened{Session: 7, Incarnation: 1, TermMillis: 10_000}
	case *api.Renew:
		s.bodies = append(s.bodies, req)
		reply = &api.Renewed{TermMillis: 10_000, ClusterVersion: 1, LeaderTerm: 1}
	case *api.GetCluster:
		reply = &cluster.Map{Version: 1}
	case *api.EndSessions:
		reply = &api.Empty{}
	case *api.Lease:
		reply = &api.Leased{Millis: s.lease}
	default:
		s.seen, s.bodies = append(s.seen, h), append(s.bodies, req)
		if reply = s.answer(f.ID, &h, req); reply == nil {
			s.held = append(s.held, f.ID)
			return
		}
	}
	s.send(c, f.ID, reply)
}

func (s *script) send(c stream.Conn, id uint64, reply codec.Message) {
	_ = c.Send(stream.Append(nil, stream.TypeReply, id, api.EncodeReply(&api.Reply{}, reply)))
}

func scripted(t *testing.T, fn func(s *script, c *Client)) {
	t.Helper()
	w := sim.NewWorld(5)
	defer w.Close()
	done := false
	w.Go("test", func() {
		defer func() { done = true }()
		s := &script{World: w, answer: func(uint64, *api.Header, api.Request) codec.Message { return &api.Entry{} }}
		c, err := Dial(context.Background(), Config{Addrs: []string{"x"}, Name: "t", Sched: w, Transport: s, OpTimeout: 30 * time.Second})
		require.NoError(t, err)
		fn(s, c)
		require.NoError(t, c.Close(context.Background()))
	})
	require.NoError(t, w.Run(time.Hour, func() bool { return done }))
}

var bg = context.Background()

func hold(uint64, *api.Header, api.Request) codec.Message { return nil }

func TestMutationWithoutAnswerKeepsItsPlace(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		s.answer = hold
		begun := s.Now()
		require.ErrorIs(t, c.Do(bg, &api.Unlink{}, nil), errkind.Timeout)
		require.Equal(t, 30*time.Second, s.Now()-begun)
		require.Len(t, c.mu.win.free, api.Places-1)
		lost := s.seen[0]
		s.answer = func(uint64, *api.Header, api.Request) codec.Message { return &api.Entry{} }
		for range 2 * api.Places {
			require.NoError(t, c.Do(bg, &api.Unlink{}, nil))
		}
		for _, h := range s.seen[1:] {
			require.False(t, h.Place == lost.Place, "the place waits for its answer")
		}
		for _, id := range s.held {
			s.send(s.conn, id, &api.Entry{})
		}
		s.Sleep(time.Second)
		require.Len(t, c.mu.win.free, api.Places)
	})
}

func TestWindowBoundsMutations(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		s.answer = hold
		left := 3 * api.Places
		for range left {
			s.Go("caller", func() {
				require.NoError(t, c.Do(bg, &api.Unlink{}, nil))
				left--
			})
		}
		s.Sleep(time.Second)
		require.Len(t, s.held, api.Places)
		last := map[uint8]uint64{}
		for left > 0 {
			held := s.held
			s.held = nil
			for _, id := range held {
				s.send(s.conn, id, &api.Entry{})
			}
			s.Sleep(time.Second)
		}
		for _, h := range s.seen {
			require.Equal(t, last[h.Place]+1, h.Seq)
			last[h.Place] = h.Seq
		}
	})
}

func TestSentAgainWithTheSameSequence(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		s.answer = hold
		s.AfterFunc(time.Second, func() {
			s.answer = func(uint64, *api.Header, api.Request) codec.Message { return &api.Entry{} }
			s.conn.Close()
		})
		require.NoError(t, c.Do(bg, &api.Unlink{}, nil))
		require.Len(t, s.seen, 2)
		require.Equal(t, s.seen[0], s.seen[1])
	})
}

func TestRepeatedReleaseSparesWhatWasOpenedSince(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		require.NoError(t, c.Do(bg, &api.Open{Ino: 5}, nil))
		require.NoError(t, c.Do(bg, &api.Open{Ino: 6}, nil))
		s.answer = func(_ uint64, _ *api.Header, req api.Request) codec.Message {
			if _, ok := req.(*api.Release); ok {
				return nil
			}
			return &api.Entry{}
		}
		s.Go("release", func() { require.NoError(t, c.Do(bg, &api.Release{Inos: []ids.Ino{5, 6}}, nil)) })
		s.Sleep(time.Second)
		require.NoError(t, c.Do(bg, &api.Open{Ino: 5}, nil))
		s.bodies = nil
		s.answer = func(uint64, *api.Header, api.Request) codec.Message { return &api.Empty{} }
		s.conn.Close()
		s.Sleep(time.Second)
		require.Equal(t, &api.Renew{Opens: []ids.Ino{5}, Full: true}, s.bodies[0], "what is open comes first")
		require.Equal(t, &api.Release{Inos: []ids.Ino{6}}, s.bodies[1])
	})
}

func TestSilentConnectionIsGivenUp(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		first := s.conn
		s.answer = hold
		s.Go("caller", func() { require.NoError(t, c.Do(bg, &api.GetAttr{}, nil)) })
		s.Sleep(20 * time.Second)
		require.Same(t, first, s.conn, "renewals are answered: it is not silent")
		s.send(s.conn, s.held[0], &api.Entry{})
		s.Sleep(time.Second)
	})
}

func TestCancelledLockThatWasGrantedIsGivenBack(t *testing.T) {
	scripted(t, func(s *script, c *Client) {
		s.answer = hold
		cfg := c.cfg.OpTimeout
		c.cfg.OpTimeout = 2 * time.Second
		err := c.Do(bg, &api.Lock{Ino: 9, Type: api.WriteLock, Owner: 3, End: 10, Wait: true}, nil)
		require.ErrorIs(t, err, errkind.Timeout)
		require.Equal(t, s.held, s.cancels, "the server was told")
		c.cfg.OpTimeout = cfg
		s.answer = func(uint64, *api.Header, api.Request) codec.Message { return &api.Empty{} }
		s.send(s.conn, s.held[0], &api.Empty{})
		s.Sleep(time.Second)
		require.Contains(t, s.bodies, &api.Lock{Ino: 9, Owner: 3, End: 10})
	})
}

func TestBlockIDsNeverRepeat(t *testing.T) {
	scripted(t, func(_ *script, c *Client) {
		seen := map[ids.BlockID]bool{}
		for range 1000 {
			id := c.NextBlockID(3)
			require.False(t, seen[id])
			seen[id] = true
			require.Equal(t, ids.Session(7), id.Session())
			require.Equal(t, ids.Slot(3), id.Slot())
		}
	})
}
