package server

import (
	"sync"
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// out is one frame to send.
type out struct {
	t    stream.Type
	id   uint64
	body []byte
}

// Stream is one client's connection. Replies are queued and sent by a task of
// the stream's own, so that a client that does not read holds up nobody.
type Stream struct {
	num  uint64 // in the order of arrival
	name string
	conn stream.Conn
	now  func() time.Duration
	mu   struct {
		sync.Mutex
		queue    []out
		bytes    int
		inflight int
		dead     bool
		moved    time.Duration // when the queue last got shorter, or was empty
	}
	ready sched.Cond // for the sending task
	room  sched.Cond // for the receiving task
}

// push queues a frame. It never waits.
func (st *Stream) push(o out) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.pushLocked(o)
}

func (st *Stream) pushLocked(o out) {
	if st.mu.dead {
		return
	}
	if len(st.mu.queue) == 0 {
		st.mu.moved = st.now()
		st.ready.Signal()
	}
	st.mu.queue = append(st.mu.queue, o)
	st.mu.bytes += len(o.body)
}

// reply answers a request.
func (st *Stream) reply(id uint64, body []byte) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.mu.inflight--
	st.room.Signal()
	st.pushLocked(out{stream.TypeReply, id, body})
}

// fail answers a request with an error that is final.
func (st *Stream) fail(id uint64, err error) { st.reply(id, api.EncodeError(err, 0)) }

// refuse has a request asked again.
func (st *Stream) refuse(id uint64, k errkind.Kind, text, leader string) {
	body := codec.Encode(nil, &stream.Refusal{Err: k, Text: text, Leader: leader})
	st.mu.Lock()
	defer st.mu.Unlock()
	st.mu.inflight--
	st.pushLocked(out{stream.TypeRefuse, id, body})
}

// begin counts a request.
func (st *Stream) begin() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.mu.inflight++
}

// await waits, before the next message is read, while the stream has too much
// under way or lets its replies lie: the client finds out by not being read.
func (st *Stream) await() {
	st.mu.Lock()
	defer st.mu.Unlock()
	for !st.mu.dead && (st.mu.inflight > maxInflight || st.mu.bytes > maxStreamOut || len(st.mu.queue) > maxInflight) {
		st.room.Wait()
	}
}

// pushCluster tells of a new cluster map; one waiting push stands for all.
func (st *Stream) pushCluster(version uint64) {
	body := codec.Encode(nil, &api.Pushed{Version: version})
	st.mu.Lock()
	defer st.mu.Unlock()
	for i := range st.mu.queue {
		if o := &st.mu.queue[i]; o.t == stream.TypePush && api.Kind(o.id) == api.PushClusterChanged {
			o.body = body
			return
		}
	}
	st.pushLocked(out{stream.TypePush, uint64(api.PushClusterChanged), body})
}

// pushRecall asks the session of the stream to give up its lease.
func (st *Stream) pushRecall() {
	st.push(out{stream.TypePush, uint64(api.PushRecall), codec.Encode(nil, &api.Pushed{})})
}

// pushEnded tells that the session of the stream has ended.
func (st *Stream) pushEnded() {
	st.push(out{stream.TypePush, uint64(api.PushSessionEnded), codec.Encode(nil, &api.Pushed{})})
}

// kill ends the stream.
func (st *Stream) kill(string) {
	st.mu.Lock()
	st.mu.dead = true
	st.mu.queue = nil
	st.ready.Broadcast()
	st.room.Broadcast()
	st.mu.Unlock()
	st.conn.Close()
}

// stalled reports whether the client has taken nothing for too long.
func (st *Stream) stalled(now time.Duration) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return len(st.mu.queue) > 0 && now-st.mu.moved > stallLimit
}

// send writes queued frames, as many as wait in one message, until the stream ends.
func (st *Stream) send() {
	for {
		msg := st.nextMessage()
		if msg == nil {
			return
		}
		if err := st.conn.Send(msg); err != nil {
			st.kill("send failed")
			return
		}
	}
}

