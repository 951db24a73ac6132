package fs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/meta/api"
)

func getXattr(path, name string) (string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Lgetxattr(path, name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

func TestXattr(t *testing.T) {
	c := newCluster()
	m, other := c.mount(t), c.mount(t)
	path := m.path("f")
	require.NoError(t, os.WriteFile(path, nil, 0o644))
	for _, name := range []string{"user.a", "trusted.b", "security.c"} {
		require.NoError(t, unix.Setxattr(path, name, []byte(name), 0), name)
		got, err := getXattr(other.path("f"), name)
		require.NoError(t, err)
		require.Equal(t, name, got)
	}
	require.ErrorIs(t, unix.Setxattr(path, "user.a", nil, unix.XATTR_CREATE), unix.EEXIST)
	require.ErrorIs(t, unix.Setxattr(path, "user.z", nil, unix.XATTR_REPLACE), unix.ENODATA)
	require.NoError(t, unix.Setxattr(path, "user.a", nil, unix.XATTR_REPLACE))
	got, err := getXattr(path, "user.a")
	require.NoError(t, err)
	require.Empty(t, got)
	require.ErrorIs(t, unix.Setxattr(path, "other.a", []byte("x"), 0), unix.EOPNOTSUPP)
	_, err = getXattr(path, "user.missing")
	require.ErrorIs(t, err, unix.ENODATA)

	buf := make([]byte, 1000)
	n, err := unix.Listxattr(path, buf)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"user.a", "trusted.b", "security.c", ""}, strings.Split(string(buf[:n]), "\x00"))
	_, err = unix.Listxattr(path, buf[:5])
	require.ErrorIs(t, err, unix.ERANGE)
	size, err := unix.Listxattr(path, nil)
	require.NoError(t, err)
	require.Equal(t, n, size)
	require.NoError(t, unix.Removexattr(path, "user.a"))
	require.ErrorIs(t, unix.Removexattr(path, "user.a"), unix.ENODATA)
}

func TestXattrSizes(t *testing.T) {
	m := newCluster().mount(t)
	path := m.path("f")
	require.NoError(t, os.WriteFile(path, nil, 0o644))
	big := pattern(64 << 10)
	require.NoError(t, unix.Setxattr(path, "user.big", big, 0))
	got, err := getXattr(path, "user.big")
	require.NoError(t, err)
	require.True(t, bytes.Equal(big, []byte(got)))
	_, err = unix.Getxattr(path, "user.big", make([]byte, 100))
	require.ErrorIs(t, err, unix.ERANGE)
	n, err := unix.Getxattr(path, "user.big", nil)
	require.NoError(t, err)
	require.Equal(t, len(big), n)
	require.ErrorIs(t, unix.Setxattr(path, "user.more", make([]byte, 64<<10+1), 0), unix.E2BIG)
	long := "user." + strings.Repeat("n", 250)
	require.NoError(t, unix.Setxattr(path, long, []byte("x"), 0))
	require.ErrorIs(t, unix.Setxattr(path, long+"n", []byte("x"), 0), unix.ERANGE)
	for i := range 1000 {
		require.NoError(t, unix.Setxattr(path, fmt.Sprintf("user.n%d", i), []byte("v"), 0))
	}
	size, err := unix.Listxattr(path, nil)
	require.NoError(t, err)
	require.Greater(t, size, 1000*8)
}

// aclOf encodes an ACL as setxattr(2) wants it: tag, permissions, id.
func aclOf(entries ...[3]uint32) []byte {
	p := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		p = binary.LittleEndian.AppendUint16(p, uint16(e[0]))
		p = binary.LittleEndian.AppendUint16(p, uint16(e[1]))
		p = binary.LittleEndian.AppendUint32(p, e[2])
	}
	return p
}

const noID = ^uint32(0)

// TestDefaultACL: where a directory has a default ACL, the umask does not count
// (S37).
func TestDefaultACL(t *testing.T) {
	m := newCluster().mount(t)
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	require.NoError(t, os.Mkdir(m.path("d"), 0o755))
	acl := aclOf([3]uint32{1, 7, noID}, [3]uint32{2, 7, 1000}, [3]uint32{4, 5, noID}, [3]uint32{16, 7, noID}, [3]uint32{32, 5, noID})
	require.NoError(t, unix.Setxattr(m.path("d"), "system.posix_acl_default", acl, 0))
	require.NoError(t, os.WriteFile(m.path("d/f"), nil, 0o666))
	require.NoError(t, os.Mkdir(m.path("d/sub"), 0o777))
	require.EqualValues(t, 0o664, stat(t, m.path("d/f")).Mode&0o7777)
	got, err := getXattr(m.path("d/sub"), "system.posix_acl_default")
	require.NoError(t, err)
	require.Equal(t, string(acl), got)
	got, err = getXattr(m.path("d/f"), "system.posix_acl_access")
	require.NoError(t, err)
	require.NotEmpty(t, got)
	require.NoError(t, os.WriteFile(m.path("plain"), nil, 0o666))
	require.EqualValues(t, 0o600, stat(t, m.path("plain")).Mode&0o7777)
	require.NoError(t, unix.Chmod(m.path("d/f"), 0o600))
	got, err = getXattr(m.path("d/f"), "system.posix_acl_access")
	require.NoError(t, err)
	require.EqualValues(t, 0, binary.LittleEndian.Uint16([]byte(got)[4+3*8+2:]), "chmod moves the mask")
	require.NoError(t, unix.Removexattr(m.path("d"), "system.posix_acl_default"))
	require.NoError(t, os.WriteFile(m.path("d/g"), nil, 0o666))
	require.EqualValues(t, 0o600, stat(t, m.path("d/g")).Mode&0o7777)
}

// TestFewXattrRequests counts what a write and a path walk ask (S35).
func TestFewXattrRequests(t *testing.T) { bothEngines(t, checkFewXattrRequests) }

func checkFewXattrRequests(t *testing.T, c *cluster) {
	m := c.mount(t)
	require.NoError(t, os.MkdirAll(m.path("a/b/c"), 0o755))
	m.session.take(api.KindGetXattr)
	require.NoError(t, os.WriteFile(m.path("a/b/c/f"), pattern(4<<20), 0o755))
	_, err := os.ReadFile(m.path("a/b/c/f"))
	require.NoError(t, err)
	_, err = getXattr(m.path("a/b/c/f"), xattrCaps)
	require.ErrorIs(t, err, unix.ENODATA)
	require.Zero(t, m.session.take(api.KindGetXattr))
}

func TestCapabilitiesAreCleared(t *testing.T) { bothEngines(t, checkCapabilitiesAreCleared) }

func checkCapabilitiesAreCleared(t *testing.T, c *cluster) {
	m := c.mount(t)
	path := m.path("f")
	value := make([]byte, 20) // version 2, cap_net_bind_service permitted
	binary.LittleEndian.PutUint32(value, 0x02000000)
	binary.LittleEndian.PutUint32(value[4:], 1<<10)
	for _, how := range []string{"write", "truncate"} {
		require.NoError(t, os.WriteFile(path, []byte("binary"), 0o755))
		require.NoError(t, unix.Setxattr(path, xattrCaps, value, 0))
		_, err := getXattr(path, xattrCaps)
		require.NoError(t, err)
		runChild(t, "setid", "0", path, how)
		_, err = getXattr(path, xattrCaps)
		require.ErrorIs(t, err, unix.ENODATA, how)
	}
}
