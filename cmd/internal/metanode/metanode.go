// Package metanode joins the parts of one metadata server: log and store on
// disk, the replica, the leader's logic and the gRPC endpoint.
package metanode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/internal/vfs"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/kv/bolt"
	"github.com/ckptfs/ckptfs/meta/replica"
	"github.com/ckptfs/ckptfs/meta/server"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// Config is one metadata server.
type Config struct {
	Dir    string
	Listen string
	ID     uint64
	Peers  map[uint64]string // all voters, this one included; empty: it is alone
	Layout ids.Layout        // of the root, when the cluster is founded
	Log    *slog.Logger
	// Fatal is called when the server can no longer keep its promises: the
	// process must end.
	Fatal func(error)
}

// ParsePeers reads ID=HOST:PORT entries.
func ParsePeers(list []string) (map[uint64]string, error) {
	peers := make(map[uint64]string, len(list))
	for _, one := range list {
		name, addr, ok := strings.Cut(one, "=")
		id, err := strconv.ParseUint(name, 10, 64)
		if !ok || err != nil || id == 0 {
			return nil, fmt.Errorf("peer %q: want ID=HOST:PORT with an id of 1 or more", one)
		}
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, fmt.Errorf("peer %q: %w", one, err)
		}
		if peers[id] != "" {
			return nil, fmt.Errorf("peer %q: id %d is there twice", one, id)
		}
		peers[id] = addr
	}
	return peers, nil
}

// Validate reports the first wrong field.
func (c *Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("--dir is missing: where this metadata server keeps its log and store")
	case c.Listen == "":
		return errors.New("--listen is missing: HOST:PORT for mounts, chunk servers and other metadata servers")
	case c.ID == 0:
		return errors.New("--id 0: ids start at 1")
	case len(c.Peers) > 0 && c.Peers[c.ID] == "":
		return fmt.Errorf("--peers does not name this server's own id %d", c.ID)
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("--listen %q: want HOST:PORT: %w", c.Listen, err)
	}
	return c.Layout.Validate()
}

// Node is a running metadata server.
type Node struct {
	sched   *sched.Real
	disk    *vfs.OS
	store   *bolt.Store
	replica *replica.Replica
	server  *server.Server
	grpc    *grpc.Server
	lis     net.Listener
	serving sync.WaitGroup
	peers   *peers
	log     *slog.Logger
}

// Start brings the server up; it serves when Start returns, once a leader is
// elected.
func Start(ctx context.Context, cfg Config) (*Node, error) {
	n := &Node{sched: new(sched.Real), log: cfg.Log}
	if err := n.start(ctx, cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("metadata server in %s: %w", cfg.Dir, err), n.Close(ctx))
	}
	return n, nil
}

func (n *Node) start(ctx context.Context, cfg Config) error {
	err := os.MkdirAll(cfg.Dir, 0o700)
	if err != nil {
		return err
	}
	if n.disk, err = vfs.NewOS(cfg.Dir); err != nil {
		return err
	}
	if n.store, err = bolt.Open(filepath.Join(cfg.Dir, "store.db")); err != nil {
		return err
	}
	var lc net.ListenConfig
	if n.lis, err = lc.Listen(ctx, "tcp", cfg.Listen); err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	n.grpc = grpc.NewServer(stream.ServerOptions()...)
	n.peers = newPeers(&cfg, n.grpc, n.cluster)
	lead := new(leadership)
	n.replica, err = replica.Open(replica.Config{
		ID: cfg.ID, Peers: cfg.Peers, FS: n.disk, Store: n.store, Machine: meta.New(), Sched: n.sched,
		Transport: n.peers.transport(), Log: cfg.Log, Fatal: cfg.Fatal, OnLeader: lead.changed,
	})
	if err != nil {
		return err
	}
	n.server = server.New(server.Config{
		Replica: n.replica, Sched: n.sched, Log: cfg.Log, Layout: cfg.Layout,
	})
	lead.forward(n.server.OnLeader)
	stream.Register(n.grpc, n.server.Serve)
	n.peers.serve(n.replica)
	n.serving.Go(func() {
		if err := n.grpc.Serve(n.lis); err != nil {
			n.log.Error("metadata endpoint ended", "err", err)
		}
	})
	return nil
}

// Addr is the address that the server listens on, also when port 0 was asked for.
func (n *Node) Addr() string { return n.lis.Addr().String() }

// Status is the replica's.
func (n *Node) Status() replica.Status { return n.replica.Status() }

// cluster is the id of the cluster, zero before it is founded.
func (n *Node) cluster() ids.UUID {
	var info meta.Info
	err := n.replica.View(func(r kv.Reader) (err error) {
		info, err = meta.ReadInfo(r)
		return err
	})
	if err != nil {
		n.log.Warn("the cluster's id cannot be read", "err", err)
	}
	return info.Cluster
}

// Close flushes the state and stops. What was acknowledged is durable without it.
func (n *Node) Close(ctx context.Context) error {
	var errs []error
	if n.server != nil {
		n.server.Close()
	}
	if n.replica != nil {
		errs = append(errs, n.replica.Close(ctx))
	}
	if n.peers != nil {
		n.peers.close()
	}
	if n.grpc != nil {
		n.grpc.Stop()
	}
	n.serving.Wait()
	if n.lis != nil {
		_ = n.lis.Close() // closed already when it was served
	}
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	n.sched.Wait()
	return errors.Join(errs...)
}

// leadership passes the replica's changes on to the server, which is made
// after the replica: what came before is kept.
type leadership struct {
	mu struct {
		sync.Mutex
		to      func(leading bool, term uint64)
		leading bool
		term    uint64
		known   bool
	}
}

func (l *leadership) changed(leading bool, term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.leading, l.mu.term, l.mu.known = leading, term, true
	if l.mu.to != nil {
		l.mu.to(leading, term)
	}
}

func (l *leadership) forward(to func(leading bool, term uint64)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.to = to
	if l.mu.known {
		to(l.mu.leading, l.mu.term)
	}
}
