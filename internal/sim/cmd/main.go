// Command cmd runs seeds of the simulated cluster: random programs on several
// mounts under random faults. It exits with 1 when a promise was broken, and
// prints the seed.
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/ckptfs/ckptfs/internal/sim/workload"
)

func main() {
	seed := flag.Uint64("seed", 1, "the first seed")
	seeds := flag.Int("seeds", 1, "how many seeds, counting up from -seed")
	length := flag.Duration("for", 15*time.Second, "virtual time under load and faults, for each seed")
	trace := flag.Bool("trace", false, "print every event")
	steps := flag.Bool("steps", false, "print every scheduling decision besides")
	verbose := flag.Bool("v", false, "print the logs of all nodes")
	metas := flag.Int("metas", 1, "metadata servers, 1 or 3")
	twice := flag.Bool("twice", false, "run each seed a second time and compare the traces")
	noFault := flag.Bool("no-faults", false, "run the programs alone")
	wild := flag.Bool("wild", false, "hurt any number of chunk servers at once: operations may fail")
	flag.Parse()
	cfg := workload.Config{For: *length, NoFault: *noFault, Wild: *wild}
	cfg.Cluster.Metas = *metas
	if *trace || *steps {
		cfg.Trace = func(line string) { fmt.Println(line) }
	}
	if *steps {
		cfg.Steps = cfg.Trace
	}
	if *verbose {
		cfg.Cluster.Log = slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	failed := 0
	for s := *seed; s < *seed+uint64(*seeds); s++ {
		if !one(s, cfg, *twice) {
			failed++
			fmt.Printf("reproduce: go run ./internal/sim/cmd -seed %d -for %s -metas %d -wild=%v -trace\n", s, *length, *metas, *wild)
		}
	}
	if failed > 0 {
		fmt.Printf("%d of %d seeds failed\n", failed, *seeds)
		os.Exit(1)
	}
}

func one(seed uint64, cfg workload.Config, twice bool) bool {
	start := time.Now()
	r, err := workload.Run(seed, cfg)
	if err != nil {
		fmt.Printf("seed %d FAILED: %v\n", seed, err)
		return false
	}
	fmt.Printf("seed %d: %d operations (%d failed), %d faults, %s simulated in %s, %+v, trace %016x\n",
		seed, r.Ops, r.Failed, r.Faults, r.Virtual.Round(time.Second), time.Since(start).Round(time.Millisecond), r.Audit, r.Hash)
	if !twice {
		return true
	}
	cfg.Trace, cfg.Steps = nil, nil
	again, err := workload.Run(seed, cfg)
	if err != nil || again.Hash != r.Hash {
		fmt.Printf("seed %d FAILED: two runs differ: traces %016x and %016x, %v\n", seed, r.Hash, again.Hash, err)
		return false
	}
	return true
}
