package server

import "github.com/ckptfs/ckptfs/internal/ids"

// Forget makes a session look as if nothing had been heard of it for a term,
// and its stream as if it were another's.
func (s *Server) Forget(id ids.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.mu.lead.sessions[id]
	x.heard -= term + tickEvery
	s.expireSessions(s.mu.lead)
}
