package mountnode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOptions(t *testing.T) {
	var o Options
	require.NoError(t, o.Set("rw,noatime,_netdev,x-systemd.automount,buffer_size=256MiB,op_timeout=5s,kernel_timeout=0,allow_other"))
	require.Equal(t, []string{"rw", "noatime", "allow_other"}, o.Kernel)
	require.EqualValues(t, 256<<20, o.BufferSize)
	require.Equal(t, 5*time.Second, o.OpTimeout)
	require.Zero(t, o.KernelTimeout)
	require.NoError(t, o.Validate())
	for _, bad := range []string{"bufer_size=1G", "buffer_size=much", "op_timeout=-1s", "op_timeout=x", "ro=1"} {
		require.ErrorContains(t, new(Options).Set(bad), bad)
	}
	require.Error(t, (&Options{ReadMode: "fast"}).Validate())
	require.Error(t, (&Options{BufferSize: 1}).Validate())
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "4096": 4096, "64K": 64 << 10, "1MiB": 1 << 20, "1M": 1 << 20, "2G": 2 << 30, "1GiB": 1 << 30} {
		n, err := ParseSize(s)
		require.NoError(t, err, s)
		require.Equal(t, want, n, s)
	}
	for _, s := range []string{"", "x", "-1", "1Q"} {
		_, err := ParseSize(s)
		require.Error(t, err, s)
	}
}
