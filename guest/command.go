package main

import (
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

// cause is why the agent or the host sent a signal: when the program ends by that signal, it is the status.
type cause struct {
	signal syscall.Signal
	status string
	reason string
}

// command is one program with what is left of it: it stays until the host has deleted it.
type command struct {
	id       string
	agent    *agent
	ready    chan struct{} // closed when started, or not: then startErr says why
	startErr error
	started  time.Time
	out      [2]*stream
	stdin    *stdinQueue
	wake     chan struct{} // something changed for the session
	done     chan struct{} // closed when it has ended

	mu        sync.Mutex // guards the rest, and the streams' numbers
	pid       int
	causes    []cause
	exit      *syscall.WaitStatus
	exitedAt  time.Time
	drainLeft time.Duration
	killing   int
	ended     bool
	copied    bool
	copyLost  bool
	deadline  *time.Timer
	quiet     *time.Timer
	session   *session
	holders   int // who may still touch the rings: record, pumps, sessions
}

// record is a command as the contract tells it.
type record struct {
	ID          string  `json:"id"`
	PID         int     `json:"pid"`
	Status      string  `json:"status"`
	ExitCode    *int    `json:"exit_code"`
	Signal      *int    `json:"signal"`
	Limit       *string `json:"limit"`
	Reason      string  `json:"reason"`
	DurationS   float64 `json:"duration_s"`
	StdoutBytes uint64  `json:"stdout_bytes"`
	StderrBytes uint64  `json:"stderr_bytes"`
	StdinBytes  uint64  `json:"stdin_bytes"`
	OutputPath  *string `json:"output_path"`
}

func (c *command) record() record {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := record{ID: c.id, PID: c.pid, Status: "running", StdoutBytes: c.out[0].written}
	r.StdinBytes, _ = c.stdin.offsets()
	if c.out[1] != nil {
		r.StderrBytes = c.out[1].written
	}
	if c.copied && !c.copyLost {
		folder := logFolder + "/" + c.id
		r.OutputPath = &folder
	}
	if !c.ended {
		r.DurationS = elapsed(c.started, now())
		return r
	}
	r.DurationS = elapsed(c.started, c.exitedAt)
	if c.exit.Exited() {
		code := c.exit.ExitStatus()
		r.Status, r.ExitCode = "exited", &code
		return r
	}
	number := int(c.exit.Signal())
	r.Status, r.Signal = "signalled", &number
	for _, why := range c.causes { // the first that sent this signal
		if why.signal == c.exit.Signal() {
			r.Status, r.Reason = why.status, why.reason
			break
		}
	}
	return r
}

func (c *command) hasEnded() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// exited is called by the reaper.
func (c *command) exited(status syscall.WaitStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exit, c.exitedAt = &status, now()
	if c.deadline != nil {
		c.deadline.Stop()
	}
	c.stdin.abandon()
	c.drainLeft = drainTime
	for _, s := range c.streams() {
		s.atExit, s.lastRead = s.written, c.exitedAt
	}
	c.endIfDone()
	if !c.ended {
		c.quiet = time.AfterFunc(quietTime, c.drained)
	}
}

// drained calls the end of the output when the pipes went quiet, or a child writes on. Each pump then reads what its pipe
// holds at that moment: on a busy machine a quiet pipe may only be one that nobody got to. Time in which the host lets a
// ring stay full does not count: nothing is dropped for the host's slowness.
func (c *command) drained() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	wait, full := time.Duration(0), false
	for _, s := range c.streams() {
		if !s.eof && s.written-s.atExit < pipeBytes {
			full = full || s.full
			wait = max(wait, quietTime-now().Sub(s.lastRead))
		}
	}
	if c.drainLeft -= quietTime; full || (wait > 0 && c.drainLeft > 0) {
		if full {
			c.drainLeft += quietTime
		}
		c.quiet.Reset(max(wait, 5*time.Millisecond))
		return
	}
	for _, s := range c.streams() {
		s.file.SetReadDeadline(past)
	}
}

// endIfDone makes the end final, under the lock: the program is gone, its output is in, and no kill is under way.
func (c *command) endIfDone() {
	done := c.exit != nil && c.killing == 0 && !c.ended
	for _, s := range c.streams() {
		done = done && s.eof
	}
	if done {
		c.ended = true
		close(c.done)
		poke(c.wake)
	}
}

func (c *command) streams() []*stream {
	if c.out[1] == nil {
		return c.out[:1]
	}
	return c.out[:]
}

// kill sends a signal to the whole tree. SIGKILL is repeated until no process is left: the error says that some are.
// Any other signal is sent once, to each.
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

// hold and release count who may touch the rings' memory.
func (c *command) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders++
}

func (c *command) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holders--; c.holders == 0 {
		for _, s := range c.streams() {
			blocks.give(s.ring, s.written)
			s.ring = nil
		}
	}
}