func (st *Stream) nextMessage() []byte {
	st.mu.Lock()
	defer st.mu.Unlock()
	for len(st.mu.queue) == 0 && !st.mu.dead {
		st.ready.Wait()
	}
	if st.mu.dead {
		return nil
	}
	n, size := 0, 0
	for n < len(st.mu.queue) {
		add := stream.HeaderSize + len(st.mu.queue[n].body)
		if n > 0 && size+add > stream.MaxBatch {
			break
		}
		n, size = n+1, size+add
	}
	msg := stream.NewBuffer(size)
	for _, o := range st.mu.queue[:n] {
		msg = stream.Append(msg, o.t, o.id, o.body)
		st.mu.bytes -= len(o.body)
	}
	st.mu.queue = append(st.mu.queue[:0], st.mu.queue[n:]...)
	st.mu.moved = st.now()
	st.room.Signal()
	return msg
}

// Serve handles one connection until it ends. It is called in a task of the
// caller's and closes conn.
func (s *Server) Serve(conn stream.Conn) {
	defer conn.Close()
	t := s.cfg.Sched.AfterFunc(helloLimit, conn.Close)
	hello, err := stream.Welcome(conn, s.greet)
	if !t.Stop() || err != nil {
		s.cfg.Log.Info("metadata stream refused", "from", hello.Name, "err", err)
		return
	}
	st := &Stream{conn: conn, name: hello.Name, now: s.cfg.Sched.Now}
	st.ready, st.room = s.cfg.Sched.NewCond(&st.mu), s.cfg.Sched.NewCond(&st.mu)
	if !s.join(st) {
		return
	}
	defer s.leave(st)
	s.start("meta-reply", st.send)
	for {
		st.await()
		msg, err := conn.Recv()
		if err != nil {
			return
		}
		if err := s.handleMessage(st, msg); err != nil {
			s.cfg.Log.Warn("metadata stream ended", "from", st.name, "err", err)
			return
		}
	}
}

// greet answers a Hello.
func (s *Server) greet(h *stream.Hello) stream.HelloReply {
	st := s.cfg.Replica.Status()
	s.mu.Lock()
	defer s.mu.Unlock()
	r := stream.Answer(h, s.mu.cluster)
	r.Leading = s.mu.lead != nil
	if !r.Leading && st.Leader != st.ID {
		r.Leader = st.LeaderAddr
	}
	return r
}

func (s *Server) join(st *Stream) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || len(s.mu.streams) >= maxStreams {
		return false
	}
	s.mu.nextNum++
	st.num = s.mu.nextNum
	s.mu.streams[st.num] = st
	return true
}

// leave forgets a stream, and what waits for it.
func (s *Server) leave(st *Stream) {
	st.kill("left")
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.streams, st.num)
	if l := s.mu.lead; l != nil {
		l.locks.drop(st)
		l.unbind(st)
	}
	s.idle.Broadcast()
}

// handleMessage takes a message apart and handles its frames in order.
func (s *Server) handleMessage(st *Stream, msg []byte) error {
	var acts actions
	s.mu.Lock()
	var err error
	for len(msg) > 0 && err == nil {
		var f stream.Frame
		if f, msg, err = stream.Next(msg); err == nil {
			err = s.handleFrame(st, f, &acts)
		}
	}
	s.mu.Unlock()
	s.perform(&acts)
	return err
}

func (s *Server) handleFrame(st *Stream, f stream.Frame, acts *actions) error {
	switch f.Type {
	case stream.TypeRequest:
		s.request(st, f.ID, f.Body, acts)
	case stream.TypeCancel:
		s.cancel(st, f.ID)
	default:
		return errkind.Invalid.Wrap("a frame of type %d from a client", f.Type)
	}
	return nil
}
