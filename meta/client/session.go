package client

import (
	"slices"
	"time"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
)

// renewal is the state of the session's renewals.
type renewal struct {
	call       *call // under way
	last       time.Duration
	leaderTerm uint64
}

// openSession asks for a session; with mu held and a connection.
func (c *Client) openSession() {
	if c.mu.opening || c.mu.closing {
		return
	}
	c.mu.opening = true
	begun := c.cfg.Sched.Now()
	secret := c.mu.secret
	req := &api.CreateSession{Name: c.cfg.Name, Host: c.cfg.Host, Secret: secret, Replaces: c.mu.replaces}
	c.ask(req, func(reply []byte, err error) {
		c.mu.opening = false
		var m api.SessionOpened
		if _, err := answer(reply, err, &m); err != nil {
			if errkind.Of(err) == errkind.Expired {
				c.mu.secret = sched.NewUUID(c.cfg.Sched) // the session of this secret has ended
			}
			c.mu.lastErr = err
			return // the session task asks again
		}
		c.sessionOpened(&m, secret, begun)
	})
}

func (c *Client) sessionOpened(m *api.SessionOpened, secret ids.UUID, begun time.Duration) {
	old := c.identity.Load()
	c.identity.Store(&identity{session: m.Session, incarnation: m.Incarnation, cluster: m.Cluster, secret: secret})
	c.mu.win = newWindow(m.Session)
	c.valid.Store(int64(begun) + int64(m.TermMillis)*int64(time.Millisecond))
	c.cfg.Log.Info("metadata session opened", "session", m.Session, "cluster", m.Cluster)
	c.admitNext()
	c.renewNow(old != nil) // a later session takes the open inodes over
	if old != nil && c.cfg.OnSession != nil {
		c.startLocked("meta-notify", func() { c.cfg.OnSession(m.Session) })
	}
	c.askMap()
	c.ready.Broadcast()
}

// loseSession forgets a session that has ended; the session task opens another.
func (c *Client) loseSession(w *window) {
	if c.mu.win != w {
		return
	}
	c.cfg.Log.Warn("metadata session lost", "session", w.session)
	c.mu.win = nil
	c.dropLease()
	c.valid.Store(0)
	c.mu.replaces, c.mu.secret = c.mu.secret, sched.NewUUID(c.cfg.Sched)
	c.forget(c.mu.renew.call)
	c.mu.renew = renewal{}
	if c.cfg.OnLost != nil {
		c.startLocked("meta-notify", func() { c.cfg.OnLost(w.session) })
	}
	c.wake.Broadcast()
}

// startLocked is start with mu held.
func (c *Client) startLocked(name string, fn func()) {
	c.mu.tasks++
	c.cfg.Sched.Go(name, func() {
		defer func() {
			c.mu.Lock()
			c.mu.tasks--
			c.ready.Broadcast()
			c.mu.Unlock()
		}()
		fn()
	})
}

// runSession renews, watches for silence, and keeps the map.
func (c *Client) runSession() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.mu.closed {
		c.wake.WaitFor(tick)
		now := c.cfg.Sched.Now()
		l := c.mu.link
		if l == nil || c.mu.closed {
			continue
		}
		if c.silent(l, now) {
			c.mu.lastErr = errkind.Unavailable.Wrap("metadata server %s answers nothing", l.addr)
			l.conn.Close()
			continue
		}
		if c.cfg.NoSession {
			continue
		}
		if c.mu.win == nil {
			c.openSession()
			continue
		}
		if r := &c.mu.renew; r.call != nil && now-r.last > renewLimit {
			c.forget(r.call)
			r.call = nil
		}
		if now-c.mu.renew.last >= renewEvery {
			c.renewNow(false)
		}
		if c.mu.mapStale {
			c.askMap()
		}
	}
}

// silent reports whether calls have waited for too long on a connection that
// brings nothing at all.
func (c *Client) silent(l *link, now time.Duration) bool {
	if now-l.heard < silenceLimit {
		return false
	}
	for _, k := range c.mu.calls {
		if now-k.sent > silenceLimit {
			return true
		}
	}
	return false
}

// renewNow sends a renewal, with the open inodes when full, unless one is
// under way; with mu held. The snapshot of the open inodes and its place in
// the order of frames are one step, so that no Open or Release slips between.
func (c *Client) renewNow(full bool) {
	r := &c.mu.renew
	if r.call != nil || c.mu.win == nil || c.mu.link == nil {
		return
	}
	w, sent := c.mu.win, c.cfg.Sched.Now()
	req := &api.Renew{Full: full}
	if fn := c.floor.Load(); fn != nil {
		req.Floor = (*fn)()
	}
	if full {
		for i := range c.mu.opens {
			req.Opens = append(req.Opens, i)
		}
		slices.Sort(req.Opens)
	}
	r.last = sent
	r.call = c.ask(req, func(reply []byte, err error) {
		r.call = nil
		var m api.Renewed
		if _, err := answer(reply, err, &m); err != nil {
			if errkind.Of(err) == errkind.Expired && !c.mu.closing {
				c.loseSession(w)
			}
			return
		}
		c.renewed(w, sent, full, &m)
	})
}

func (c *Client) renewed(w *window, sent time.Duration, full bool, m *api.Renewed) {
	if c.mu.win != w {
		return
	}
	until := int64(sent) + int64(m.TermMillis)*int64(time.Millisecond)
	c.valid.Store(max(until, c.valid.Load()))
	if have := c.cmap.Load(); have == nil || have.Version != m.ClusterVersion {
		c.askMap()
	}
	if m.LeaderTerm != c.mu.renew.leaderTerm {
		c.mu.renew.leaderTerm = m.LeaderTerm
		if !full {
			c.renewNow(true)
		}
	}
	c.ready.Broadcast()
}

// askMap fetches the cluster map unless that is under way; with mu held.
func (c *Client) askMap() {
	c.mu.mapStale = true
	if c.mu.mapAsking || c.mu.link == nil {
		return
	}
	c.mu.mapAsking, c.mu.mapStale = true, false
	var have uint64
	if m := c.cmap.Load(); m != nil {
		have = m.Version
	}
	c.ask(&api.GetCluster{Have: have}, func(reply []byte, err error) {
		c.mu.mapAsking = false
		m := new(cluster.Map)
		if _, err := answer(reply, err, m); err != nil {
			c.mu.mapStale = true
			return
		}
		if m.Version != have {
			c.cmap.Store(m)
		}
		c.deliver()
		c.ready.Broadcast()
	})
}

// handlePush takes a push; with mu held.
func (c *Client) handlePush(k api.Kind, p api.Pushed) {
	switch k {
	case api.PushClusterChanged:
		c.mu.pushed = append(c.mu.pushed[:0], pushed{kind: k, body: p}) // one stands for all
		if !c.cfg.NoSession {
			c.askMap()
			return
		}
		c.deliver()
	case api.PushSessionEnded:
		if c.mu.win != nil && !c.mu.closing {
			c.loseSession(c.mu.win)
		}
		c.notify(pushed{kind: k, body: p})
	case api.PushRecall:
		c.giveBack()
	default:
		c.notify(pushed{kind: k, body: p})
	}
}

// deliver tells of the cluster changes that the map has followed.
func (c *Client) deliver() {
	for _, p := range c.mu.pushed {
		c.notify(p)
	}
	c.mu.pushed = c.mu.pushed[:0]
}

func (c *Client) notify(p pushed) {
	if c.cfg.OnPush != nil {
		c.startLocked("meta-push", func() { c.cfg.OnPush(p.kind, p.body) })
	}
}
