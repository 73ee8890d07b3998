package main

import (
	"cmp"
	"log"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var never = time.Time{}

func now() time.Time { return time.Now() }

// elapsed is a duration in seconds as the contract gives it.
func elapsed(from, to time.Time) float64 { return float64(to.Sub(from).Microseconds()) / 1e6 }

// cause is why the agent or the host sent a signal: when the program ends by that signal, it is the status.
type cause struct {
	signal         syscall.Signal
	status, reason string
}

// command is one program with what is left of it: it stays until the host has deleted it.
type command struct {
	id               string
	agent            *agent
	pid              int
	started          time.Time
	before           limitsMet // as it started
	out              []*stream // stdout and stderr; a terminal has the first alone
	stdin            *stdinQueue
	wake             chan struct{} // something changed for the session
	done             chan struct{} // closed when it has ended
	copied, copyLost atomic.Bool   // output was copied to a file, and not to its end

	mu       sync.Mutex // guards the rest, and the streams' numbers
	causes   []cause
	exit     *syscall.WaitStatus
	exitedAt time.Time
	killing  int // kills under way
	holders  int // who may touch the rings of an ended command: its record, sessions
	limit    timeLimit
	session  *session
	met      string // the limit that it met, by the kernel's count
	lost     bool   // nobody asks for it any more: a copy of the sandbox has no part in its commands
}

// record is a command as the contract tells it.
func (c *command) record() map[string]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := map[string]any{
		"id": c.id, "pid": c.pid, "status": "running", "exit_code": nil, "signal": nil, "limit": nil, "reason": "",
		"duration_s": elapsed(c.started, now()), "stdin_bytes": c.stdin.accepted, "stdout_bytes": c.out[0].written, "stderr_bytes": 0, "output_path": nil,
	}
	if len(c.out) > 1 {
		r["stderr_bytes"] = c.out[1].written
	}
	if c.copied.Load() && !c.copyLost.Load() {
		r["output_path"] = logFolder + "/" + c.id
	}
	if !c.hasEnded() {
		return r
	}
	r["duration_s"] = elapsed(c.started, c.exitedAt)
	if c.met != "" {
		r["met"] = c.met
	}
	if c.exit.Exited() {
		r["status"], r["exit_code"] = "exited", c.exit.ExitStatus()
		return r
	}
	r["status"], r["signal"] = "signalled", int(c.exit.Signal())
	sent := func(why cause) bool { return why.signal == c.exit.Signal() }
	if i := slices.IndexFunc(c.causes, sent); i >= 0 {
		r["status"], r["reason"] = c.causes[i].status, c.causes[i].reason
	}
	return r
}

func (c *command) hasEnded() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// exited is called by the reaper.
func (c *command) exited(status syscall.WaitStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exit, c.exitedAt = &status, now()
	c.met = findMet(c.before, !status.Exited() || status.ExitStatus() != 0)
	c.limit.hold()
	c.limit.left = 0
	c.stdin.shut()
	for _, s := range c.out {
		s.atExit, s.giveUp = s.written, c.exitedAt.Add(drainTime)
		s.file.SetReadDeadline(c.exitedAt.Add(quietTime))
	}
	c.endIfDone()
}

// endIfDone makes the end final, under the lock: the program is gone, its output is in, and no kill is under way.
func (c *command) endIfDone() {
	open := func(s *stream) bool { return !s.eof }
	if c.exit != nil && c.killing == 0 && !slices.ContainsFunc(c.out, open) && !c.hasEnded() {
		close(c.done)
		poke(c.wake)
	}
}

// kill sends a signal to the whole tree. SIGKILL is repeated until no process is left: the error says that some are.
// Any other signal is sent once, to each; SIGINT on a terminal to whatever has its foreground.
func (c *command) kill(why cause) error {
	c.mu.Lock()
	if c.exit == nil {
		c.causes = append(c.causes, why)
	}
	c.killing++
	c.mu.Unlock()
	left := 0
	if why.signal != syscall.SIGINT || !c.interrupt() {
		left = c.agent.signalTree(c, why.signal)
	}
	c.mu.Lock()
	c.killing--
	c.endIfDone()
	c.mu.Unlock()
	if left > 0 {
		err := fail(500, "internal", "%d processes of command %s are left after %s", left, c.id, killTime)
		log.Print(err) // a timeout has nobody to tell
		return err
	}
	if why.signal == syscall.SIGKILL {
		select { // its end is told a moment after its processes are gone
		case <-c.done:
		case <-time.After(quietTime):
		}
	}
	return nil
}

// release is called by each holder of the rings' memory when it is done with it, under the lock.
func (c *command) release() {
	if c.holders--; c.holders == 0 {
		for _, s := range c.out {
			giveBlock(s.ring, s.written)
		}
	}
}

// interrupt sends Ctrl-C: the signal to whatever has the terminal's foreground. False without a terminal.
func (c *command) interrupt() (sent bool) {
	if c.stdin.pty {
		control(c.stdin.file, func(fd int) {
			group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
			sent = err == nil && group > 1 && syscall.Kill(-group, syscall.SIGINT) == nil
		})
	}
	return sent
}

// allCommands gives those that were started, by id.
func (a *agent) allCommands() []*command {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.commands), func(x, y *command) int { return cmp.Compare(x.id, y.id) })
}

func (a *agent) command(id string) *command {
	a.mu.Lock()
	c := a.commands[id]
	a.mu.Unlock()
	demand(c != nil, fail(404, "command_not_found", "no command has the id %s", id))
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
	demand(c.hasEnded(), fail(409, "invalid", "command %s has not ended", c.id))
	a.mu.Lock()
	present := a.commands[c.id] == c
	delete(a.commands, c.id)
	if a.leaders[c.pid] == c {
		delete(a.leaders, c.pid)
	}
	a.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
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
	r.readJSON(&body)
	demand(body.Signal >= 1 && body.Signal <= 64, invalid("signal is 1 to 64"))
	c := a.command(r.id)
	check(c.kill(cause{syscall.Signal(body.Signal), "killed", body.Reason}))
	return c.record()
}
