package fs

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
	"github.com/stretchr/testify/require"
)

func TestPosix(t *testing.T) { bothEngines(t, checkPosix) }

func checkPosix(t *testing.T, c *cluster) {
	m := c.mount(t)
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		t.Run(name, func(t *testing.T) {
			if name == "FcntlFlockLocksFile" {
				t.Skip("expects a process to conflict with itself: ext4 fails it, too")
			}
			dir := m.path("%s", name)
			require.NoError(t, os.Mkdir(dir, 0o755))
			posixtest.All[name](t, dir)
			require.NoError(t, os.RemoveAll(dir))
		})
	}
}
