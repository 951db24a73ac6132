package metanode

import (
	"errors"

	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/meta/replica"
)

// peers is the connection to the other members; empty with a single voter.
type peers struct{}

func newPeers(cfg *Config, _ *grpc.Server) (*peers, error) {
	if len(cfg.Peers) > 1 {
		return nil, errors.New("several members are not wired yet")
	}
	return &peers{}, nil
}

func (p *peers) transport() replica.Transport { return nil }
func (p *peers) attach(*replica.Replica)      {}
func (p *peers) close()                       {}
