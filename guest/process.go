package main

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// reaper waits for every child, the agent's own and orphans. A child may end before its fork returned to us: while a
// spawn is under way, ends that nobody waits for yet are kept.
type reaper struct {
	mu       sync.Mutex // guards spawning, waiters and early
	spawning int
	waiters  map[int]func(syscall.WaitStatus)
	early    map[int]syscall.WaitStatus
	born     chan os.Signal
}

func newReaper() *reaper {
	return &reaper{waiters: map[int]func(syscall.WaitStatus){}, early: map[int]syscall.WaitStatus{}, born: make(chan os.Signal, 1)}
}

// spawn starts a program; ended is called once, from the reaper, and must not block.
func (p *reaper) spawn(path string, argv []string, attributes *syscall.ProcAttr, ended func(syscall.WaitStatus)) (int, error) {
	p.mu.Lock()
	p.spawning++
	p.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attributes)
	p.mu.Lock()
	status, over := p.early[pid]
	if err == nil && !over {
		p.waiters[pid] = ended
	}
	delete(p.early, pid)
	if p.spawning--; p.spawning == 0 {
		clear(p.early)
	}
	p.mu.Unlock()
	if over && err == nil {
		ended(status)
	}
	select {
	case p.born <- nil:
	default:
	}
	return pid, err
}

func (p *reaper) loop() {
	// Orphans of programs that a runtime put in from outside come without a spawn of ours; SIGCHLD tells of them.
	signal.Notify(p.born, syscall.SIGCHLD)
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
		if ended == nil && p.spawning > 0 {
			p.early[pid] = status
		}
		p.mu.Unlock()
		if ended != nil {
			ended(status)
		}
	}
}
