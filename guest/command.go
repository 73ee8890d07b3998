package main

import (
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	quietTime = 100 * time.Millisecond // without output after the program's end
	drainTime = time.Second            // in all, should a child go on writing
)

var never, past = time.Time{}, time.Unix(1, 0)

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
	id       string
	agent    *agent
	ready    chan struct{} // closed when started, or not: then startErr says why
	startErr error
	started  time.Time
	out      []*stream // stdout and stderr; a terminal has the first alone
	stdin    *stdinQueue
	wake     chan struct{} // something changed for the session
	done     chan struct{} // closed when it has ended

	mu               sync.Mutex // guards the rest, and the streams' numbers
	pid              int
	causes           []cause
	exit             *syscall.WaitStatus
	exitedAt         time.Time
	drainLeft        time.Duration
	killing, holders int // kills under way; who may still touch the rings: record, pumps, sessions
	ended            bool
	copied, copyLost bool
	deadline, quiet  *time.Timer
	session          *session
}

// record is a command as the contract tells it.
func (c *command) record() map[string]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	stdin, _ := c.stdin.offsets()
	r := map[string]any{
		"id": c.id, "pid": c.pid, "status": "running", "exit_code": nil, "signal": nil, "limit": nil, "reason": "",
		"duration_s": elapsed(c.started, now()), "stdin_bytes": stdin, "stdout_bytes": c.out[0].written, "stderr_bytes": 0, "output_path": nil,
	}
	if len(c.out) > 1 {
		r["stderr_bytes"] = c.out[1].written
	}
	if c.copied && !c.copyLost {
		r["output_path"] = logFolder + "/" + c.id
	}
	if c.ended {
		r["duration_s"] = elapsed(c.started, c.exitedAt)
		if c.exit.Exited() {
			r["status"], r["exit_code"] = "exited", c.exit.ExitStatus()
			return r
		}
		r["status"], r["signal"] = "signalled", int(c.exit.Signal())
		for _, why := range slices.Backward(c.causes) { // the first that sent this signal counts
			if why.signal == c.exit.Signal() {
				r["status"], r["reason"] = why.status, why.reason
			}
		}
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
	c.exit, c.exitedAt, c.drainLeft = &status, now(), drainTime
	if c.deadline != nil {
		c.deadline.Stop()
	}
	c.stdin.abandon()
	for _, s := range c.out {
		s.atExit, s.lastRead = s.written, c.exitedAt
	}
	if c.endIfDone(); !c.ended {
		c.quiet = time.AfterFunc(quietTime, c.drained)
	}
}

// drained calls the end of the output when the pipes went quiet, or a child writes on. Each pump then reads what its pipe
// holds at that moment: on a busy machine a quiet pipe may only be one that nobody got to. Time in which the host lets a
// ring stay full does not count: nothing is dropped for the host's slowness.
func (c *command) drained() {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait, full := time.Duration(0), false
	for _, s := range c.out {
		if !s.eof && s.written-s.atExit < pipeBytes {
			full = full || s.full
			wait = max(wait, quietTime-now().Sub(s.lastRead))
		}
	}
	if !full {
		c.drainLeft -= quietTime
	}
	if !c.ended && (full || (wait > 0 && c.drainLeft > 0)) {
		c.quiet.Reset(max(wait, 5*time.Millisecond))
		return
	}
	for _, s := range c.out {
		s.file.SetReadDeadline(past)
	}
}

// endIfDone makes the end final, under the lock: the program is gone, its output is in, and no kill is under way.
func (c *command) endIfDone() {
	done := c.exit != nil && c.killing == 0 && !c.ended
	for _, s := range c.out {
		done = done && s.eof
	}
	if done {
		c.ended = true
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
		return fail(500, "internal", "%d processes of command %s are left after %s", left, c.id, killTime)
	}
	if why.signal == syscall.SIGKILL {
		select { // its end is told a moment after its processes are gone
		case <-c.done:
		case <-time.After(quietTime):
		}
	}
	return nil
}

// release is called by each holder of the rings' memory when it is done with it.
func (c *command) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders--; c.holders == 0 {
		for _, s := range c.out {
			giveBlock(s.ring, s.written)
			s.ring = nil
			if s.copy.file != nil {
				s.copy.file.Close()
			}
		}
	}
}
