package server

import (
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// maxVerdicts bounds one question.
const maxVerdicts = 4096

// asked is one chunk of a Verdicts question, with what the leader's memory
// says of it, taken before the state is read.
type asked struct {
	at      api.ChunkAt
	writer  ids.Session
	floor   uint64 // of the writer, as it told this leader
	guarded bool   // a job may have put it there
}

// verdicts prepares the answer to Verdicts; with mu held. Floors are taken
// now, before the view: what a floor promises never to commit any more was
// either committed in the view or never will be. The other way round a commit
// between the two would be missed.
func (s *Server) verdicts(l *leader, q *read) error {
	var m api.Verdicts
	if err := codec.Decode(q.body, &m); err != nil {
		return errkind.Invalid.Wrap("Verdicts: %v", err)
	}
	if len(m.Chunks) > maxVerdicts {
		return errkind.TooBig.Wrap("Verdicts: %d chunks, at most %d", len(m.Chunks), maxVerdicts)
	}
	now := s.cfg.Sched.Now()
	list := make([]asked, len(m.Chunks))
	for i, key := range m.Chunks {
		a := asked{at: api.ChunkAt{Key: key, Disk: m.Disk}, writer: key.Block.Session()}
		if len(m.Writers) > 0 && m.Writers[i] != 0 {
			a.writer = m.Writers[i]
		}
		if x := l.sessions[a.writer]; x != nil {
			a.floor = x.floor
		}
		a.guarded = l.guards(&a, now)
		list[i] = a
	}
	q.answer = func(r kv.Reader) ([]byte, error) { return s.verdictList(l, r, list) }
	return nil
}

// guards reports whether a repair job may have put the chunk there, and may
// yet have it recorded. A new leader does not know the jobs of the one before.
func (l *leader) guards(a *asked, now time.Duration) bool {
	if _, ok := l.jobs.guarded[a.at]; ok {
		return true
	}
	return a.writer != a.at.Key.Block.Session() && now-l.since < guardFor
}

// judge adds to the state's verdict what only the leader knows.
func judge(r kv.Reader, a *asked) (v api.Verdict, alive bool, err error) {
	v, err = meta.Verdict(r, a.at.Disk, a.at.Key, a.writer, a.floor)
	if err != nil || v != api.VerdictDelete {
		return v, false, err
	}
	if a.guarded {
		return api.VerdictNotYet, false, nil
	}
	b, ok, err := meta.ReadBlock(r, a.at.Key.Block)
	if err != nil {
		return api.VerdictKeep, false, err
	}
	if !ok || int(a.at.Key.Index) >= len(b.Disks) {
		return v, false, nil
	}
	// The block lives without this chunk. While its writer lives it may be a
	// late one: committed without it, so past the floor, and about to be placed.
	lives, err := sessionLives(r, a.writer)
	if err != nil {
		return api.VerdictKeep, false, err
	}
	if lives && b.Disks[a.at.Key.Index] == 0 {
		return api.VerdictNotYet, true, nil
	}
	return v, true, nil
}

// verdictList answers Verdicts from a view.
func (s *Server) verdictList(l *leader, r kv.Reader, list []asked) ([]byte, error) {
	reply := api.VerdictList{Verdicts: make([]api.Verdict, len(list))}
	var told []api.ChunkAt
	for i := range list {
		v, alive, err := judge(r, &list[i])
		if err != nil {
			return nil, err
		}
		reply.Verdicts[i] = v
		if v == api.VerdictDelete && alive {
			told = append(told, list[i].at)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	until := s.cfg.Sched.Now() + deletedFor
	for i, at := range told {
		if _, busy := l.jobs.guarded[at]; busy || len(l.jobs.deleted)+len(told)-i > maxMemories {
			// A job took the place meanwhile, or there is no room to remember it.
			for n := range list {
				if list[n].at == at {
					reply.Verdicts[n] = api.VerdictNotYet
				}
			}
			continue
		}
		l.jobs.deleted[at] = until
	}
	return api.EncodeReply(&api.Reply{Epoch: l.epoch}, &reply), nil
}
