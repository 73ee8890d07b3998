package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

const killTime = 2 * time.Second

// process is one line of the walk: enough to tell whose tree it belongs to.
type process struct {
	pid, parent, group, session int
	state                       byte
}

// signalTree signals the processes of a command: descendants of its program, all in its session, and all whose environment
// names it. SIGKILL is repeated until none is left or the time is over; it returns how many are.
func (a *agent) signalTree(c *command, number syscall.Signal) int {
	if number != syscall.SIGKILL {
		for _, p := range a.tree(c, map[int]bool{}) {
			syscall.Kill(p.pid, number)
		}
		return 0
	}
	if leader := c.leader(); leader > 0 && a.ownerOf(leader) == c {
		// Before the first walk, which a crowd of processes makes slow. No fork slips through a group's signal.
		syscall.Kill(-leader, syscall.SIGKILL)
	}
	end := now().Add(killTime)
	known := map[int]bool{} // processes seen as members: their children are too, also those that lose a parent in between
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
		if round > 0 {
			time.Sleep(min(time.Duration(round)*500*time.Microsecond, 20*time.Millisecond))
		}
	}
}

// signalAll signals each process and its group, which holds processes of the same tree alone. It counts those that were
// alive, for SIGSTOP those that still ran.
func signalAll(members []process, number syscall.Signal) (alive int) {
	groups := map[int]bool{1: true, 0: true}
	for _, p := range members {
		if p.state == 'Z' || (number == syscall.SIGSTOP && p.state == 'T') {
			continue
		}
		alive++
		if number != 0 && !groups[p.group] {
			groups[p.group] = true
			syscall.Kill(-p.group, number)
		}
		if number != 0 {
			syscall.Kill(p.pid, number)
		}
	}
	return alive
}

// tree lists the command's processes, and adds them to known.
func (a *agent) tree(c *command, known map[int]bool) []process {
	leader := c.leader()
	if leader == 0 || a.ownerOf(leader) != c {
		leader = -1 // the number now belongs to another command's program
	}
	all := listProcesses()
	member := map[int]bool{}
	tag := []byte("CPUOS_COMMAND=" + c.id)
	for _, p := range all {
		if p.pid == leader || p.session == leader || (p.state != 'Z' && hasTag(p.pid, tag)) {
			member[p.pid] = true
		}
	}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if !member[p.pid] && p.pid != 1 && (member[p.parent] || (known[p.parent] && p.parent != 1)) {
				member[p.pid], grown = true, true
			}
		}
	}
	var found []process
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
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.commands {
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

func listProcesses() []process {
	folder, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer folder.Close()
	names, _ := folder.Readdirnames(-1)
	all := make([]process, 0, len(names))
	buffer := make([]byte, 1024)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		data := readSmall("/proc/"+name+"/stat", buffer)
		// The name of the program stands in brackets and may hold anything.
		p := process{pid: pid}
		if n, _ := fmt.Sscanf(string(data[bytes.LastIndexByte(data, ')')+1:]), " %c %d %d %d", &p.state, &p.parent, &p.group, &p.session); n == 4 {
			all = append(all, p)
		}
	}
	return all
}

// hasTag looks for the command's mark in the environment that a process was started with.
func hasTag(pid int, tag []byte) bool {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/environ", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer syscall.Close(fd)
	buffer := make([]byte, 16<<10)
	kept := 0
	for {
		n, err := syscall.Read(fd, buffer[kept:])
		data := buffer[:kept+max(n, 0)]
		if at := bytes.Index(data, tag); at >= 0 && (at == 0 || data[at-1] == 0) {
			return true
		}
		if err != nil || n <= 0 {
			return false
		}
		kept = copy(buffer, data[max(0, len(data)-len(tag)-1):])
	}
}

func readSmall(path string, buffer []byte) []byte {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	n, _ := syscall.Read(fd, buffer)
	return buffer[:max(n, 0)]
}
