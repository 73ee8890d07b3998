package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// reaper waits for every child, the agent's own and orphans.
type reaper struct {
	mu      sync.Mutex // guards waiters; held while a child is made too, as that may end before its fork has returned
	waiters map[int]func(syscall.WaitStatus)
	born    chan struct{}
}

// spawn starts a program; ended is called once, from the reaper, and must not block.
func (p *reaper) spawn(path string, argv []string, attributes *syscall.ProcAttr, ended func(syscall.WaitStatus)) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	intoGroup(attributes)
	pid, err := syscall.ForkExec(path, argv, attributes)
	if err == nil {
		p.waiters[pid] = ended
	}
	poke(p.born)
	return pid, err
}

func (p *reaper) loop() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if err == syscall.ECHILD {
			<-p.born
		}
		if err != nil {
			continue
		}
		p.mu.Lock()
		ended := p.waiters[pid]
		delete(p.waiters, pid)
		p.mu.Unlock()
		if ended != nil {
			ended(status)
		}
	}
}

const killTime = 5 * time.Second // of a fork bomb on a busy machine; most trees are gone at once

// process is one line of the walk: enough to tell whose tree it belongs to.
type process struct {
	pid, parent, group, session int
	state                       byte
	hasChildren                 bool // told by byDepth
	name                        string
}

// signalTree signals the processes of a command: descendants of its program, all in its session, and all whose environment
// names it. SIGKILL is repeated until none is left or the time is over; it returns how many are.
func (a *agent) signalTree(c *command, number syscall.Signal) int {
	known := map[int]bool{}       // processes seen as members: their children are too, also those that lose a parent in between
	buffer := make([]byte, 1<<20) // for what /proc tells; the largest environment that is looked through
	if number != syscall.SIGKILL {
		for _, p := range a.tree(c, known, buffer) {
			syscall.Kill(p.pid, number)
		}
		return 0
	}
	if a.leads(c) {
		// Before the first walk, which a crowd of processes makes slow. No fork slips through a group's signal.
		syscall.Kill(-c.pid, syscall.SIGKILL)
	}
	end := now().Add(killTime)
	for round := 0; ; round++ {
		members := a.tree(c, known, buffer)
		alive := signalAll(members, 0)
		if len(members) == 0 || (alive == 0 && round > 20) || now().After(end) {
			return alive
		}
		// Something may fork faster than it dies. Stopped processes keep their places below the process limit, so that
		// nothing else can take them: first stop all, then kill.
		for stops := 0; round > 1 && stops < 50 && signalAll(members, syscall.SIGSTOP) > 0 && now().Before(end); stops++ {
			members = a.tree(c, known, buffer)
		}
		signalAll(members, syscall.SIGKILL)
		time.Sleep(min(time.Duration(round)*500*time.Microsecond, 20*time.Millisecond))
	}
}

// leads is false once the program's number belongs to another command's.
func (a *agent) leads(c *command) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leaders[c.pid] == c
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
func (a *agent) tree(c *command, known map[int]bool, buffer []byte) (found []process) {
	leader, tag := -1, []byte("\x00CPUOS_COMMAND="+c.id)
	if a.leads(c) {
		leader = c.pid
	}
	all := listProcesses()
	member := map[int]bool{}
	for _, p := range all {
		member[p.pid] = p.pid == leader || p.session == leader ||
			p.state != 'Z' && bytes.Contains(readProc(p.pid, "environ", buffer), tag)
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

func listProcesses() (all []process) {
	buffer := make([]byte, 4096)
	entries, _ := os.ReadDir("/proc") // sorted; of very many gVisor gives some twice
	for _, entry := range slices.CompactFunc(entries, func(x, y os.DirEntry) bool { return x.Name() == y.Name() }) {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			if p, alive := readProcess(pid, buffer); alive {
				all = append(all, p)
			}
		}
	}
	return all
}

func readProcess(pid int, buffer []byte) (p process, alive bool) {
	stat := readProc(pid, "stat", buffer)
	end := bytes.LastIndexByte(stat, ')') // the name of the program stands in brackets and may hold anything
	p.pid, p.name = pid, strings.ToValidUTF8(string(stat[bytes.IndexByte(stat, '(')+1:max(end, 0)]), "\ufffd")
	stat = stat[end+1:]
	n, _ := fmt.Sscanf(string(stat), " %c %d %d %d", &p.state, &p.parent, &p.group, &p.session)
	return p, n == 4
}

// readProc reads a file of a process behind a zero byte, as far as the buffer goes.
func readProc(pid int, name string, buffer []byte) []byte {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/"+name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	buffer[0] = 0
	size := 1
	for n := 1; n > 0; size += max(n, 0) {
		n, _ = syscall.Read(fd, buffer[size:])
	}
	return buffer[:size]
}
