package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"
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
	id := r.query["id"]
	if !commandID.MatchString(id) {
		check(invalid("id is 16 of a-z and 0-9"))
	}
	if start.Attach {
		r.demandUpgrade(framesProtocol)
	}
	c := a.startOrFind(id, &start)
	if check(c.startErr); !start.Attach {
		r.reply(201, c.record())
		return nil
	}
	c.stream(r, [2]uint64{})
	return nil
}

// startOrFind starts a command once, however often its start is repeated.
func (a *agent) startOrFind(id string, start *commandStart) *command {
	a.mu.Lock()
	c := a.commands[id]
	if c != nil {
		a.mu.Unlock()
		<-c.ready
		return c
	}
	if len(a.commands) >= maxCommands {
		a.mu.Unlock()
		check(fail(429, "limit_reached", "%d commands are held; delete ended ones", maxCommands))
	}
	c = &command{id: id, agent: a, ready: make(chan struct{}), wake: make(chan struct{}, 1), done: make(chan struct{}), holders: 1}
	a.commands[id] = c
	a.mu.Unlock()
	if c.startErr = attempt(func() { c.start(start) }); c.startErr != nil {
		a.mu.Lock()
		delete(a.commands, id)
		a.mu.Unlock()
	}
	close(c.ready)
	return c
}

func (c *command) start(start *commandStart) {
	argv := start.Argv
	if start.Command != nil {
		argv = []string{"/bin/bash", "-c", *start.Command}
	}
	if len(argv) == 0 || (start.Command != nil && start.Argv != nil) || (start.Stdin != "none" && start.Stdin != "open") {
		check(invalid("give one of argv and command, and stdin none or open"))
	}
	who := c.agent.users.find(start.User)
	env := c.environment(start, who)
	cwd := absolute(start.Cwd)
	attributes := &syscall.ProcAttr{Dir: cwd, Sys: &syscall.SysProcAttr{Setsid: true, Setctty: start.Pty != nil}}
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
		if c.pid == 0 {
			c.closeStdio()
		}
	}()
	var program string
	who.run(func() { // once for all: changing credentials and back is a dozen calls
		if program = who.findProgram(argv[0], cwd, env["PATH"]); start.Pty == nil {
			c.openPipes(start, attributes)
		}
	})
	if start.Pty != nil {
		c.openTerminal(start, who, attributes)
	}
	c.started = now()
	pid, err := c.agent.children.spawn(program, argv, attributes, c.exited)
	check(startError(program, err))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid = pid
	if start.TimeoutS != nil && c.exit == nil {
		limit := time.Duration(*start.TimeoutS * float64(time.Second))
		c.deadline = time.AfterFunc(limit, func() { c.kill(cause{syscall.SIGKILL, "timed_out", ""}) })
	}
	for _, s := range c.out {
		c.holders++
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
	c.stdin = &stdinQueue{notify: c.wake, file: input, closed: input == nil}
	attributes.Files = append(attributes.Files, uintptr(fd))
	for i, name := range []string{"stdout", "stderr"} {
		output, fd := makePipe(true)
		c.addStream(name, byte(frameStdout+i), output)
		attributes.Files = append(attributes.Files, uintptr(fd))
	}
}

// openTerminal makes a terminal all three.
func (c *command) openTerminal(start *commandStart, who *user, attributes *syscall.ProcAttr) {
	master, slave := openPty(who, *start.Pty)
	c.stdin = &stdinQueue{notify: c.wake, file: master, pty: true}
	c.addStream("stdout", frameStdout, master)
	for fd := slave; len(attributes.Files) < 3; fd = got(syscall.Dup(slave)) {
		attributes.Files = append(attributes.Files, uintptr(fd))
	}
}

func (c *command) addStream(name string, kind byte, file *os.File) {
	c.out = append(c.out, &stream{name: name, kind: kind, file: file, ring: takeBlock(), space: make(chan struct{}, 1)})
}

func (c *command) closeStdio() {
	for _, s := range c.out {
		s.file.Close()
		giveBlock(s.ring, 0)
	}
	if c.stdin != nil {
		c.stdin.abandon()
	}
}

func startError(program string, err error) error {
	number, _ := err.(syscall.Errno)
	e := apiError{403, "program_not_executable", fmt.Sprintf("cannot start %s: %v", program, err), number}
	switch number {
	case 0:
		return err
	case syscall.ENOENT: // the file was there: its interpreter is not
		e.status, e.code = 404, "program_not_found"
	case syscall.E2BIG, syscall.EINVAL:
		e.status, e.code = 400, "invalid"
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		e.status, e.code = 429, "limit_reached"
	}
	return &e
}

// findProgram looks the working folder and the program up; within run, as the user sees them.
func (u *user) findProgram(name, cwd, path string) string {
	defer doing("work in", cwd)
	folder, err := os.Stat(cwd)
	if err == nil && folder.IsDir() {
		err = syscall.Faccessat(atFdcwd, cwd, 1, atEaccess)
	}
	if err != nil && !errors.Is(err, syscall.EACCES) || err == nil && !folder.IsDir() {
		check(fail(404, "cwd_not_found", "cannot work in %s: no such folder", cwd))
	}
	check(err)
	candidates, blocked := []string{name}, false
	if !strings.Contains(name, "/") {
		candidates = strings.Split(path, ":")
		for i, folder := range candidates {
			candidates[i] = folder + "/" + name
		}
	}
	for _, candidate := range candidates {
		if !strings.HasPrefix(candidate, "/") {
			candidate = cwd + "/" + candidate
		}
		file, err := os.Stat(candidate)
		if err == nil && file.Mode().IsRegular() && syscall.Faccessat(atFdcwd, candidate, 1, atEaccess) == nil {
			return candidate
		}
		blocked = blocked || err == nil || errors.Is(err, syscall.EACCES)
	}
	if blocked {
		check(fail(403, "program_not_executable", "cannot start %s: user %s may not execute it", name, u.name))
	}
	panic(failure{fail(404, "program_not_found", "cannot start %s: no such program", name)})
}

// environment is the fixed base, then the image's, then the caller's; the mark of the tree cannot be overridden.
func (c *command) environment(start *commandStart, who *user) map[string]string {
	env := map[string]string{
		"PATH": searchPath, "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell, "LANG": "C.UTF-8",
	}
	if start.Pty != nil {
		env["TERM"] = "xterm-256color"
	}
	c.agent.users.mu.Lock()
	text, _ := c.agent.users.environment.read()
	c.agent.users.mu.Unlock()
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
