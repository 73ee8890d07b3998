package main

import (
	"slices"
	"strings"
	"syscall"
	"unsafe"
)

// allCommands gives those that were started, by id.
func (a *agent) allCommands() (all []*command) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.commands {
		select {
		case <-c.ready:
			all = append(all, c)
		default:
		}
	}
	slices.SortFunc(all, func(x, y *command) int { return strings.Compare(x.id, y.id) })
	return all
}

func (a *agent) command(id string) *command {
	a.mu.Lock()
	c := a.commands[id]
	a.mu.Unlock()
	if c != nil {
		<-c.ready
	}
	if c == nil || c.startErr != nil {
		check(fail(404, "command_not_found", "no command has the id %s", id))
	}
	return c
}

func (a *agent) listCommands(*request) any {
	records := []any{}
	for _, c := range a.allCommands() {
		records = append(records, c.record())
	}
	return map[string]any{"commands": records}
}

func (a *agent) getCommand(r *request) any { return a.command(r.id).record() }

func (a *agent) deleteCommand(r *request) any {
	c := a.command(r.id)
	if !c.hasEnded() {
		check(fail(409, "invalid", "command %s has not ended", c.id))
	}
	a.mu.Lock()
	present := a.commands[c.id] == c
	delete(a.commands, c.id)
	a.mu.Unlock()
	if present {
		c.release()
	}
	return map[string]any{}
}

func (a *agent) attachCommand(r *request) any {
	c := a.command(r.id)
	c.stream(r, [2]uint64{uint64(r.number("stdout", 0, 10)), uint64(r.number("stderr", 0, 10))})
	return nil
}

func (a *agent) killCommand(r *request) any {
	body := struct {
		Signal int
		Reason string
	}{Signal: int(syscall.SIGKILL)}
	if r.readJSON(&body); body.Signal < 1 || body.Signal > 64 {
		check(invalid("signal is 1 to 64"))
	}
	c := a.command(r.id)
	check(c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason}))
	return c.record()
}

// interrupt sends Ctrl-C: the signal to whatever has the terminal's foreground. False without a terminal.
func (c *command) interrupt() (sent bool) {
	if c.stdin.pty {
		control(c.stdin.file, func(fd uintptr) {
			var group int32
			if ioctl(fd, syscall.TIOCGPGRP, unsafe.Pointer(&group)) == nil && group > 1 {
				sent = syscall.Kill(-int(group), syscall.SIGINT) == nil
			}
		})
	}
	return sent
}
