package metanode

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/replica"
	"github.com/ckptfs/ckptfs/meta/replica/peer"
)

// peers is the connection to the other members; empty with a single voter.
type peers struct{ t *peer.Transport }

// newPeers makes the transport and registers its service. cluster tells the
// cluster's id, zero before the founding.
func newPeers(cfg *Config, s *grpc.Server, cluster func() ids.UUID) *peers {
	if len(cfg.Peers) < 2 {
		return &peers{}
	}
	t := peer.New(peer.Config{
		ID: cfg.ID, Peers: cfg.Peers, Cluster: cluster, Log: cfg.Log,
		Dial: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	t.Register(s)
	return &peers{t}
}

func (p *peers) transport() replica.Transport {
	if p.t == nil {
		return nil // an interface without a value, not one with a nil pointer
	}
	return p.t
}

func (p *peers) serve(r *replica.Replica) {
	if p.t != nil {
		p.t.Serve(r)
	}
}

func (p *peers) close() {
	if p.t != nil {
		p.t.Close()
	}
}
