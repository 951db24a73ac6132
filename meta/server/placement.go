package server

import (
	"cmp"
	"slices"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Limits of placement. A block lies in one set, so the number of sets bounds
// the combinations of disks whose loss at once loses data (copysets), and the
// sets a disk is in bound how many others help to rebuild it.
const (
	setsPerDisk = 8
	maxSets     = 512
	// spare is how many disks more than K+M a set names, for the client that
	// asks more servers than it needs.
	spare = 1
	// minFree is how many bytes a disk must have free to be named at all.
	minFree = 256 << 20
)

// usable reports whether new chunks may go to the disk.
func usable(m *cluster.Map, d *cluster.Disk) bool {
	s := m.Server(d.Server)
	return s != nil && s.Up && d.State == cluster.DiskActive && d.Free >= min(minFree, d.Capacity/64)
}

// pick is one usable disk while sets are made.
type pick struct {
	id     ids.DiskID
	server ids.ServerID
	host   string
	rack   string
	free   uint64
	want   float64 // sets that it should be in
	got    float64
}

// makeSets returns placement sets of width disks and a spare, as far as there
// are enough domains; a function of its arguments alone. Within a set no two
// disks share a domain: a host, or a disk where m.DiskDomains, and then a host
// has at most ⌈width/hosts⌉ of the first width disks (data-path rule 1).
// Racks are spread as far as they go. Disks with more free space are in more
// sets, and sets with more of it weigh more.
func makeSets(m *cluster.Map, width int) []cluster.PlacementSet {
	picks := usableDisks(m)
	if len(picks) == 0 || width <= 0 {
		return nil
	}
	n := max(1, min(maxSets, len(picks)*setsPerDisk/width))
	var free float64
	for _, p := range picks {
		free += float64(p.free) + 1
	}
	for _, p := range picks {
		p.want = float64(n*width) * (float64(p.free) + 1) / free
	}
	perHost := 1
	if m.DiskDomains {
		hosts := max(1, m.Hosts())
		perHost = (width + hosts - 1) / hosts
	}
	seen := make(map[string]bool)
	var sets []cluster.PlacementSet
	for round := range 2 * n {
		if len(sets) == n {
			break
		}
		set := oneSet(picks, width, perHost, uint64(round))
		if key := setKey(set.Disks); !seen[key] {
			seen[key] = true
			sets = append(sets, set)
		}
	}
	return sets
}

func usableDisks(m *cluster.Map) []*pick {
	var picks []*pick
	for i := range m.Disks {
		if d := &m.Disks[i]; usable(m, d) {
			s := m.Server(d.Server)
			picks = append(picks, &pick{id: d.ID, server: s.ID, host: s.Host, rack: s.Rack, free: d.Free})
		}
	}
	return picks
}

// oneSet takes, width + spare times, the disk whose domain and rack are used
// least and that is furthest behind what it should be in; ties fall by a hash
// of the round, so that sets differ.
func oneSet(picks []*pick, width, perHost int, round uint64) cluster.PlacementSet {
	hosts, racks := make(map[string]int), make(map[string]int)
	left := slices.Clone(picks)
	var set cluster.PlacementSet
	weight := ^uint64(0)
	for len(set.Disks) < width+spare {
		limit := perHost
		if len(set.Disks) >= width && perHost > 1 {
			limit++ // the spare takes another's place when it is used
		}
		best := -1
		for i, p := range left {
			if hosts[p.host] < limit && (best < 0 || before(p, left[best], hosts, racks, round) < 0) {
				best = i
			}
		}
		if best < 0 {
			break
		}
		p := left[best]
		left = slices.Delete(left, best, best+1)
		set.Disks = append(set.Disks, p.id)
		hosts[p.host]++
		racks[p.rack]++
		if len(set.Disks) <= width {
			p.got++
			weight = min(weight, p.free)
		}
	}
	set.Weight = uint32(min(max(weight>>28, 1), 1<<20)) // in units of 256 MiB
	return set
}

// before orders two disks by how well they fit next into a set.
func before(a, b *pick, hosts, racks map[string]int, round uint64) int {
	return cmp.Or(
		cmp.Compare(hosts[a.host], hosts[b.host]),
		cmp.Compare(racks[a.rack], racks[b.rack]),
		cmp.Compare(a.got/a.want, b.got/b.want),
		cmp.Compare(mix(round, a.id), mix(round, b.id)),
		cmp.Compare(a.id, b.id),
	)
}

// mix is a hash that orders disks differently in each round (splitmix64).
func mix(round uint64, id ids.DiskID) uint64 {
	z := (round+1)*0x9e3779b97f4a7c15 + uint64(id)*0xd1342543de82ef95
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// setKey tells sets of equal disks, in whatever order, apart from others.
func setKey(disks []ids.DiskID) string {
	sorted := slices.Clone(disks)
	slices.Sort(sorted)
	key := make([]byte, 0, 4*len(sorted))
	for _, d := range sorted {
		key = append(key, byte(d), byte(d>>8), byte(d>>16), byte(d>>24))
	}
	return string(key)
}

// target chooses the disk for a rebuilt chunk: in a domain that no other chunk
// of the block uses, the one with the most room. The disk that held the chunk
// comes last, for a damaged chunk that has no other place. False when there is
// none; avoid tells of disks that are no good now.
func target(m *cluster.Map, b *ids.Block, index uint8, avoid func(ids.DiskID) bool) (ids.DiskID, bool) {
	perHost := 1
	if m.DiskDomains {
		hosts := max(1, m.Hosts())
		perHost = (b.Layout.Width() + hosts - 1) / hosts
	}
	used := make(map[ids.DiskID]bool)
	onHost := make(map[string]int)
	for i, d := range b.Disks {
		if d == 0 || i == int(index) {
			continue
		}
		used[d] = true
		if disk := m.Disk(d); disk != nil {
			if s := m.Server(disk.Server); s != nil {
				onHost[s.Host]++
			}
		}
	}
	held := b.Disks[index]
	var best *cluster.Disk
	for i := range m.Disks {
		d := &m.Disks[i]
		if !usable(m, d) || used[d.ID] || avoid(d.ID) || onHost[m.Server(d.Server).Host] >= perHost {
			continue
		}
		if best == nil || better(d, best, held) {
			best = d
		}
	}
	if best == nil {
		return 0, false
	}
	return best.ID, true
}

func better(a, b *cluster.Disk, held ids.DiskID) bool {
	if (a.ID == held) != (b.ID == held) {
		return b.ID == held
	}
	return a.Free > b.Free
}
