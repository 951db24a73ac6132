package fuseconn

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseMountinfo(t *testing.T) {
	const text = `27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
99 27 0:52 / /mnt/my\040dir rw,nosuid shared:7 master:2 - fuse.ckptfs meta\0401:7000 rw,user_id=0
half a line
100 27 0:53 / /mnt/a\134b rw - tmpfs none rw
`
	got, err := parseMountinfo(strings.NewReader(text))
	require.NoError(t, err)
	require.Equal(t, []mountEntry{
		{dev: "254:0", point: "/", fsType: "ext4", source: "/dev/vda"},
		{dev: "0:52", point: "/mnt/my dir", fsType: "fuse.ckptfs", source: "meta 1:7000"},
		{dev: "0:53", point: `/mnt/a\b`, fsType: "tmpfs", source: "none"},
	}, got)
	id, err := got[1].conn()
	require.NoError(t, err)
	require.Equal(t, 52, id)
	_, err = mountEntry{dev: "x"}.conn()
	require.Error(t, err)
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add("99 27 0:52 / /mnt/a\\040 rw shared:7 - fuse.ckptfs src rw")
	f.Add("\\777 - \\04")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parseMountinfo(strings.NewReader(text))
		if err == nil {
			require.LessOrEqual(t, len(all), strings.Count(text, "\n")+1)
		}
	})
}

func TestOptions(t *testing.T) {
	o := Options{ReadOnly: true, Atime: AtimeStrict, NoDirAtime: true, AllowOther: true}.withDefaults()
	require.EqualValues(t, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NODIRATIME|unix.MS_STRICTATIME, o.flags())
	data := o.data(5, unix.S_IFDIR)
	require.Contains(t, data, "fd=5,rootmode=40000,")
	require.Contains(t, data, "max_read=1048576")
	require.True(t, strings.HasSuffix(data, "default_permissions,allow_other"))
	o = Options{Dev: true, Suid: true, NoExec: true, Atime: AtimeRel}.withDefaults()
	require.EqualValues(t, unix.MS_NOEXEC|unix.MS_RELATIME, o.flags())
	require.NotContains(t, o.data(5, unix.S_IFDIR), "allow_other")
	require.Equal(t, "ckptfs", o.Source)
	o.Log = slog.New(slog.DiscardHandler)
	require.Zero(t, o.library().MaxInflightRequestBytes, "it starves interrupts")
	require.GreaterOrEqual(t, o.library().MaxBackground, 256)
}

func TestEveryWantedCapabilityHasAName(t *testing.T) {
	var named uint64
	for _, c := range capNames {
		named |= c.bit
	}
	require.EqualValues(t, uint64(wanted), named)
	require.Zero(t, wanted&refused)
	require.Empty(t, missing(wanted))
	require.Equal(t, []string{"posix_acl"}, missing(wanted&^capNames[0].bit))
}

func TestResolve(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "real"), 0o755))
	require.NoError(t, os.Symlink("real", link))
	got, err := resolve(link)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "real"), got)
	for _, bad := range []string{"no", "no/such"} {
		_, err = resolve(filepath.Join(dir, bad))
		require.ErrorIs(t, err, errkind.NotFound)
	}
	got, err = resolve("/proc")
	require.NoError(t, err)
	require.Equal(t, "/proc", got)
}

func TestKilled(t *testing.T) {
	require.False(t, killed("/proc/self"))
	require.True(t, killed("/proc/0"))
	dir := t.TempDir()
	for text, want := range map[string]bool{
		"State:\tZ (zombie)\n":                                true,
		"State:\tD (disk sleep)\nShdPnd:\t0000000000000100\n": true,
		"State:\tS (sleeping)\nShdPnd:\t0000000000004000\n":   false,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "status"), []byte(text), 0o644))
		require.Equal(t, want, killed(dir), text)
	}
}
