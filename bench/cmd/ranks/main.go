// Command ranks runs rank processes on a directory and prints one line of JSON:
// save, load (cold if the caches were dropped) or small files. See bench/run.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"

	"github.com/ckptfs/ckptfs/bench/ranks"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "ranks:", err)
		os.Exit(1)
	}
}

func run() error {
	var j ranks.Job
	n := flag.Int("ranks", 8, "rank processes")
	work := flag.String("work", "save", "save, load or small")
	one := flag.Bool("one", false, "be one rank; its number is the argument")
	flag.StringVar(&j.Dir, "dir", "", "directory to work in")
	flag.Int64Var(&j.Size, "size", 256<<20, "bytes a rank")
	flag.IntVar(&j.Block, "bs", 1<<20, "bytes a write or read")
	flag.BoolVar(&j.Fsync, "fsync", true, "fsync before close")
	flag.IntVar(&j.Files, "files", 500, "small: files a rank")
	flag.BoolVar(&j.Own, "own", true, "small: a directory for each rank")
	flag.Parse()
	works := map[string]func(ranks.Job, int) (ranks.Result, error){"save": ranks.Save, "load": ranks.Load, "small": ranks.Small}
	fn, ok := works[*work]
	switch {
	case !ok:
		return fmt.Errorf("-work %q: want save, load or small", *work)
	case j.Dir == "":
		return fmt.Errorf("-dir is missing")
	case j.Block <= 0 || j.Block%4096 != 0 || j.Size%4096 != 0:
		return fmt.Errorf("-bs and -size must be multiples of 4096")
	}
	if *one {
		rank, err := strconv.Atoi(flag.Arg(0))
		if err != nil {
			return fmt.Errorf("rank %q: %w", flag.Arg(0), err)
		}
		return ranks.Rank(func() (ranks.Result, error) { return fn(j, rank) }, os.Stdin, os.Stdout)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	t, err := ranks.Processes(context.Background(), *n, append(append([]string{self}, os.Args[1:]...), "-one"))
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(struct {
		ranks.Total
		MiBs, CPUPerGB, OpsPerSecond float64
	}{t, t.MiBs(), t.CPUPerGB(), float64(t.Ops) / t.Seconds})
}
