package main

import (
	"io"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

func itoa(n int) string { return strconv.Itoa(n) }

func (a *agent) findCommand(id string) (*command, error) {
	a.mu.Lock()
	c := a.commands[id]
	a.mu.Unlock()
	if c != nil {
		if <-c.ready; c.startErr == nil {
			return c, nil
		}
	}
	return nil, fail(404, "command_not_found", "no command has the id %s", id)
}

func (a *agent) listCommands(r *request, _ string) error {
	a.mu.Lock()
	ids := make([]string, 0, len(a.commands))
	for id := range a.commands {
		ids = append(ids, id)
	}
	a.mu.Unlock()
	slices.Sort(ids)
	records := []record{}
	for _, id := range ids {
		if c, err := a.findCommand(id); err == nil {
			records = append(records, c.record())
		}
	}
	return r.reply(200, map[string]any{"commands": records})
}

func (a *agent) getCommand(r *request, id string) error {
	c, err := a.findCommand(id)
	if err != nil {
		return err
	}
	return r.reply(200, c.record())
}

func (a *agent) deleteCommand(r *request, id string) error {
	c, err := a.findCommand(id)
	if err != nil {
		return err
	}
	if !c.hasEnded() {
		return fail(409, "invalid", "command %s has not ended", id)
	}
	a.mu.Lock()
	_, present := a.commands[id]
	delete(a.commands, id)
	a.mu.Unlock()
	if present {
		c.release()
	}
	return r.reply(200, map[string]any{})
}

func (a *agent) attachCommand(r *request, id string) error {
	c, err := a.findCommand(id)
	if err != nil {
		return err
	}
	offsets := [2]uint64{uint64(r.number("stdout", 0, 10)), uint64(r.number("stderr", 0, 10))}
	if r.upgrade != framesProtocol {
		return invalid("attach needs Upgrade: %s", framesProtocol)
	}
	if r.problem != nil {
		return r.problem
	}
	return c.stream(r, offsets)
}

func (a *agent) killCommand(r *request, id string) error {
	body := struct {
		Signal int
		Reason string
	}{Signal: int(syscall.SIGKILL)}
	if err := r.readJSON(&body); err != nil {
		return err
	}
	if body.Signal < 1 || body.Signal > 64 {
		return invalid("signal is 1 to 64")
	}
	c, err := a.findCommand(id)
	if err != nil {
		return err
	}
	if err := c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason}); err != nil {
		return err
	}
	return r.reply(200, c.record())
}

func (a *agent) resizeCommand(r *request, id string) error {
	var size windowSize
	if err := r.readJSON(&size); err != nil {
		return err
	}
	c, err := a.findCommand(id)
	if err == nil {
		err = c.resize(size.Cols, size.Rows)
	}
	if err != nil {
		return err
	}
	return r.reply(200, map[string]any{})
}

func (c *command) resize(cols, rows uint16) error {
	if !c.stdin.pty {
		return fail(409, "invalid", "command %s has no terminal", c.id)
	}
	err := resizePty(c.stdin.file, windowSize{cols, rows})
	if err != nil && strings.Contains(err.Error(), "closed") {
		return nil // it ended meanwhile
	}
	return err
}

// interrupt sends Ctrl-C: the signal to whatever has the terminal's foreground. False without a terminal.
func (c *command) interrupt() bool {
	if !c.stdin.pty {
		return false
	}
	raw, err := c.stdin.file.SyscallConn()
	if err != nil {
		return false
	}
	sent := false
	raw.Control(func(fd uintptr) {
		var group int32
		if ioctl(fd, syscall.TIOCGPGRP, unsafe.Pointer(&group)) == nil && group > 1 {
			sent = syscall.Kill(-int(group), syscall.SIGINT) == nil
		}
	})
	return sent
}

// feedCommand takes stdin as a plain body, for hosts that want each piece's own backpressure.
func (a *agent) feedCommand(r *request, id string) error {
	c, err := a.findCommand(id)
	if err != nil {
		return err
	}
	if c.stdin.file == nil {
		return fail(409, "invalid", "command %s was started with stdin none", id)
	}
	offset, end := uint64(r.number("offset", 0, 10)), r.flag("end", false)
	if r.problem != nil {
		return r.problem
	}
	buffer := make([]byte, 64<<10)
	for !r.bodyEnd {
		n, err := r.Read(buffer)
		if err != nil && err != io.EOF {
			return err
		}
		if err := c.stdin.put(offset, buffer[:n]); err != nil {
			return err
		}
		offset += uint64(n)
	}
	if end {
		c.stdin.finish()
	}
	accepted, _ := c.stdin.offsets()
	return r.reply(200, map[string]any{"stdin": accepted})
}
