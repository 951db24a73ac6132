package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ckptfs/ckptfs/cmd/internal/chunknode"
	"github.com/ckptfs/ckptfs/cmd/internal/cli"
	"github.com/ckptfs/ckptfs/cmd/internal/metanode"
	"github.com/ckptfs/ckptfs/cmd/internal/mountnode"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"ckptfs":      main,
		"metaserver":  func() { cli.Main(metanode.Command()) },
		"chunkserver": func() { cli.Main(chunknode.Command()) },
	})
}

// TestScripts runs the programs as a user does: testdata/script/*.txtar.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Defer(func() {
				// A script that failed half-way must leave no mount behind.
				for _, m := range []string{"mnt", "second"} {
					_ = mountnode.Unmount(filepath.Join(e.WorkDir, m), time.Second, true)
				}
			})
			return nil
		},
		Condition: func(cond string) (bool, error) {
			_, err := os.Stat("/dev/fuse")
			return cond == "mount" && err == nil && os.Geteuid() == 0, nil
		},
	})
}
