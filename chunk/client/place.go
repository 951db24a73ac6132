package client

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// placement hands out disks for the chunks of one block, best first, never two
// in one failure domain (rule 1). Not safe for concurrent use.
type placement struct {
	order       []peer         // usable disks, by preference
	used        map[string]int // chunks per host
	taken       map[ids.DiskID]bool
	diskDomains bool
	hostCap     int // chunks per host when a domain is a disk
	isOut       func(ids.ServerID) bool

	disks, hosts int // that the map has, for error texts
	outs         int // disks left out because their server does not answer
}

// place orders the disks of the newest map for one block of width chunks. skip
// holds disks that have just refused.
func (c *Client) place(m *cluster.Map, width int, skip map[ids.DiskID]bool) *placement {
	p := &placement{
		used: make(map[string]int), taken: make(map[ids.DiskID]bool),
		diskDomains: m.DiskDomains, hostCap: width, isOut: c.health.isOut,
		disks: len(m.Disks), hosts: m.Hosts(),
	}
	if p.hosts > 0 {
		p.hostCap = (width + p.hosts - 1) / p.hosts
	}
	up, down := c.usable(m, skip, p)
	if set := c.chooseSet(m.Sets, width, up); set != nil {
		up = moveFirst(up, set.Disks)
	}
	p.order = append(up, down...)
	return p
}

// usable returns the disks that may take chunks, in weighted random order:
// first those whose server sends heartbeats, then the others.
func (c *Client) usable(m *cluster.Map, skip map[ids.DiskID]bool, p *placement) (up, down []peer) {
	type weighted struct {
		peer
		key float64
		up  bool
	}
	var all []weighted
	for i := range m.Disks {
		d := &m.Disks[i]
		s := m.Server(d.Server)
		if d.State != cluster.DiskActive || s == nil || skip[d.ID] {
			continue
		}
		if c.health.isOut(s.ID) {
			p.outs++
			continue
		}
		// Sorting by -ln(u)/weight draws without replacement, by weight.
		u := (float64(c.sched.Uint64()>>11) + 1) / (1 << 53)
		free := float64(max(d.Free, 1))
		all = append(all, weighted{peer{d.ID, s.ID, s.Addr, s.Host}, -math.Log(u) / free, s.Up})
	}
	slices.SortStableFunc(all, func(a, b weighted) int { return cmp.Compare(a.key, b.key) })
	for _, w := range all {
		if w.up {
			up = append(up, w.peer)
		} else {
			down = append(down, w.peer)
		}
	}
	return up, down
}

// chooseSet draws a placement set by weight among those with enough usable
// disks; nil when there is none.
func (c *Client) chooseSet(sets []cluster.PlacementSet, width int, up []peer) *cluster.PlacementSet {
	ok := make(map[ids.DiskID]bool, len(up))
	for _, p := range up {
		ok[p.disk] = true
	}
	fits := func(s *cluster.PlacementSet) bool {
		n := 0
		for _, d := range s.Disks {
			if ok[d] {
				n++
			}
		}
		return n >= width
	}
	var total uint64
	var usable []*cluster.PlacementSet
	for i := range sets {
		if fits(&sets[i]) && sets[i].Weight > 0 {
			usable = append(usable, &sets[i])
			total += uint64(sets[i].Weight)
		}
	}
	if total == 0 {
		return nil
	}
	x := c.sched.Uint64() % total
	for _, s := range usable {
		if x < uint64(s.Weight) {
			return s
		}
		x -= uint64(s.Weight)
	}
	return nil
}

// moveFirst puts the listed disks first, in their order.
func moveFirst(all []peer, disks []ids.DiskID) []peer {
	out := make([]peer, 0, len(all))
	for _, d := range disks {
		if i := slices.IndexFunc(all, func(p peer) bool { return p.disk == d }); i >= 0 {
			out = append(out, all[i])
		}
	}
	for _, p := range all {
		if !slices.Contains(disks, p.disk) {
			out = append(out, p)
		}
	}
	return out
}

// next returns the next disk whose domain is free; with disks as domains, one
// on the least used host.
func (p *placement) next() (peer, bool) {
	best := -1
	for i, c := range p.order {
		n := p.used[c.host]
		if p.taken[c.disk] || p.isOut(c.server) || n >= p.limit() {
			continue
		}
		if best < 0 || n < p.used[p.order[best].host] {
			best = i
		}
	}
	if best < 0 {
		return peer{}, false
	}
	c := p.order[best]
	p.claim(c)
	return c, true
}

func (p *placement) limit() int {
	if p.diskDomains {
		return p.hostCap
	}
	return 1
}

// claim marks a disk and its domain as used.
func (p *placement) claim(c peer) {
	p.taken[c.disk] = true
	p.used[c.host]++
}

// drop frees the domain of a disk that will not be used; the disk itself is
// not handed out again.
func (p *placement) drop(c peer) { p.used[c.host]-- }

// String describes what the map offers, for errors.
func (p *placement) String() string {
	return fmt.Sprintf("%d disks on %d hosts registered, %d usable and answering, %d behind servers that do not answer",
		p.disks, p.hosts, len(p.order), p.outs)
}
