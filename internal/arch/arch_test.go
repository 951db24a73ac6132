// Package arch keeps the structure of the project: which room may know which,
// and how large files, functions and interfaces may grow.
package arch

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/ckptfs/ckptfs/"

// The budgets of docs/ARCHITECTURE.md.
const (
	maxFileLines      = 500
	maxFuncLines      = 70
	maxInterfaceSize  = 8
	minFilesForSanity = 20
)

// source is one parsed Go file.
type source struct {
	path    string // slash-separated, from the root of the repository
	dir     string
	test    bool
	lines   int
	file    *ast.File
	fset    *token.FileSet
	imports []string
}

func load(t *testing.T) []source {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	var all []source
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && p != root {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		s := source{path: rel, dir: path.Dir(rel), test: strings.HasSuffix(rel, "_test.go"), lines: bytes.Count(text, []byte("\n")), fset: token.NewFileSet()}
		s.file, err = parser.ParseFile(s.fset, p, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, im := range s.file.Imports {
			name, err := strconv.Unquote(im.Path.Value)
			if err != nil {
				return err
			}
			s.imports = append(s.imports, name)
		}
		all = append(all, s)
		return nil
	})
	require.NoError(t, err)
	require.Greater(t, len(all), minFilesForSanity, "the walk must have found the project")
	return all
}

// within reports whether dir is room or lies below it.
func within(dir, room string) bool { return dir == room || strings.HasPrefix(dir, room+"/") }

// rule says what the packages of one room may import of the project.
type rule struct {
	room  string
	allow []string // rooms; a trailing "." means that package alone
	deny  []string // packages outside the project
}

// rules are matched in order; the first whose room holds the package counts.
var rules = []rule{
	{room: "internal/ids", deny: []string{"os", "net", "time", "sync"}},
	{room: "internal/sim", allow: []string{"internal", "chunk", "meta", "fs"}},
	{room: "internal/testcluster", allow: []string{"internal", "chunk", "meta", "fs"}},
	{room: "internal/control", allow: []string{"internal", "chunk.", "chunk/worker", "meta/api."}, deny: []string{"os", "net"}},
	{room: "internal", allow: []string{"internal"}},
	{room: "chunk/ec", allow: []string{"internal/ids."}, deny: []string{"os", "net", "time"}},
	{room: "chunk/client", allow: []string{"internal", "chunk.", "chunk/ec", "chunk/wire"}, deny: []string{"os", "net"}},
	{room: "chunk/transport", allow: []string{"internal", "chunk.", "chunk/wire"}},
	{room: "chunk", allow: []string{"internal", "chunk"}},
	{room: "meta/api", allow: []string{"internal/ids.", "internal/codec.", "internal/errkind.", "internal/cluster."}, deny: []string{"os", "net", "time"}},
	{room: "meta/kv", allow: []string{"internal", "meta/kv"}},
	{room: "meta/replica", allow: []string{"internal", "meta/kv", "meta/replica"}},
	{room: "meta/client", allow: []string{"internal", "meta/api.", "meta/stream"}},
	{room: "meta/server", allow: []string{"internal", "meta"}},
	{room: "meta/stream", allow: []string{"internal", "meta/api."}},
	{
		room:  "meta",
		allow: []string{"internal/ids.", "internal/codec.", "internal/errkind.", "internal/cluster.", "meta/api.", "meta/kv."},
		deny:  []string{"os", "net", "time", "math/rand", "math/rand/v2"},
	},
	{room: "fs/file", allow: []string{"internal", "meta/api.", "chunk."}, deny: []string{"os", "net"}},
	{room: "fs", allow: []string{"internal", "meta/api.", "chunk.", "fs"}},
	{room: "bench", allow: []string{"internal", "bench", "fs/file", "chunk."}},
	{room: "cmd", allow: []string{"internal", "chunk", "meta", "fs", "bench", "cmd"}},
}

func allowed(r rule, pkg string) bool {
	return slices.ContainsFunc(r.allow, func(a string) bool {
		if one, alone := strings.CutSuffix(a, "."); alone {
			return pkg == one
		}
		return within(pkg, a)
	})
}

func TestImportArrows(t *testing.T) {
	for _, s := range load(t) {
		if s.test {
			continue // tests join rooms to try them together
		}
		i := slices.IndexFunc(rules, func(r rule) bool { return within(s.dir, r.room) })
		if i < 0 {
			t.Errorf("%s: no rule for this room; give it one here and in docs/ARCHITECTURE.md", s.path)
			continue
		}
		for _, im := range s.imports {
			if pkg, ours := strings.CutPrefix(im, module); ours {
				if pkg != s.dir && !allowed(rules[i], pkg) {
					t.Errorf("%s imports %s, which %s must not know", s.path, pkg, rules[i].room)
				}
			} else if slices.Contains(rules[i].deny, im) {
				t.Errorf("%s imports %s, which %s must not touch", s.path, im, rules[i].room)
			}
		}
	}
}

// TestErrnoOnlyAtTheKernel keeps errno out of everything but the kernel's side
// and the disk seam.
func TestErrnoOnlyAtTheKernel(t *testing.T) {
	for _, s := range load(t) {
		if s.test || within(s.dir, "fs") && s.dir != "fs/file" || within(s.dir, "internal/vfs") || within(s.dir, "cmd") || within(s.dir, "bench") {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if ok {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "syscall" && sel.Sel.Name == "Errno" {
					t.Errorf("%s: syscall.Errno belongs to fs/; use errkind", s.fset.Position(n.Pos()))
				}
			}
			return true
		})
	}
}

func TestSizes(t *testing.T) {
	for _, s := range load(t) {
		if s.lines > maxFileLines {
			t.Errorf("%s has %d lines, more than %d", s.path, s.lines, maxFileLines)
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Body == nil {
					return true
				}
				from, to := s.fset.Position(n.Pos()).Line, s.fset.Position(n.End()).Line
				if to-from+1 > maxFuncLines {
					t.Errorf("%s:%d: %s has %d lines, more than %d", s.path, from, n.Name.Name, to-from+1, maxFuncLines)
				}
			case *ast.InterfaceType:
				if n.Methods.NumFields() > maxInterfaceSize {
					t.Errorf("%s: interface with %d methods, more than %d", s.fset.Position(n.Pos()), n.Methods.NumFields(), maxInterfaceSize)
				}
			}
			return true
		})
	}
}

func TestNames(t *testing.T) {
	for _, s := range load(t) {
		for _, part := range append(strings.Split(s.dir, "/"), strings.TrimSuffix(path.Base(s.path), ".go")) {
			switch part {
			case "util", "utils", "common", "helper", "helpers", "misc":
				t.Errorf("%s: %q says nothing of what is inside", s.path, part)
			}
		}
	}
}

func TestNothingLeftOpen(t *testing.T) {
	words := []string{"TO" + "DO", "FIX" + "ME", "X" + "XX"}
	for _, s := range load(t) {
		text, err := os.ReadFile(filepath.Join("../..", s.path))
		require.NoError(t, err)
		for _, w := range words {
			if bytes.Contains(text, []byte(w)) {
				t.Errorf("%s says %s", s.path, w)
			}
		}
	}
}
