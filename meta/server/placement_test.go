package server

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// drawMap makes a cluster of any shape.
func drawMap(t *rapid.T, width int) *cluster.Map {
	m := &cluster.Map{}
	for s := range rapid.IntRange(0, 12).Draw(t, "servers") {
		m.Servers = append(m.Servers, cluster.Server{
			ID: ids.ServerID(s + 1), Up: rapid.IntRange(0, 4).Draw(t, "up") > 0,
			Host: fmt.Sprintf("host%d", rapid.IntRange(0, 9).Draw(t, "host")),
			Rack: fmt.Sprintf("rack%d", rapid.IntRange(0, 2).Draw(t, "rack")),
		})
		for range rapid.IntRange(0, 4).Draw(t, "disks") {
			m.Disks = append(m.Disks, cluster.Disk{
				ID: ids.DiskID(len(m.Disks) + 1), Server: ids.ServerID(s + 1), Capacity: 1 << 40,
				State: cluster.DiskState(rapid.IntRange(0, 12).Draw(t, "state") / 3 % 5),
				Free:  rapid.Uint64Range(0, 1<<40).Draw(t, "free"),
			})
		}
	}
	m.DiskDomains = m.Hosts() < width
	return m
}

func TestPlacementSets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.IntRange(1, 12).Draw(t, "width")
		m := drawMap(t, width)
		sets := makeSets(m, width)
		require.Equal(t, sets, makeSets(m, width), "the same cluster has the same sets")
		require.LessOrEqual(t, len(sets), maxSets)
		hosts := map[string]bool{}
		for _, p := range usableDisks(m) {
			hosts[p.host] = true
		}
		require.Equal(t, len(hosts) > 0, len(sets) > 0)
		perHost := 1
		if m.DiskDomains {
			perHost = (width + m.Hosts() - 1) / max(1, m.Hosts())
		}
		for _, set := range sets {
			checkSet(t, m, set, width, perHost)
			if !m.DiskDomains {
				require.Len(t, set.Disks, min(len(hosts), width+spare), "as many domains as there are")
			}
		}
	})
}

func checkSet(t *rapid.T, m *cluster.Map, set cluster.PlacementSet, width, perHost int) {
	require.NotZero(t, set.Weight)
	require.LessOrEqual(t, len(set.Disks), width+spare)
	onHost, seen := map[string]int{}, map[ids.DiskID]bool{}
	for i, id := range set.Disks {
		d := m.Disk(id)
		require.True(t, usable(m, d), "disk %d", id)
		require.False(t, seen[id], "disk %d twice", id)
		seen[id] = true
		onHost[m.Server(d.Server).Host]++
		if i < width {
			require.LessOrEqual(t, onHost[m.Server(d.Server).Host], perHost)
		}
	}
}

func TestPlacementSpreadsAndFollowsFreeSpace(t *testing.T) {
	m := &cluster.Map{}
	for i := range 24 {
		m.Servers = append(m.Servers, cluster.Server{ID: ids.ServerID(i + 1), Up: true, Host: fmt.Sprint(i), Rack: fmt.Sprint(i % 3)})
		free := uint64(1 << 40)
		if i < 4 {
			free /= 8
		}
		m.Disks = append(m.Disks, cluster.Disk{ID: ids.DiskID(i + 1), Server: ids.ServerID(i + 1), Capacity: 1 << 40, Free: free})
	}
	share := map[ids.DiskID]int{}
	sets := makeSets(m, 6)
	require.Greater(t, len(sets), 8)
	for _, set := range sets {
		inRack := map[string]int{}
		for _, d := range set.Disks[:6] {
			share[d]++
			inRack[m.Server(m.Disk(d).Server).Rack]++
		}
		require.Equal(t, map[string]int{"0": 2, "1": 2, "2": 2}, inRack, "racks share a block evenly")
	}
	for i := range m.Disks {
		require.NotZero(t, share[m.Disks[i].ID], "disk %d is in no set", m.Disks[i].ID)
	}
	require.Less(t, 3*share[1], share[24], "a nearly full disk is in few sets")
}

func TestRepairTarget(t *testing.T) {
	m := &cluster.Map{}
	for i := range 4 {
		m.Servers = append(m.Servers, cluster.Server{ID: ids.ServerID(i + 1), Up: true, Host: fmt.Sprint(i)})
		m.Disks = append(m.Disks, cluster.Disk{ID: ids.DiskID(i + 1), Server: ids.ServerID(i + 1), Capacity: 1 << 40, Free: uint64(i+1) << 36})
	}
	none := func(ids.DiskID) bool { return false }
	b := &ids.Block{Layout: ids.Copies(3), Disks: []ids.DiskID{1, 2, 0}}
	d, ok := target(m, b, 2, none)
	require.True(t, ok)
	require.Equal(t, ids.DiskID(4), d, "the one with the most room")
	d, ok = target(m, b, 2, func(d ids.DiskID) bool { return d == 4 })
	require.True(t, ok)
	require.Equal(t, ids.DiskID(3), d)
	b.Disks = []ids.DiskID{1, 2, 4} // chunk 2 is damaged where it is
	d, ok = target(m, b, 2, none)
	require.True(t, ok)
	require.Equal(t, ids.DiskID(3), d, "another disk, although it has less room")
	m.Servers[2].Up = false
	d, ok = target(m, b, 2, none)
	require.True(t, ok)
	require.Equal(t, ids.DiskID(4), d, "no other place")
	m.Servers[3].Up = false
	_, ok = target(m, b, 2, none)
	require.False(t, ok)
	require.True(t, rebuildable(m, &ids.Block{Layout: ids.RS(2, 1), Disks: []ids.DiskID{1, 2, 0}}, 2))
	require.False(t, rebuildable(m, &ids.Block{Layout: ids.RS(2, 1), Disks: []ids.DiskID{1, 3, 0}}, 2))
}
