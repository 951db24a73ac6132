package server

import (
	"fmt"
	"strings"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/meta"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/kv"
)

// totals answers StatFS and GetStatus: the state's numbers, with the space
// that heartbeats told last; with mu held.
func (s *Server) totals(l *leader, q *read) {
	q.answer = func(r kv.Reader) ([]byte, error) {
		t, err := meta.ReadTotals(r)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		m := l.cluster.current()
		m.Version, m.Sets = l.cluster.cmap.Version, l.cluster.cmap.Sets
		layout := l.cluster.layout
		s.mu.Unlock()
		t.Capacity, t.Free = 0, 0
		for i := range m.Disks {
			if d := &m.Disks[i]; d.State != cluster.DiskDead && d.State != cluster.DiskRemoved {
				t.Capacity += d.Capacity
				if d.State == cluster.DiskActive {
					t.Free += d.Free
				}
			}
		}
		h := &api.Reply{Epoch: l.epoch}
		if q.h.Kind == api.KindStatFS {
			return api.EncodeReply(h, &t), nil
		}
		info, err := meta.ReadInfo(r)
		if err != nil {
			return nil, err
		}
		st := api.Status{
			Map: m, Totals: t, Sessions: info.Counts.Sessions, Orphans: info.Counts.Orphans, DeadBlocks: info.Counts.Dead,
			RepairQueue: info.Counts.Repairs, Blocks: info.Counts.Blocks, FeatureLevel: info.Feature,
		}
		rs := s.cfg.Replica.Status()
		st.Applied = rs.Applied
		for _, x := range rs.Members {
			st.Members = append(st.Members, api.Member{ID: x.ID, Addr: x.Addr, Leader: x.Leader, Voter: true})
		}
		st.Warnings = warnings(&m, layout.Width(), int(layout.M), layout.String(), info.Counts.Repairs)
		return api.EncodeReply(h, &st), nil
	}
}

// warnings says in words for people what is not as it should be.
func warnings(m *cluster.Map, width, spare int, layout string, repairs uint64) []string {
	var out []string
	var down, full []string
	good := 0
	disks := 0
	for i := range m.Disks {
		d := &m.Disks[i]
		if d.State == cluster.DiskRemoved {
			continue
		}
		disks++
		sv := m.Server(d.Server)
		switch {
		case d.State == cluster.DiskDead || sv == nil || !sv.Up:
			name := fmt.Sprintf("disk %d", d.ID)
			if sv != nil {
				name += fmt.Sprintf(" (server %d, %s)", sv.ID, sv.Addr)
			}
			down = append(down, name)
		case d.State == cluster.DiskReadOnly:
			full = append(full, fmt.Sprintf("disk %d", d.ID))
			good++
		default:
			good++
		}
	}
	if len(down) > 0 {
		out = append(out, fmt.Sprintf("%d of %d disks are down: %s; %s", len(down), disks, strings.Join(down, ", "), outlook(len(down), spare, layout)))
	}
	if len(full) > 0 {
		out = append(out, fmt.Sprintf("%d of %d disks take no new data (full, failing or read-only): %s", len(full), disks, strings.Join(full, ", ")))
	}
	switch {
	case good <= spare:
		out = append(out, fmt.Sprintf("%d disks can be reached, %s needs at least %d: nothing can be written", good, layout, spare+1))
	case good < width:
		out = append(out, fmt.Sprintf("%d disks can be reached, %s wants %d: new data is written in a narrower layout of the same redundancy", good, layout, width))
	}
	if m.DiskDomains && len(m.Disks) > 0 {
		out = append(out, fmt.Sprintf("%d hosts are registered, %s wants %d: chunks of one block share hosts, and the loss of a host may lose data", m.Hosts(), layout, width))
	}
	if repairs > 0 {
		out = append(out, fmt.Sprintf("%d chunks wait to be rebuilt", repairs))
	}
	return out
}

// outlook says what the loss of disks means for data in the founding layout.
func outlook(down, spare int, layout string) string {
	switch {
	case down < spare:
		return fmt.Sprintf("data in %s that was whole survives the loss of %d more", layout, spare-down)
	case down == spare:
		return fmt.Sprintf("a further loss would make data in %s unreadable where the disks share blocks", layout)
	}
	return fmt.Sprintf("data in %s may be unreadable until they are back", layout)
}
