package ranks

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"
)

// Total sums up one run of all ranks.
type Total struct {
	Ranks   int
	Bytes   int64
	Ops     int64
	Seconds float64 // from the common start to the end of the slowest rank
	CPU     float64 // CPU-seconds of the whole machine meanwhile
	Slowest Result
	Fastest Result
	Longest Result // the rank with the longest single call
}

// MiBs is the throughput in MiB/s.
func (t Total) MiBs() float64 { return float64(t.Bytes) / (1 << 20) / t.Seconds }

// CPUPerGB is CPU-seconds of the whole machine per 10^9 bytes; 0 without bytes.
func (t Total) CPUPerGB() float64 {
	if t.Bytes == 0 {
		return 0
	}
	return t.CPU / (float64(t.Bytes) / 1e9)
}

// Rank is the child's side of Processes: it says that it is ready, waits for
// the common start, works and reports.
func Rank(work func() (Result, error), in io.Reader, out io.Writer) error {
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	if _, err := bufio.NewReader(in).ReadString('\n'); err != nil {
		return fmt.Errorf("wait for the start: %w", err)
	}
	r, err := work()
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(r)
}

// child is one rank process.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(ctx context.Context, command []string, rank int) (*child, error) {
	c := &child{cmd: exec.CommandContext(ctx, command[0], append(slices.Clone(command[1:]), fmt.Sprint(rank))...)}
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.in, c.out = in, bufio.NewReader(out)
	return c, c.cmd.Start()
}

// Processes runs command once for each rank, with the rank as last argument;
// each calls Rank. All start together.
func Processes(ctx context.Context, ranks int, command []string) (Total, error) {
	t := Total{Ranks: ranks}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all []*child
	for rank := range ranks {
		c, err := start(ctx, command, rank)
		if err != nil {
			return t, err
		}
		all = append(all, c)
		if _, err := c.out.ReadString('\n'); err != nil {
			return t, fmt.Errorf("rank %d did not start: %w", rank, errors.Join(err, c.cmd.Wait()))
		}
	}
	cpu, err := MachineCPU()
	if err != nil {
		return t, err
	}
	begin := time.Now()
	for _, c := range all {
		if _, err := fmt.Fprintln(c.in, "go"); err != nil {
			return t, err
		}
	}
	for rank, c := range all {
		var r Result
		derr := json.NewDecoder(c.out).Decode(&r)
		if err := errors.Join(derr, c.cmd.Wait()); err != nil {
			return t, fmt.Errorf("rank %d: %w", rank, err)
		}
		t.add(r)
	}
	t.Seconds = time.Since(begin).Seconds()
	after, err := MachineCPU()
	t.CPU = after - cpu
	return t, err
}

func (t *Total) add(r Result) {
	t.Bytes += r.Bytes
	t.Ops += r.Ops
	if r.Seconds > t.Slowest.Seconds {
		t.Slowest = r
	}
	if t.Fastest.Seconds == 0 || r.Seconds < t.Fastest.Seconds {
		t.Fastest = r
	}
	if r.Longest > t.Longest.Longest {
		t.Longest = r
	}
}
