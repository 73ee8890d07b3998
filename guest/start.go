package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxCommands = 512 // running, and ended but not yet deleted by the host
	workFolder  = "/workspace"
	searchPath  = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

var commandID = regexp.MustCompile(`^[a-z0-9]{16}$`)

type commandStart struct {
	Argv             []string
	Command          *string
	Cwd, User, Stdin string
	Env              map[string]string
	TimeoutS         *float64 `json:"timeout_s"`
	Pty              *windowSize
	Attach           bool
}

func (a *agent) startCommand(r *request) any {
	start := commandStart{Cwd: workFolder, User: "user", Stdin: "none"}
	r.readJSON(&start)
	id := r.query.Get("id")
	demand(commandID.MatchString(id), invalid("id is 16 of a-z and 0-9"))
	if start.Attach {
		r.demandUpgrade(framesProtocol)
	}
	started, err, _ := a.starts.Do(id, func() (any, error) { // once, however often it is repeated
		var c *command
		err := attempt(func() { c = a.startOrFind(id, &start) })
		return c, err
	})
	check(err)
	c := started.(*command)
	if start.Attach {
		c.stream(r, [2]uint64{})
	} else {
		r.reply(201, c.record())
	}
	return nil
}

func (a *agent) startOrFind(id string, start *commandStart) *command {
	a.mu.Lock()
	c, held := a.commands[id], len(a.commands)
	a.mu.Unlock()
	if c != nil {
		return c
	}
	demand(held < maxCommands, fail(429, "limit_reached", "%d commands are held; delete ended ones", maxCommands))
	c = &command{id: id, agent: a, wake: make(chan struct{}, 1), done: make(chan struct{}), holders: 1}
	c.start(start)
	return c
}

func (c *command) start(start *commandStart) {
	argv := start.Argv
	if start.Command != nil {
		argv = []string{"/bin/bash", "-c", *start.Command}
	}
	plain := len(argv) > 0 && (start.Command == nil || start.Argv == nil) && (start.Stdin == "none" || start.Stdin == "open")
	demand(plain, invalid("give one of argv and command, and stdin none or open"))
	who := c.agent.users.find(start.User)
	env := c.environment(start, who)
	attributes := &syscall.ProcAttr{Dir: below(workFolder, start.Cwd), Sys: &syscall.SysProcAttr{Setsid: true, Setctty: start.Pty != nil}}
	for name, value := range env {
		attributes.Env = append(attributes.Env, name+"="+value)
	}
	if os.Geteuid() == 0 {
		attributes.Sys.Credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	defer func() {
		for _, fd := range attributes.Files { // the program's own by now
			syscall.Close(int(fd))
		}
		for _, s := range c.out {
			if c.pid == 0 {
				s.file.Close()
				giveBlock(s.ring, 0)
			}
		}
		if c.pid == 0 && c.stdin != nil {
			c.stdin.shut()
		}
	}()
	var program string
	who.run(func() { // once for all: changing credentials and back is a dozen calls
		if program = who.findProgram(argv[0], attributes.Dir, env["PATH"]); start.Pty == nil {
			c.openPipes(start, attributes)
		}
	})
	if start.Pty != nil {
		c.openTerminal(start, who, attributes)
	}
	c.started, c.before = now(), countMet()
	pid, err := c.agent.children.spawn(program, argv, attributes, c.exited)
	check(startError(program, err))
	c.pid = pid
	c.agent.mu.Lock()
	c.agent.commands[c.id], c.agent.leaders[pid] = c, c
	c.agent.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if start.TimeoutS != nil && c.exit == nil {
		left := time.Duration(*start.TimeoutS * float64(time.Second))
		c.limit = timeLimit{left: left, over: func() { c.kill(cause{syscall.SIGKILL, "timed_out", ""}) }}
		c.limit.goOn()
	}
	for _, s := range c.out {
		go c.pump(s)
	}
}

// openPipes makes the program's three descriptors. Done as the user: the pipes are then its own, and it may open them anew
// by /dev/stdout and the like.
func (c *command) openPipes(start *commandStart, attributes *syscall.ProcAttr) {
	var input *os.File
	fd := 0
	if start.Stdin == "open" {
		input, fd = makePipe(false)
	} else {
		fd = got(syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0))
	}
	c.stdin = &stdinQueue{file: input, closed: input == nil}
	attributes.Files = append(attributes.Files, uintptr(fd))
	for i, name := range []string{"stdout", "stderr"} {
		output, fd := makePipe(true)
		c.out = append(c.out, newStream(name, byte(frameStdout+i), output))
		attributes.Files = append(attributes.Files, uintptr(fd))
	}
}

