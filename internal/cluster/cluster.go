// Package cluster describes the chunk servers and disks of a cluster as the
// metadata service publishes them: the map that clients place chunks by.
package cluster

import (
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// DiskState is what the cluster thinks of a disk. It says nothing of whether
// its server answers now: that is Server.Up.
type DiskState uint8

// The states of a disk.
const (
	DiskActive   DiskState = iota // takes new chunks
	DiskReadOnly                  // full, failing or read-only: serves reads
	DiskDraining                  // being emptied by an operator
	DiskDead                      // past its grace period: its chunks are being rebuilt
	DiskRemoved                   // gone for good
)

func (s DiskState) String() string {
	if int(s) < len(diskStates) {
		return diskStates[s]
	}
	return "unknown"
}

var diskStates = [...]string{"active", "read-only", "draining", "dead", "removed"}

// Server is one chunk server.
type Server struct {
	ID   ids.ServerID
	Addr string // host:port of the data protocol
	Host string // failure domain
	Rack string // wider failure domain, may be empty
	Up   bool   // heartbeats arrive
}

// Disk is one data directory of one chunk server.
type Disk struct {
	ID       ids.DiskID
	UUID     ids.UUID
	Server   ids.ServerID
	State    DiskState
	Capacity uint64 // bytes
	Free     uint64 // bytes that new chunks may take
}

// PlacementSet is an ordered set of disks in distinct failure domains: advice
// to clients about where the chunks of one block may go.
type PlacementSet struct {
	Disks  []ids.DiskID
	Weight uint32 // relative share of new blocks
}

// Map is one version of the cluster map.
type Map struct {
	Version     uint64
	Cluster     ids.UUID
	Incarnation ids.Incarnation
	Servers     []Server // ordered by ID
	Disks       []Disk   // ordered by ID
	// DiskDomains says that the registered hosts, up or not, are fewer than
	// the root layout's K+M, so that a failure domain is a disk (data-path rule 1).
	DiskDomains bool
	Sets        []PlacementSet
}

// Server returns the server with the id, or nil.
func (m *Map) Server(id ids.ServerID) *Server {
	for i := range m.Servers {
		if m.Servers[i].ID == id {
			return &m.Servers[i]
		}
	}
	return nil
}

// Disk returns the disk with the id, or nil.
func (m *Map) Disk(id ids.DiskID) *Disk {
	for i := range m.Disks {
		if m.Disks[i].ID == id {
			return &m.Disks[i]
		}
	}
	return nil
}

// Hosts counts the distinct hosts of all registered servers, up or not.
func (m *Map) Hosts() int {
	seen := make(map[string]struct{}, len(m.Servers))
	for i := range m.Servers {
		seen[m.Servers[i].Host] = struct{}{}
	}
	return len(seen)
}

// Code encodes or decodes the map.
func (m *Map) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Version)
	c.UUID(&m.Cluster)
	codec.VarInt(c, &m.Incarnation)
	codec.Slice(c, &m.Servers, func(c *codec.Coder, s *Server) {
		codec.VarInt(c, &s.ID)
		c.String(&s.Addr)
		c.String(&s.Host)
		c.String(&s.Rack)
		c.Bool(&s.Up)
	})
	codec.Slice(c, &m.Disks, func(c *codec.Coder, d *Disk) {
		codec.VarInt(c, &d.ID)
		c.UUID(&d.UUID)
		codec.VarInt(c, &d.Server)
		codec.VarInt(c, &d.State)
		codec.VarInt(c, &d.Capacity)
		codec.VarInt(c, &d.Free)
	})
	c.Bool(&m.DiskDomains)
	codec.Slice(c, &m.Sets, func(c *codec.Coder, s *PlacementSet) {
		codec.Slice(c, &s.Disks, func(c *codec.Coder, d *ids.DiskID) { codec.VarInt(c, d) })
		codec.VarInt(c, &s.Weight)
	})
}
