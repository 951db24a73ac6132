package replica

import (
	"fmt"
	"slices"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// onlyGroup is the raft group of all slots today.
const onlyGroup = 1

// founding is the position that every member's log starts behind.
func founding(voters []uint64) *state {
	return &state{index: 1, term: 1, voters: voters, newborn: len(voters) > 1}
}

// open brings log and store to a common state and returns what the store holds.
func recoverState(cfg *Config, l *log.Log) (*state, error) {
	var st *state
	records := false
	err := cfg.Store.View(func(r kv.Reader) (err error) {
		if st, err = readState(r); err != nil {
			return err
		}
		return r.Ascend(nil, nil, func(_, _ []byte) bool { records = true; return false })
	})
	if err != nil {
		return nil, fmt.Errorf("read the metadata store: %w", err)
	}
	voters := cfg.voters()
	s := l.Storage(onlyGroup)
	switch {
	case st == nil && records:
		return nil, errkind.Corrupt.Wrap("the metadata store holds records but no replica state: " +
			"it was not written by this program")
	case st == nil && l.Empty():
		return found(cfg, l, founding(voters))
	case st == nil && s.Marker().Index == 1:
		// The power went between the two steps of found, or before the first flush.
		return found(cfg, l, founding(s.Marker().Voters))
	case st == nil:
		return nil, misfit("the store is empty, but the log begins at %d", s.Marker().Index+1)
	case l.Empty():
		return nil, misfit("the store holds everything up to entry %d, but the log is empty or missing", st.index)
	}
	if err := finishInstall(l, s, st); err != nil {
		return nil, err
	}
	if err := checkFit(s, st); err != nil {
		return nil, err
	}
	if !slices.Equal(st.voters, voters) {
		return nil, errkind.Invalid.Wrap("the metadata servers are configured as %v, but this directory belongs to "+
			"a group of %v: start with the same peers as before", voters, st.voters)
	}
	return st, raiseCommit(l, s, st.index)
}

func misfit(format string, args ...any) error {
	return errkind.Corrupt.Wrap("log and store of this metadata server do not belong together: %s; acknowledged "+
		"changes may be missing, so it does not start: put back the missing files, or move the directory aside and "+
		"let the server copy the state from the others", fmt.Sprintf(format, args...))
}

func found(cfg *Config, l *log.Log, st *state) (*state, error) {
	if l.Empty() {
		m := st.marker()
		err := l.Append([]log.Write{{Group: onlyGroup, Reset: &m, Hard: hardState(1, 0, 1)}}, true)
		if err != nil {
			return nil, err
		}
	}
	err := cfg.Store.Update(func(t kv.Txn) error {
		t.Set(stateKey, st.encode())
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("found the metadata store: %w", err)
	}
	return st, nil
}

func hardState(term, vote, commit uint64) *pb.HardState {
	return &pb.HardState{Term: new(term), Vote: new(vote), Commit: new(commit)}
}

// finishInstall completes an installation that was cut off after the store had
// been exchanged.
func finishInstall(l *log.Log, s *log.Storage, st *state) error {
	in := s.Intent()
	if in == nil || in.Index != st.index || in.Term != st.term {
		return nil
	}
	return l.Append([]log.Write{{Group: onlyGroup, Reset: in}}, true)
}

// checkFit is metadata rule 3.
func checkFit(s *log.Storage, st *state) error {
	first, _ := s.FirstIndex()
	last, _ := s.LastIndex()
	if st.index+1 < first || st.index > last {
		return misfit("the store holds everything up to entry %d, but the log goes from %d to %d", st.index, first, last)
	}
	term, err := s.Term(st.index)
	if err == nil && term != st.term {
		return misfit("entry %d has term %d in the store and %d in the log", st.index, st.term, term)
	}
	return nil
}

// raiseCommit makes up for a commit index that was not synced: what is in the
// store was committed.
func raiseCommit(l *log.Log, s *log.Storage, index uint64) error {
	hs, _, _ := s.InitialState()
	if hs.GetCommit() >= index {
		return nil
	}
	hard := hardState(hs.GetTerm(), hs.GetVote(), index)
	return l.Append([]log.Write{{Group: onlyGroup, Hard: hard}}, false)
}
