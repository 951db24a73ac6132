package settings

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func flagSet() (*pflag.FlagSet, *string, *[]string, *time.Duration, *bool) {
	fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
	return fs, fs.String("listen", "", ""), fs.StringSlice("disk", nil, ""), fs.Duration("op-timeout", 0, ""), fs.Bool("json", false, "")
}

func TestApply(t *testing.T) {
	fs, listen, disks, timeout, js := flagSet()
	require.NoError(t, apply(fs, []byte("# where\nlisten = \"127.0.0.1:1\"\ndisk = [\"/a\", \"/b\"]\nop-timeout = '5s'\njson = true\n")))
	require.Equal(t, "127.0.0.1:1", *listen)
	require.Equal(t, []string{"/a", "/b"}, *disks)
	require.Equal(t, 5*time.Second, *timeout)
	require.True(t, *js)
}

func TestCommandLineWins(t *testing.T) {
	fs, listen, _, _, _ := flagSet()
	require.NoError(t, fs.Parse([]string{"--listen", "here"}))
	require.NoError(t, apply(fs, []byte("listen = \"there\"\n")))
	require.Equal(t, "here", *listen)
}

func TestErrorsNameTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"\n\nlisten2 = 1\n":            `:3: unknown key "listen2"`,
		"listen = 'a'\nconfig = 'b'":   `:2: unknown key "config"`,
		"op-timeout = 'soon'":          ":1: op-timeout:",
		"[server]\nlisten = 'a'":       "tables are not used",
		"listen = { a = 1 }":           ":1: listen: want a string",
		"listen = ":                    "not valid TOML",
		"listen = 1979-05-27T07:32:00": "want a string",
	} {
		fs, _, _, _, _ := flagSet()
		path := filepath.Join(t.TempDir(), "c.toml")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.ErrorContains(t, Apply(fs, path), want, text)
	}
	fs, _, _, _, _ := flagSet()
	require.ErrorContains(t, Apply(fs, "/does/not/exist"), "read configuration")
}

func FuzzApply(f *testing.F) {
	f.Add([]byte("listen = 'a'\ndisk = ['x']\n"))
	f.Fuzz(func(_ *testing.T, text []byte) {
		fs, _, _, _, _ := flagSet()
		_ = apply(fs, text)
	})
}
