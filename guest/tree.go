package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

const killTime = 5 * time.Second // of a fork bomb on a busy machine; most trees are gone at once

// process is one line of the walk: enough to tell whose tree it belongs to.
type process struct {
	pid, parent, group, session int
	state                       byte
}

// signalTree signals the processes of a command: descendants of its program, all in its session, and all whose environment
// names it. SIGKILL is repeated until none is left or the time is over; it returns how many are.
func (a *agent) signalTree(c *command, number syscall.Signal) int {
	known := map[int]bool{} // processes seen as members: their children are too, also those that lose a parent in between
	if number != syscall.SIGKILL {
		for _, p := range a.tree(c, known) {
			syscall.Kill(p.pid, number)
		}
		return 0
	}
	if leader := c.leader(); leader > 0 && a.ownerOf(leader) == c {
		// Before the first walk, which a crowd of processes makes slow. No fork slips through a group's signal.
		syscall.Kill(-leader, syscall.SIGKILL)
	}
	end := now().Add(killTime)
	for round := 0; ; round++ {
		members := a.tree(c, known)
		alive := signalAll(members, 0)
		if len(members) == 0 || (alive == 0 && round > 20) || now().After(end) {
			return alive
		}
		// Something may fork faster than it dies. Stopped processes keep their places below the process limit, so that
		// nothing else can take them: first stop all, then kill.
		for stops := 0; round > 1 && stops < 50 && signalAll(members, syscall.SIGSTOP) > 0 && now().Before(end); stops++ {
			members = a.tree(c, known)
		}
		signalAll(members, syscall.SIGKILL)
		time.Sleep(min(time.Duration(round)*500*time.Microsecond, 20*time.Millisecond))
	}
}

// signalAll signals each process and its group, which holds processes of the same tree alone. It counts those that were
// alive, for SIGSTOP those that still ran.
func signalAll(members []process, number syscall.Signal) (alive int) {
	for _, p := range members {
		if p.state == 'Z' || (number == syscall.SIGSTOP && p.state == 'T') {
			continue
		}
		if alive++; number != 0 {
			if p.group > 1 {
				syscall.Kill(-p.group, number)
			}
			syscall.Kill(p.pid, number)
		}
	}
	return alive
}

// tree lists the command's processes, and adds them to known.
func (a *agent) tree(c *command, known map[int]bool) (found []process) {
	leader := c.leader()
	if leader == 0 || a.ownerOf(leader) != c {
		leader = -1 // the number now belongs to another command's program
	}
	all := listProcesses()
	member := map[int]bool{}
	tag := []byte("CPUOS_COMMAND=" + c.id)
	for _, p := range all {
		member[p.pid] = p.pid == leader || p.session == leader || (p.state != 'Z' && hasTag(p.pid, tag))
	}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if !member[p.pid] && p.pid != 1 && p.parent != 1 && (member[p.parent] || known[p.parent]) {
				member[p.pid], grown = true, true
			}
		}
	}
	for _, p := range all {
		if member[p.pid] && p.pid != os.Getpid() {
			known[p.pid] = true
			found = append(found, p)
		}
	}
	return found
}

// ownerOf gives the newest command whose program has this number.
func (a *agent) ownerOf(pid int) (owner *command) {
	for _, c := range a.allCommands() {
		if c.leader() == pid && (owner == nil || c.started.After(owner.started)) {
			owner = c
		}
	}
	return owner
}

func (c *command) leader() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pid
}

func listProcesses() (all []process) {
	entries, _ := os.ReadDir("/proc")
	buffer := make([]byte, 1024)
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		p := process{pid: pid}
		readProc(pid, "stat", buffer, func(data []byte) bool {
			// The name of the program stands in brackets and may hold anything.
			rest := string(data[bytes.LastIndexByte(data, ')')+1:])
			if n, _ := fmt.Sscanf(rest, " %c %d %d %d", &p.state, &p.parent, &p.group, &p.session); n == 4 {
				all = append(all, p)
			}
			return true
		})
	}
	return all
}

// hasTag looks for the command's mark in the environment that a process was started with.
func hasTag(pid int, tag []byte) (found bool) {
	readProc(pid, "environ", make([]byte, 16<<10), func(data []byte) bool {
		at := bytes.Index(data, tag)
		found = at == 0 || (at > 0 && data[at-1] == 0)
		return found
	})
	return found
}

// readProc hands a file of a process over in pieces, each with the last bytes of the one before, until enough is true.
func readProc(pid int, name string, buffer []byte, enough func(data []byte) bool) {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/"+name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer syscall.Close(fd)
	for kept := 0; ; {
		n, _ := syscall.Read(fd, buffer[kept:])
		data := buffer[:kept+max(n, 0)]
		if n <= 0 || enough(data) {
			return
		}
		kept = copy(buffer, data[max(0, len(data)-64):])
	}
}
