package ranks

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// userHZ is the unit of /proc/stat, fixed by the kernel's ABI.
const userHZ = 100

// MachineCPU returns the CPU-seconds that the whole machine has spent busy.
func MachineCPU() (float64, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	if !s.Scan() {
		return 0, fmt.Errorf("/proc/stat is empty")
	}
	fields := strings.Fields(s.Text())
	var busy uint64
	for i, v := range fields[1:] {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		// user nice system idle iowait irq softirq steal; guest is in user.
		if i != 3 && i != 4 && i < 7 {
			busy += n
		}
	}
	return float64(busy) / userHZ, nil
}
