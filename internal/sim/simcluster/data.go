package simcluster

import (
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/chunk/server"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// dataNet carries requests from one node to chunk servers, as chunk/transport
// does: two connections a server, one of them for bulk. Frames are encoded and
// decoded on the way, so that the ends share no memory.
type dataNet struct {
	c     *Cluster
	from  string
	links map[linkKey]*dataLink
	over  bool
}

type linkKey struct {
	addr string
	bulk bool
}

// dataLink is one connection to a server, up or being opened.
type dataLink struct {
	d       *dataNet
	key     linkKey
	conn    *conn // nil while dialling
	srv     *server.Conn
	next    uint64
	waiting []*dataCall // for the connection
	pending []*dataCall // sent, oldest first
	heard   time.Duration
}

type dataCall struct {
	link   *dataLink
	id     uint64
	req    *wire.Request
	frame  []byte
	body   []byte // the payload
	done   func(*wire.Response, error)
	timers []sched.Timer
	over   bool
}

func newDataNet(c *Cluster, from string) *dataNet {
	return &dataNet{c: c, from: from, links: map[linkKey]*dataLink{}}
}

// Send starts a request; see chunk/client.Transport.
func (d *dataNet) Send(addr string, req *wire.Request, done func(*wire.Response, error)) (cancel func()) {
	call := &dataCall{req: req, done: done}
	if d.over || !d.c.net.up[d.from] {
		d.c.World.Go("data refused", func() { call.finish(nil, errkind.Unavailable.Wrap("%s is closed", d.from)) })
		return func() {}
	}
	bulk := req.Op == wire.OpPut || req.PayloadLen() > wire.SmallPayload
	if m, ok := req.Body.(*wire.Read); ok && m.Len > wire.SmallPayload {
		bulk = true
	}
	l := d.link(linkKey{addr, bulk})
	call.link = l
	if req.Left > 0 {
		call.timers = append(call.timers, d.c.World.AfterFunc(req.Left, func() {
			l.giveUp(call, errkind.Timeout.Wrap("%s to %s: no answer in %v", req.Op, addr, req.Left))
		}))
	}
	l.send(call)
	return func() { d.c.World.Go("data cancel", func() { l.giveUp(call, errkind.Interrupted.Wrap("cancelled")) }) }
}

func (d *dataNet) link(key linkKey) *dataLink {
	if l := d.links[key]; l != nil {
		return l
	}
	l := &dataLink{d: d, key: key}
	d.links[key] = l
	d.c.World.Go("data dial "+key.addr, l.dial)
	return l
}

func (l *dataLink) dial() {
	c, ok := l.d.c.net.connect(l.d.from, l.key.addr)
	node := l.d.c.chunkAt(l.key.addr)
	if !ok || node == nil || node.life == nil || node.life.server == nil {
		if ok {
			c.end(0)
		}
		l.drop()
		return
	}
	l.conn, l.heard = c, l.d.c.World.Now()
	l.srv = node.life.server.NewConn(l.d.from, false)
	c.lost[0] = l.drop
	c.lost[1] = l.srv.Close
	queue := l.waiting
	l.waiting = nil
	for _, call := range queue {
		if !call.over {
			l.send(call)
		}
	}
}

// drop ends the link and fails what is pending on it.
func (l *dataLink) drop() {
	if l.d.links[l.key] == l {
		delete(l.d.links, l.key)
	}
	all := append(l.pending, l.waiting...)
	l.pending, l.waiting = nil, nil
	for _, call := range all {
		call.finish(nil, errkind.Unavailable.Wrap("connection from %s to chunk server %s is lost", l.d.from, l.key.addr))
	}
}

func (l *dataLink) send(call *dataCall) {
	if l.conn == nil {
		l.waiting = append(l.waiting, call)
		return
	}
	l.next++
	call.id = l.next
	frame, err := wire.AppendRequest(nil, call.id, call.req)
	if err != nil {
		l.d.c.World.Go("data unfit", func() { call.finish(nil, err) })
		return
	}
	call.frame = frame
	for _, p := range call.req.Payload {
		call.body = append(call.body, p...)
	}
	l.pending = append(l.pending, call)
	call.timers = append(call.timers, l.d.c.World.AfterFunc(silentLimit, func() { l.watch(call) }))
	l.conn.deliver(0, func() { l.serve(call) })
}

// watch gives up a server that has been silent for too long.
func (l *dataLink) watch(call *dataCall) {
	if !call.over && l.d.c.World.Now()-l.heard >= silentLimit && l.conn != nil {
		l.conn.end(0)
	}
}

// serve is the arrival of a request at the server.
func (l *dataLink) serve(call *dataCall) {
	h, err := wire.ParseHeader(call.frame[:wire.HeaderSize])
	var req *wire.Request
	if err == nil {
		req, err = wire.DecodeRequest(&h, call.frame[wire.HeaderSize:])
	}
	if err == nil {
		if len(call.body) > 0 {
			req.Payload = [][]byte{call.body}
		}
		err = l.srv.Call(call.id, req, func(r *wire.Response) { l.reply(call, r) })
	}
	if err != nil {
		l.d.c.violate("chunk server %s closes the connection of %s: %v", l.key.addr, l.d.from, err)
		l.conn.end(1)
	}
}

// reply is the server's answer on its way back.
func (l *dataLink) reply(call *dataCall, r *wire.Response) {
	frame, err := wire.AppendReply(nil, call.req.Op, call.id, r, len(r.Payload))
	if err != nil {
		l.d.c.violate("chunk server %s: reply to %s: %v", l.key.addr, call.req.Op, err)
		return
	}
	payload := r.Payload
	l.conn.deliver(1, func() { l.arrived(call, frame, payload) })
}

func (l *dataLink) arrived(call *dataCall, frame, payload []byte) {
	l.heard = l.d.c.World.Now()
	l.forget(call)
	if call.over {
		return
	}
	h, err := wire.ParseHeader(frame[:wire.HeaderSize])
	var r *wire.Response
	if err == nil {
		r, err = wire.DecodeReply(&h, frame[wire.HeaderSize:])
	}
	if err == nil && len(payload) > 0 {
		r.Payload = payload
		if len(call.req.Dst) >= len(payload) {
			r.Payload = call.req.Dst[:copy(call.req.Dst, payload)]
		}
	}
	call.finish(r, err)
}

func (l *dataLink) forget(call *dataCall) {
	l.pending = slices.DeleteFunc(l.pending, func(x *dataCall) bool { return x == call })
}

// giveUp ends a call early and tells the server.
func (l *dataLink) giveUp(call *dataCall, err error) {
	if call.over {
		return
	}
	if id := call.id; id != 0 && l.conn != nil {
		l.conn.deliver(0, func() {
			_ = l.srv.Call(1<<63|id, &wire.Request{Op: wire.OpCancel, Body: &wire.Cancel{Request: id}}, func(*wire.Response) {})
		})
	}
	call.finish(nil, err)
}

func (call *dataCall) finish(r *wire.Response, err error) {
	if call.over {
		return
	}
	call.over = true
	for _, t := range call.timers {
		t.Stop()
	}
	call.done(r, err)
}

// close ends all connections.
func (d *dataNet) close() {
	d.over = true
	for _, node := range d.c.chunks {
		for _, bulk := range []bool{false, true} {
			if l := d.links[linkKey{node.addr, bulk}]; l != nil && l.conn != nil {
				l.conn.end(0)
			}
		}
	}
}
