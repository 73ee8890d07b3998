package main

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

const killTime = 2 * time.Second

// process is one line of the walk: enough to tell whose tree it belongs to.
type process struct {
	pid, parent, session int
	state                byte
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
	end := now().Add(killTime)
	known := map[int]bool{} // processes seen as members: their children are too, also those that lose a parent in between
	for round := 0; ; round++ {
		members := a.tree(c, known)
		alive := 0
		for _, p := range members {
			if p.state != 'Z' {
				alive++
			}
		}
		if len(members) == 0 || (alive == 0 && round > 20) || now().After(end) {
			return alive
		}
		if round >= 2 && alive > 0 {
			// Something forks faster than it dies. Stopped processes keep their places below the process limit, so
			// that nothing can take them: stop all first, then kill.
			for range 50 {
				fresh := 0
				for _, p := range members {
					if p.state != 'T' && p.state != 'Z' && syscall.Kill(p.pid, syscall.SIGSTOP) == nil {
						fresh++
					}
				}
				if fresh == 0 || now().After(end) {
					break
				}
				members = a.tree(c, known)
			}
		}
		for _, p := range members {
			if p.state != 'Z' {
				syscall.Kill(p.pid, syscall.SIGKILL)
			}
		}
		if round > 0 {
			time.Sleep(min(time.Duration(round)*500*time.Microsecond, 20*time.Millisecond))
		}
	}
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
		fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
		if len(fields) < 4 {
			continue
		}
		parent, _ := strconv.Atoi(string(fields[1]))
		session, _ := strconv.Atoi(string(fields[3]))
		all = append(all, process{pid: pid, parent: parent, session: session, state: fields[0][0]})
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
