package main

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const (
	framesProtocol = "cpuos-frames/1"
	maxCommands    = 512 // running, and ended but not yet deleted by the host
	workFolder     = "/workspace"
	searchPath     = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

var commandID = regexp.MustCompile(`^[a-z0-9]{16}$`)

type windowSize struct{ Cols, Rows uint16 }

type commandStart struct {
	Argv     []string          `json:"argv"`
	Command  *string           `json:"command"`
	Cwd      string            `json:"cwd"`
	Env      map[string]string `json:"env"`
	User     string            `json:"user"`
	TimeoutS *float64          `json:"timeout_s"`
	Stdin    string            `json:"stdin"`
	Pty      *windowSize       `json:"pty"`
	Attach   bool              `json:"attach"`
}

func (a *agent) startCommand(r *request, _ string) error {
	start := commandStart{Cwd: workFolder, User: "user", Stdin: "none"}
	if err := r.readJSON(&start); err != nil {
		return err
	}
	id := r.query["id"]
	if !commandID.MatchString(id) {
		return invalid("id is 16 of a-z and 0-9")
	}
	if start.Attach && r.upgrade != framesProtocol {
		return invalid("attach needs Upgrade: %s", framesProtocol)
	}
	c, err := a.startOrFind(id, &start)
	if err != nil {
		return err
	}
	if start.Attach {
		return c.stream(r, [2]uint64{})
	}
	return r.reply(201, c.record())
}

// startOrFind starts a command once, however often its start is repeated.
func (a *agent) startOrFind(id string, start *commandStart) (*command, error) {
	a.mu.Lock()
	if c := a.commands[id]; c != nil {
		a.mu.Unlock()
		<-c.ready
		return c, c.startErr
	}
	if len(a.commands) >= maxCommands {
		a.mu.Unlock()
		return nil, fail(429, "limit_reached", "%d commands are held; delete ended ones", maxCommands)
	}
	c := &command{id: id, agent: a, ready: make(chan struct{}), wake: make(chan struct{}, 1), done: make(chan struct{}), holders: 1}
	a.commands[id] = c
	a.mu.Unlock()
	c.startErr = c.start(start)
	if c.startErr != nil {
		a.mu.Lock()
		delete(a.commands, id)
		a.mu.Unlock()
	}
	close(c.ready)
	return c, c.startErr
}

func (c *command) start(start *commandStart) error {
	argv := start.Argv
	if start.Command != nil {
		argv = []string{"/bin/bash", "-c", *start.Command}
	}
	if len(argv) == 0 || (start.Command != nil && start.Argv != nil) || (start.Stdin != "none" && start.Stdin != "open") {
		return invalid("give one of argv and command, and stdin none or open")
	}
	who, err := c.agent.users.find(start.User)
	if err != nil {
		return err
	}
	env := c.environment(start, who)
	cwd := absolute(start.Cwd)
	attributes := &syscall.ProcAttr{Dir: cwd, Env: environList(env), Sys: &syscall.SysProcAttr{Setsid: true}}
	if int(who.uid) != os.Geteuid() || os.Geteuid() == 0 {
		attributes.Sys.Credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	var program string
	var theirs []int
	err = who.run(func() (err error) { // once for all: changing credentials and back is a dozen calls
		if program, err = who.findProgram(argv[0], cwd, env["PATH"]); err == nil && start.Pty == nil {
			theirs, err = c.openPipes(start, attributes)
		}
		return err
	})
	if err == nil && start.Pty != nil {
		theirs, err = c.openTerminal(start, who, attributes)
	}
	defer func() {
		for _, fd := range theirs {
			syscall.Close(fd)
		}
	}()
	if err != nil {
		return err
	}
	c.started = now()
	pid, err := c.agent.children.spawn(program, argv, attributes, c.exited)
	if err != nil {
		c.closeStdio()
		return startError(program, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid = pid
	if start.TimeoutS != nil && c.exit == nil {
		limit := time.Duration(*start.TimeoutS * float64(time.Second))
		c.deadline = time.AfterFunc(limit, func() { c.kill(cause{syscall.SIGKILL, "timed_out", ""}) })
	}
	for _, s := range c.streams() {
		c.holders++
		go c.pump(s)
	}
	return nil
}

func newStream(name string, kind byte, file *os.File) *stream {
	return &stream{name: name, kind: kind, file: file, ring: blocks.take(), space: make(chan struct{}, 1)}
}

// openTerminal makes the one descriptor of a program on a terminal; it is to be closed after the start.
func (c *command) openTerminal(start *commandStart, who *user, attributes *syscall.ProcAttr) (theirs []int, err error) {
	master, slave, err := openPty(who, *start.Pty)
	if err != nil {
		return nil, err
	}
	fd := uintptr(slave)
	attributes.Files = []uintptr{fd, fd, fd}
	attributes.Sys.Setctty = true
	c.out[0] = newStream("stdout", frameStdout, master)
	c.stdin = newStdinQueue(master, true)
	c.stdin.notify = func() { poke(c.wake) }
	return []int{slave}, nil
}

// openPipes makes the program's three descriptors; theirs are to be closed after the start. Done as the user: the pipes are
// then its own, and it may open them anew by /dev/stdout and the like.
func (c *command) openPipes(start *commandStart, attributes *syscall.ProcAttr) (theirs []int, err error) {
	var input *os.File
	fd := 0
	if start.Stdin == "open" {
		input, fd, err = makePipe(false)
	} else {
		fd, err = syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	theirs = append(theirs, fd)
	c.stdin = newStdinQueue(input, false)
	c.stdin.notify = func() { poke(c.wake) }
	for i, name := range [...]string{"stdout", "stderr"} {
		output, fd, err := makePipe(true)
		if err != nil {
			c.closeStdio()
			return theirs, err
		}
		theirs = append(theirs, fd)
		c.out[i] = newStream(name, byte(frameStdout+i), output)
	}
	attributes.Files = []uintptr{uintptr(theirs[0]), uintptr(theirs[1]), uintptr(theirs[2])}
	return theirs, nil
}

func (c *command) closeStdio() {
	for _, s := range c.out {
		if s != nil {
			s.file.Close()
			blocks.give(s.ring, 0)
		}
	}
	if c.stdin != nil {
		c.stdin.abandon()
	}
}

func startError(program string, err error) error {
	number, _ := err.(syscall.Errno)
	switch number {
	case syscall.ENOENT: // the file was there: its interpreter is not
		return &apiError{404, "program_not_found", "cannot start " + program + ": its interpreter is missing", number}
	case syscall.EACCES, syscall.EPERM, syscall.ENOEXEC, syscall.ETXTBSY, syscall.EISDIR, syscall.ELIBBAD:
		return &apiError{403, "program_not_executable", "cannot start " + program + ": " + number.Error(), number}
	case syscall.E2BIG, syscall.EINVAL:
		return &apiError{400, "invalid", "cannot start " + program + ": " + number.Error(), number}
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return &apiError{429, "limit_reached", "cannot start " + program + ": the sandbox's limit of processes, memory or open files is reached", number}
	}
	return fileError("start", program, err)
}

// findProgram looks the working folder and the program up; within run, as the user sees them.
func (u *user) findProgram(name, cwd, path string) (program string, err error) {
	folder, e := os.Stat(cwd)
	if e == nil && folder.IsDir() {
		e = syscall.Faccessat(atFdcwd, cwd, 1, atEaccess)
	}
	if errors.Is(e, syscall.EACCES) {
		return "", fileError("work in", cwd, e)
	}
	if e != nil || !folder.IsDir() {
		return "", fail(404, "cwd_not_found", "cannot work in %s: no such folder", cwd)
	}
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = filepath.SplitList(path)
		for i, folder := range candidates {
			candidates[i] = folder + "/" + name
		}
	}
	blocked := false
	for _, candidate := range candidates {
		if !strings.HasPrefix(candidate, "/") {
			candidate = cwd + "/" + candidate
		}
		file, e := os.Stat(candidate)
		if e == nil && file.Mode().IsRegular() && syscall.Faccessat(atFdcwd, candidate, 1, atEaccess) == nil {
			return candidate, nil
		}
		blocked = blocked || e == nil || errors.Is(e, syscall.EACCES)
	}
	if blocked {
		return "", fail(403, "program_not_executable", "cannot start %s: user %s may not execute it", name, u.name)
	}
	return "", fail(404, "program_not_found", "cannot start %s: no such program", name)
}

// environment is the fixed base, then the image's, then the caller's; the mark of the tree cannot be overridden.
func (c *command) environment(start *commandStart, who *user) map[string]string {
	env := map[string]string{
		"PATH": searchPath, "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell, "LANG": "C.UTF-8",
	}
	if start.Pty != nil {
		env["TERM"] = "xterm-256color"
	}
	maps.Copy(env, c.agent.imageEnvironment())
	maps.Copy(env, start.Env)
	env["CPUOS_COMMAND"] = c.id
	return env
}

func environList(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list
}

// imageEnvironment reads /etc/environment: lines NAME=VALUE, perhaps with export and quotes.
func (a *agent) imageEnvironment() map[string]string {
	a.mu.Lock()
	data, _ := a.environ.read()
	a.mu.Unlock()
	env := map[string]string{}
	for line := range strings.Lines(string(data)) {
		name, value, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "export "), "=")
		if !ok || name == "" || strings.HasPrefix(name, "#") {
			continue
		}
		if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		env[name] = value
	}
	return env
}

// openPty makes a terminal whose program side belongs to the user.
func openPty(who *user, size windowSize) (master *os.File, slave int, err error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	master = os.NewFile(uintptr(fd), "pty")
	var unlock, number int32
	if err = ioctl(uintptr(fd), syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err == nil {
		err = ioctl(uintptr(fd), syscall.TIOCGPTN, unsafe.Pointer(&number))
	}
	path := "/dev/pts/" + itoa(int(number))
	if err == nil {
		err = resizePty(master, size)
	}
	if err == nil {
		slave, err = syscall.Open(path, syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	}
	if err != nil {
		master.Close()
		return nil, 0, err
	}
	syscall.Fchown(slave, int(who.uid), int(who.gid))
	syscall.Fchmod(slave, 0o620)
	return master, slave, nil
}

func resizePty(master *os.File, size windowSize) error {
	if size.Cols < 1 || size.Rows < 1 || size.Cols > 1000 || size.Rows > 1000 {
		return invalid("a terminal has 1 to 1000 columns and rows")
	}
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	window := [4]uint16{size.Rows, size.Cols, 0, 0}
	controlErr := raw.Control(func(fd uintptr) { err = ioctl(fd, syscall.TIOCSWINSZ, unsafe.Pointer(&window)) })
	return errors.Join(controlErr, err)
}
