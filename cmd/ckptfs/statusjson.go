package main

import (
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// The JSON of `ckptfs status`: names are stable, numbers are bytes and counts.
type (
	statusJSON struct {
		Cluster      ids.UUID     `json:"cluster"`
		Healthy      bool         `json:"healthy"`
		Warnings     []string     `json:"warnings"`
		Layout       string       `json:"root_layout"`
		Incarnation  uint16       `json:"incarnation"`
		FeatureLevel uint32       `json:"feature_level"`
		Capacity     uint64       `json:"capacity_bytes"`
		Free         uint64       `json:"free_bytes"`
		Live         uint64       `json:"live_bytes"`
		Inodes       uint64       `json:"inodes"`
		Blocks       uint64       `json:"blocks"`
		Sessions     uint64       `json:"sessions"`
		Orphans      uint64       `json:"orphans"`
		DeadChunks   uint64       `json:"chunks_to_delete"`
		RepairQueue  uint64       `json:"repair_queue"`
		Applied      uint64       `json:"applied_index"`
		DiskDomains  bool         `json:"domain_is_disk"`
		Members      []memberJSON `json:"metadata_servers"`
		Servers      []serverJSON `json:"chunk_servers"`
		Disks        []diskJSON   `json:"disks"`
	}
	memberJSON struct {
		ID     uint64 `json:"id"`
		Addr   string `json:"address"`
		Leader bool   `json:"leader"`
	}
	serverJSON struct {
		ID   uint32 `json:"id"`
		Addr string `json:"address"`
		Host string `json:"host"`
		Rack string `json:"rack,omitempty"`
		Up   bool   `json:"up"`
	}
	diskJSON struct {
		ID       uint32   `json:"id"`
		UUID     ids.UUID `json:"uuid"`
		Server   uint32   `json:"server"`
		State    string   `json:"state"`
		Capacity uint64   `json:"capacity_bytes"`
		Free     uint64   `json:"free_bytes"`
	}
)

func jsonStatus(s *api.Status) *statusJSON {
	j := &statusJSON{
		Cluster: s.Map.Cluster, Healthy: len(s.Warnings) == 0, Warnings: append([]string{}, s.Warnings...),
		Layout: s.Totals.Layout.String(), Incarnation: uint16(s.Map.Incarnation), FeatureLevel: s.FeatureLevel,
		Capacity: s.Totals.Capacity, Free: s.Totals.Free, Live: s.Totals.Bytes, Inodes: s.Totals.Inodes, Blocks: s.Blocks,
		Sessions: s.Sessions, Orphans: s.Orphans, DeadChunks: s.DeadBlocks, RepairQueue: s.RepairQueue, Applied: s.Applied,
		DiskDomains: s.Map.DiskDomains, Members: []memberJSON{}, Servers: []serverJSON{}, Disks: []diskJSON{},
	}
	for _, m := range s.Members {
		j.Members = append(j.Members, memberJSON{m.ID, m.Addr, m.Leader})
	}
	for _, v := range s.Map.Servers {
		j.Servers = append(j.Servers, serverJSON{uint32(v.ID), v.Addr, v.Host, v.Rack, v.Up})
	}
	for _, d := range s.Map.Disks {
		v := s.Map.Server(d.Server)
		if v == nil {
			v = &cluster.Server{}
		}
		j.Disks = append(j.Disks, diskJSON{uint32(d.ID), d.UUID, uint32(d.Server), diskState(&d, v), d.Capacity, d.Free})
	}
	return j
}
