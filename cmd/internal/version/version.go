// Package version says which build this is.
package version

import (
	"runtime/debug"

	"github.com/ckptfs/ckptfs/meta/api"
)

// Version is set by the linker; "dev" otherwise.
var Version = "dev"

// Info describes the build and the protocols it speaks.
type Info struct {
	Version  string `json:"version"`
	Go       string `json:"go"`
	Revision string `json:"revision,omitempty"`
	Metadata int    `json:"metadata_protocol"`
	Data     int    `json:"data_protocol"`
}

// Get returns the build's description.
func Get() Info {
	i := Info{Version: Version, Metadata: api.Version, Data: 1}
	if b, ok := debug.ReadBuildInfo(); ok {
		i.Go = b.GoVersion
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" {
				i.Revision = s.Value
			}
		}
	}
	return i
}
