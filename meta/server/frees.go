package server

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// frees is the leader's work on garbage: the queue of things to be freed in
// steps, and the chunks that servers have deleted.
type frees struct {
	more    bool // the state's queue is not empty, as far as is known
	running bool
	freed   []api.ChunkAt // deleted, to be logged
	logging bool
}

// Bounds of the commands.
const (
	freeMax   = 1024
	freedMax  = 1024
	freedKeep = 1 << 16 // more are dropped, and ordered again
)

func (f *frees) add(chunks []api.ChunkAt) {
	if n := freedKeep - len(f.freed); len(chunks) > n {
		chunks = chunks[:n]
	}
	f.freed = append(f.freed, chunks...)
}

// freeStep works on the state's queue until nothing is left; with mu held.
func (s *Server) freeStep(l *leader) {
	f := &l.frees
	if f.running {
		f.more = false // the step's own end asks for the next
		return
	}
	if !f.more {
		var info meta.Info
		if err := s.view(func(r kv.Reader) (err error) { info, err = meta.ReadInfo(r); return err }); err != nil {
			s.cfg.Log.Error("metadata: read counters", "err", err)
			return
		}
		if info.Counts.Freeing == 0 || s.mu.lead != l {
			return
		}
	}
	f.more, f.running = false, true
	s.own(&api.FreeStep{Max: freeMax}, func(body []byte, err error) {
		f.running = false
		var m api.Stepped
		if err == nil && codec.Decode(body, &m) == nil && m.More {
			f.more = true
			s.wake.Broadcast()
		}
	})
}

// freeChunks logs what servers have deleted; with mu held.
func (s *Server) freeChunks(l *leader) {
	f := &l.frees
	for len(f.freed) > 0 && !f.logging && s.mu.lead == l {
		n := min(len(f.freed), freedMax)
		chunks := f.freed[:n:n]
		f.freed = f.freed[n:]
		f.logging = true
		s.own(&api.ChunksFreed{Chunks: chunks}, func(_ []byte, _ error) {
			// What could not be logged is ordered, and reported, again.
			f.logging = false
			if len(f.freed) > 0 {
				s.wake.Broadcast()
			}
		})
	}
}
