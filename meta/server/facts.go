package server

import (
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// machine answers queries; it has no state of its own.
var machine = meta.New()

// facts are what a new leader reads before it serves.
type facts struct {
	info     meta.Info
	sessions []meta.SessionInfo // not ended
	cluster  cluster.Map
}

// sessionPage is how many sessions are read at once.
const sessionPage = 1024

func (f *facts) read(r kv.Reader) (err error) {
	if f.info, err = meta.ReadInfo(r); err != nil || !f.info.Founded {
		return err
	}
	for after := ids.Session(0); ; {
		page, err := meta.ReadSessions(r, after, sessionPage)
		if err != nil {
			return err
		}
		for _, x := range page {
			if x.State != meta.SessionEnded {
				f.sessions = append(f.sessions, x)
			}
		}
		if len(page) < sessionPage {
			break
		}
		after = page[len(page)-1].ID
	}
	f.cluster, err = meta.ReadMap(r)
	return err
}

// sessionLives reports whether a session has not ended.
func sessionLives(r kv.Reader, id ids.Session) (bool, error) {
	x, ok, err := meta.ReadSession(r, id)
	return ok && x.State != meta.SessionEnded, err
}

// query answers what the state alone decides.
func query(r kv.Reader, q *read) ([]byte, error) {
	req := api.NewRequest(q.h.Kind)
	if req == nil {
		return nil, errkind.Unsupported.Wrap("request of kind %d", q.h.Kind)
	}
	if err := codec.Decode(q.body, req); err != nil {
		return nil, errkind.Invalid.Wrap("%s: %v", q.h.Kind, err)
	}
	reply, err := machine.Query(r, &q.h, req)
	if err != nil {
		return nil, err
	}
	return api.EncodeReply(&api.Reply{Epoch: q.lead.epoch}, reply), nil
}