// openTerminal makes a terminal all three.
func (c *command) openTerminal(start *commandStart, who *user, attributes *syscall.ProcAttr) {
	master, slave := openPty(who, *start.Pty)
	c.stdin = &stdinQueue{file: master, pty: true}
	c.out = []*stream{newStream("stdout", frameStdout, master)}
	for fd := slave; len(attributes.Files) < 3; fd = got(syscall.Dup(slave)) {
		attributes.Files = append(attributes.Files, uintptr(fd))
	}
}

// makePipe gives a polled, non-blocking end for the agent and an ordinary one for the program.
func makePipe(agentReads bool) (agent *os.File, program int) {
	var p [2]int
	check(syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK))
	if !agentReads {
		p[0], p[1] = p[1], p[0]
	}
	unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, pipeBytes) // only for speed: refused where the kernel's limit is lower
	unix.FcntlInt(uintptr(p[1]), unix.F_SETFL, 0)
	return os.NewFile(uintptr(p[0]), "pipe"), p[1]
}

// openPty makes a terminal whose program side belongs to the user.
func openPty(who *user, size windowSize) (master *os.File, slave int) {
	fd := got(syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0))
	master = os.NewFile(uintptr(fd), "pty")
	err := attempt(func() {
		check(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
		number := got(unix.IoctlGetInt(fd, unix.TIOCGPTN))
		resizePty(master, size)
		slave = got(syscall.Open("/dev/pts/"+strconv.Itoa(number), syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0))
	})
	if err != nil {
		master.Close()
		check(err)
	}
	syscall.Fchown(slave, int(who.uid), int(who.gid))
	syscall.Fchmod(slave, 0o620)
	return master, slave
}

type windowSize struct{ Cols, Rows uint16 }

func resizePty(master *os.File, size windowSize) {
	demand(min(size.Cols, size.Rows) >= 1 && max(size.Cols, size.Rows) <= 1000, invalid("a terminal has 1 to 1000 columns and rows"))
	control(master, func(fd int) { unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols}) })
}

// control works on a descriptor that stays open meanwhile; on a closed file it does nothing.
func control(file syscall.Conn, work func(fd int)) {
	if raw, err := file.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { work(int(fd)) })
	}
}

func startError(program string, err error) error {
	number, ok := err.(syscall.Errno)
	if !ok {
		return err
	}
	e := apiError{403, "program_not_executable", fmt.Sprintf("cannot start %s: %v", program, err), number, nil}
	switch number {
	case syscall.ENOENT: // the file was there: its interpreter is not
		e.status, e.Code = 404, "program_not_found"
	case syscall.E2BIG, syscall.EINVAL:
		e.status, e.Code = 400, "invalid"
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		e.status, e.Code = 429, "limit_reached"
	}
	return &e
}

// findProgram looks the working folder and the program up; within run, as the user sees them.
func (u *user) findProgram(name, cwd, path string) string {
	doing("work in", cwd, func() {
		err := access(cwd+"/.", mayExecute)
		demand(err == nil || err == syscall.EACCES, fail(404, "cwd_not_found", "cannot work in %s: no such folder", cwd))
		check(err)
	})
	candidates, problem := []string{name}, fail(404, "program_not_found", "cannot start %s: no such program", name)
	if !strings.Contains(name, "/") {
		candidates = strings.Split(path, ":")
		for i, folder := range candidates {
			candidates[i] = folder + "/" + name
		}
	}
	for _, candidate := range candidates {
		candidate = below(cwd, candidate)
		file, err := os.Stat(candidate)
		if err == nil && file.Mode().IsRegular() && access(candidate, mayExecute) == nil {
			return candidate
		}
		if err == nil || errors.Is(err, syscall.EACCES) {
			problem = fail(403, "program_not_executable", "cannot start %s: user %s may not execute it", name, u.name)
		}
	}
	panic(failure{problem})
}

// environment is the fixed base, then the image's, then the caller's; the mark of the tree cannot be overridden.
func (c *command) environment(start *commandStart, who *user) map[string]string {
	env := map[string]string{
		"PATH": searchPath, "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell, "LANG": "C.UTF-8",
	}
	if start.Pty != nil {
		env["TERM"] = "xterm-256color"
	}
	users := c.agent.users
	users.mu.Lock()
	text, _ := users.environment.read(users.folder + "/environment")
	users.mu.Unlock()
	for line := range strings.Lines(text) { // NAME=VALUE, perhaps with export and quotes
		name, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		if ok && name != "" && !strings.HasPrefix(name, "#") {
			env[name] = value
		}
	}
	maps.Copy(env, start.Env)
	env["CPUOS_COMMAND"] = c.id
	return env
}
