// Package cli is what every program of ckptfs shares as a command line: how it
// ends, how it prints, how it documents itself.
package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/ckptfs/ckptfs/cmd/internal/version"
)

// Exit statuses of every program.
const (
	ExitFailure = 1 // the work failed
	ExitUsage   = 2 // the command line or the configuration is wrong
)

// usageError marks what the caller of the program got wrong.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Usage marks err as a mistake on the command line.
func Usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// Main runs a command and ends the process.
func Main(cmd *cobra.Command) {
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return Usage(fmt.Errorf("%w; `%s --help` lists the flags", err, c.CommandPath()))
	})
	err := cmd.Execute()
	if err == nil {
		return
	}
	// Each error on a line of its own, as errors.Join has them.
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(os.Stderr, "%s: %s\n", cmd.Name(), strings.TrimSuffix(line, "\n"))
	}
	var usage usageError
	if errors.As(err, &usage) {
		os.Exit(ExitUsage)
	}
	os.Exit(ExitFailure)
}

// JSONFlag adds --json.
func JSONFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON instead of text")
}

// Print writes v as JSON, or calls text.
func Print(w io.Writer, asJSON bool, v any, text func(io.Writer) error) error {
	if !asJSON {
		return text(w)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// Man writes one manual page a command into dir.
func Man(dir string, commands ...*cobra.Command) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	day := time.Unix(0, 0).UTC() // the pages depend on the source alone
	for _, c := range commands {
		c.DisableAutoGenTag = true
		h := &doc.GenManHeader{Title: strings.ToUpper(c.Name()), Section: "1", Source: "ckptfs " + version.Version, Manual: "ckptfs", Date: &day}
		if err := doc.GenManTree(c, h, dir); err != nil {
			return fmt.Errorf("manual pages in %s: %w", filepath.Clean(dir), err)
		}
	}
	return nil
}
