package main

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

const (
	groupFolder  = "/sys/fs/cgroup/sandbox"
	keptMemory   = 32 << 20 // for the kernel and this process, at most an eighth
	almostBytes  = 1 << 20  // ext4 refuses a program before its last block is gone
	almostInodes = 2
)

// group is the control group of all programs here but this one, in a kernel of our own. Where a runtime keeps the limits
// there is none.
var group struct {
	folder, memory, processes *os.File

	mu   sync.Mutex
	told limitsMet // what a command was told to have met is not told to another
}

// limitsMet is how often the kernel has ended a program for want of memory, and refused to make one.
type limitsMet struct{ memory, processes int }

// makeGroup bounds what programs take: at its limit the kernel ends the largest of them, never this process.
func makeGroup() {
	const top = "/sys/fs/cgroup"
	// By the processor's too: whatever runs in it, this process has as much of the time as all of it.
	check(os.WriteFile(top+"/cgroup.subtree_control", []byte("+pids +memory +cpu"), 0))
	check(os.Mkdir(groupFolder, 0o755))
	var facts syscall.Sysinfo_t
	check(syscall.Sysinfo(&facts))
	memory := facts.Totalram - min(keptMemory, facts.Totalram/8)
	for name, value := range map[string]uint64{"pids.max": uint64(*tasks), "memory.max": memory} {
		check(os.WriteFile(groupFolder+"/"+name, []byte(strconv.FormatUint(value, 10)), 0))
	}
	group.folder = got(os.Open(groupFolder))
	group.memory = got(os.Open(groupFolder + "/memory.events"))
	group.processes = got(os.Open(groupFolder + "/pids.events"))
}

// intoGroup has the program begin there: it makes nothing outside of its limits.
func intoGroup(attributes *syscall.ProcAttr) {
	if group.folder != nil {
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, int(group.folder.Fd())
	}
}

func countMet() (met limitsMet) {
	if group.folder != nil {
		met = limitsMet{readCount(group.memory, "oom_kill"), readCount(group.processes, "max")}
	}
	return met
}

// readCount reads one line of a file with a name and a number on each.
func readCount(file *os.File, name string) int {
	buffer := make([]byte, 256)
	n, _ := file.ReadAt(buffer, 0)
	for line := range strings.Lines(string(buffer[:n])) {
		if number, ok := strings.CutPrefix(line, name+" "); ok {
			count, _ := strconv.Atoi(strings.TrimSpace(number))
			return count
		}
	}
	return 0
}

// findMet is the limit that programs met since then and nobody was told of; empty when there is none. failed: the command
// that asks did not end well, else a refused program was no matter to it.
func findMet(since limitsMet, failed bool) string {
	if group.folder == nil {
		return ""
	}
	met := countMet()
	group.mu.Lock()
	defer group.mu.Unlock()
	switch {
	case met.memory > max(since.memory, group.told.memory):
		group.told.memory = met.memory
		return "memory"
	case failed && met.processes > max(since.processes, group.told.processes):
		group.told.processes = met.processes
		return "processes"
	}
	return ""
}

// listFull names what is used up now.
func (a *agent) listFull(*request) any {
	full := []map[string]any{}
	add := func(limit, path string, value uint64) {
		full = append(full, map[string]any{"limit": limit, "path": orNull(path), "value": value})
	}
	for _, path := range []string{workFolder, "/"} {
		var facts syscall.Statfs_t
		if syscall.Statfs(path, &facts) != nil {
			continue
		}
		if facts.Ffree < almostInodes {
			add("inodes", path, facts.Files)
		}
		if facts.Bavail*uint64(facts.Bsize) < almostBytes {
			add("disk", path, facts.Blocks*uint64(facts.Bsize))
		}
	}
	if group.folder != nil {
		number := func(name string) uint64 {
			text, _ := os.ReadFile(groupFolder + "/" + name)
			count, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
			return count
		}
		if most := number("pids.max"); number("pids.current") >= most {
			add("processes", "", most)
		}
	}
	return map[string]any{"full": full}
}
