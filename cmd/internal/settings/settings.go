// Package settings gives every program the same way of being configured: a
// flag, or the same name in a TOML file named by --config; the flag wins.
package settings

import (
	"fmt"
	"os"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// AddConfigFlag adds --config to cmd and reads the file before cmd runs.
func AddConfigFlag(cmd *cobra.Command) {
	path := cmd.Flags().String("config", "", "TOML file with flags by their long names, as `FILE`; flags on the command line win")
	before := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if *path != "" {
			if err := Apply(cmd.Flags(), *path); err != nil {
				return err
			}
		}
		if before != nil {
			return before(cmd, args)
		}
		return nil
	}
}

// Apply sets every flag that the file names and the command line does not.
func Apply(flags *pflag.FlagSet, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	if err := apply(flags, text); err != nil {
		return fmt.Errorf("%s:%w", path, err)
	}
	return nil
}

func apply(flags *pflag.FlagSet, text []byte) error {
	p := unstable.Parser{}
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		if err := setOne(flags, &p, e); err != nil {
			return err
		}
	}
	if err := p.Error(); err != nil {
		return fmt.Errorf(" not valid TOML: %w", err)
	}
	return nil
}

func setOne(flags *pflag.FlagSet, p *unstable.Parser, e *unstable.Node) error {
	if e.Kind == unstable.Comment {
		return nil
	}
	line := 1
	keys := e.Key()
	var parts []string
	for keys.Next() {
		if len(parts) == 0 {
			line = p.Shape(keys.Node().Raw).Start.Line
		}
		parts = append(parts, string(keys.Node().Data))
	}
	name := strings.Join(parts, ".")
	if e.Kind != unstable.KeyValue {
		return fmt.Errorf("%d: [%s]: tables are not used here; write NAME = VALUE with a flag's long name", line, name)
	}
	f := flags.Lookup(name)
	if f == nil || name == "config" {
		return fmt.Errorf("%d: unknown key %q; see --help for the flags", line, name)
	}
	if f.Changed {
		return nil
	}
	values, err := texts(e.Value())
	if err != nil {
		return fmt.Errorf("%d: %s: %w", line, name, err)
	}
	for _, v := range values {
		if err := flags.Set(name, v); err != nil {
			return fmt.Errorf("%d: %s: %w", line, name, err)
		}
	}
	// Only the command line counts as "changed", so that the file can never
	// win over it, whatever the order.
	return nil
}

func texts(v *unstable.Node) ([]string, error) {
	switch v.Kind {
	case unstable.String, unstable.Integer, unstable.Float, unstable.Bool:
		return []string{string(v.Data)}, nil
	case unstable.Array:
		var all []string
		it := v.Children()
		for it.Next() {
			one, err := texts(it.Node())
			if err != nil {
				return nil, err
			}
			all = append(all, one...)
		}
		return all, nil
	}
	return nil, fmt.Errorf("want a string, a number, true or false, or a list of them")
}
