package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	freezeTime    = 5 * time.Second
	haltTime      = 100 * time.Millisecond
	goOnTime      = time.Second     // for processes to be seen running again
	reseedTime    = 3 * time.Second // for all programs together
	keysTime      = time.Minute
	manyProcesses = 200
	maxListeners  = 1000
	maxPrograms   = 1000 // that a freeze names
	maxMissing    = 100
	reseedFolder  = "/cpuos/reseed.d" // below /etc

	addEntropyCall, reseedCall = 0x40085203, 0x5207 // RNDADDENTROPY, RNDRESEEDCRNG
)

var (
	freezeNonce  = regexp.MustCompile(`^[0-9a-f]{32}$`)
	errFrozen    = fail(409, "frozen", "the sandbox is frozen, and only the host that froze it has it go on")
	servedFrozen = map[string]bool{"GET /v1/hello": true, "POST /v1/freeze": true, "POST /v1/thaw": true}
)

// freezer holds still what runs in the sandbox while it is saved.
type freezer struct {
	mu      sync.Mutex   // held while the sandbox freezes, goes on or is told who it is; guards the rest
	stopped map[int]bool // processes that something else had stopped before: they stay so; nil while none is stopped by us
	told    receipt
	thawed  map[string]any // what the last thaw by an identity did

	continued map[int]bool // by the last thaw, which is not long ago until then: they may still look stopped
	until     time.Time
}

// receipt is what a freeze told of the sandbox. It is held against what is there before it goes on.
type receipt struct {
	Processes int        `json:"processes"`
	Programs  []program  `json:"programs"`
	Listeners []listener `json:"listeners"`
	Commands  []string   `json:"commands"`
}

type program struct {
	Pid  int    `json:"pid"`
	Name string `json:"name"`
}

type listener struct {
	Port    uint64 `json:"port"`
	Address string `json:"address"`
}

// missing names what is not there any more, and not all of very much.
func (a *agent) missing(told receipt, own string) []string {
	gone, pids, buffer := []string{}, map[int]bool{}, make([]byte, 4096)
	for _, was := range told.Programs {
		if p, alive := readProcess(was.Pid, buffer); !alive || p.state == 'Z' || p.name != was.Name {
			gone, pids[was.Pid] = append(gone, fmt.Sprintf("process %d (%s)", was.Pid, was.Name)), true
		}
	}
	for _, id := range told.Commands {
		// One that ended as all was stopped may be known as running: its process is none of these.
		if !slices.ContainsFunc(a.allCommands(), func(c *command) bool { return c.id == id && !pids[c.pid] }) {
			gone = append(gone, "command "+id)
		}
	}
	present := []listener{}
	if len(told.Listeners) > 0 {
		present = listeners(own)
	}
	for _, was := range told.Listeners {
		if !slices.Contains(present, was) {
			gone = append(gone, fmt.Sprintf("listener on %s:%d", was.Address, was.Port))
		}
	}
	return gone[:min(len(gone), maxMissing)]
}

func (a *agent) freezeUnder() string {
	_, frozen := a.present()
	return frozen
}

func readFreeze(r *request) string {
	var body struct{ Freeze string }
	r.readJSON(&body)
	demand(freezeNonce.MatchString(body.Freeze), invalid("freeze is 32 hex digits"))
	return body.Freeze
}

func (a *agent) freeze(r *request) any {
	nonce := readFreeze(r)
	a.freezer.mu.Lock()
	defer a.freezer.mu.Unlock()
	if frozen := a.freezeUnder(); frozen != "" {
		demand(frozen == nonce, errFrozen)
		return a.freezer.told
	}
	// Signals to all go to no more than the sandbox's own.
	self, _ := os.Readlink("/proc/self")
	demand(self == "1", fail(409, "freeze_failed", "the agent is not the first process here"))
	a.freezer.thawed = nil
	err := attempt(func() {
		end := now().Add(freezeTime)
		a.endCalls(nonce, r.TCPConn, end)
		running := []string{}
		for _, c := range a.allCommands() {
			c.mu.Lock()
			if c.limit.hold(); !c.hasEnded() {
				running = append(running, c.id)
			}
			c.mu.Unlock()
		}
		programs := a.stopAll(end)
		a.keepMachineID()
		holdDisks()
		a.freezer.told = receipt{len(programs), programs[:min(len(programs), maxPrograms)], listeners(r.LocalAddr().String()), running}
	})
	if err != nil {
		a.goOn()
		check(err)
	}
	return a.freezer.told
}

// endCalls serves nobody else from here on, and waits for the end of what is served.
func (a *agent) endCalls(nonce string, from *net.TCPConn, end time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frozen = nonce
	others := []*net.TCPConn{}
	for tcp := range a.conns {
		if tcp != from {
			others = append(others, tcp)
			cut(tcp)
		}
	}
	for slices.ContainsFunc(others, func(tcp *net.TCPConn) bool { return a.conns[tcp] }) {
		demand(now().Before(end), fail(409, "freeze_failed", "a call is still under way after %s", freezeTime))
		a.mu.Unlock()
		time.Sleep(time.Millisecond)
		a.mu.Lock()
	}
}

// stopAll stops all processes, and lists them. A parent stands still before its children are stopped: else it would be
// told of that, as a shell tells its user.
func (a *agent) stopAll(end time.Time) []program {
	for round := 0; ; round++ {
		running, waits, programs := 0, map[int]bool{}, []program{}
		all := byDepth()
		if round == 0 {
			a.freezer.stopped = map[int]bool{}
		}
		for _, level := range all {
			parents := []process{}
			for _, p := range level {
				if p.halted() {
					programs = append(programs, program{p.pid, p.name})
					foreign := round == 0 && !(a.freezer.continued[p.pid] && now().Before(a.freezer.until))
					a.freezer.stopped[p.pid] = a.freezer.stopped[p.pid] || foreign
					continue
				}
				syscall.Kill(p.pid, syscall.SIGSTOP) // a zombie's threads may live
				a.freezer.stopped[p.pid], waits[p.pid] = false, p.state == 'D'
				if p.state != 'Z' {
					running++
				}
				if p.hasChildren {
					parents = append(parents, p)
				}
			}
			awaitHalt(parents)
		}
		if running == 0 && round > 0 {
			return programs
		}
		demand(now().Before(end), fail(409, "freeze_failed", "processes still run after %s", freezeTime))
		if round > 0 { // no fork slips through it
			syscall.Kill(-1, syscall.SIGSTOP)
		}
		for _, p := range slices.Concat(all...) { // who waits for the program of a child of its vfork cannot stop before that
			if round%4 == 3 && waits[p.parent] && p.halted() && !a.freezer.stopped[p.pid] {
				syscall.Kill(p.pid, syscall.SIGCONT)
			}
		}
		time.Sleep(min(time.Duration(1+round)*time.Millisecond, 20*time.Millisecond))
	}
}

func (p process) halted() bool { return p.state == 'T' || p.state == 't' }

// byDepth lists all processes but this one, parents before their children.
func byDepth() (levels [][]process) {
	all, parents, families := listProcesses(), map[int]int{}, map[int]bool{}
	for _, p := range all {
		parents[p.pid], families[p.parent] = p.parent, true
	}
	for _, p := range all {
		p.hasChildren = families[p.pid]
		depth := 0
		for pid := p.pid; parents[pid] > 1 && depth <= len(all); pid = parents[pid] {
			depth++
		}
		for len(levels) <= depth {
			levels = append(levels, nil)
		}
		if p.pid != os.Getpid() && !p.isKernels() {
			levels[depth] = append(levels[depth], p)
		}
	}
	return levels
}

// awaitHalt waits until all of them that can are seen stopped, for a while.
func awaitHalt(processes []process) {
	buffer := make([]byte, 4096)
	for end := now().Add(haltTime); len(processes) > 0 && now().Before(end); time.Sleep(200 * time.Microsecond) {
		processes = slices.DeleteFunc(processes, func(p process) bool {
			p, alive := readProcess(p.pid, buffer)
			return !alive || p.halted() || p.state == 'Z' || p.state == 'D'
		})
	}
}

func (a *agent) thaw(r *request) any {
	nonce := readFreeze(r)
	a.freezer.mu.Lock()
	defer a.freezer.mu.Unlock()
	frozen := a.freezeUnder()
	demand(frozen == nonce || frozen == "", errFrozen)
	return map[string]any{"continued": a.goOn()}
}

// goOn lets go on what a freeze stopped, children before parents, and counts it.
func (a *agent) goOn() int {
	if a.freezeUnder() == "" {
		return 0
	}
	releaseDisks()
	continued := map[int]bool{}
	// A look at very many may miss some.
	for look := 0; len(a.freezer.stopped) > 0 && (look == 0 || look == 1 && len(continued) > manyProcesses); look++ {
		for _, level := range slices.Backward(byDepth()) {
			for _, p := range level {
				if p.halted() && !a.freezer.stopped[p.pid] && syscall.Kill(p.pid, syscall.SIGCONT) == nil {
					continued[p.pid] = true
				}
			}
		}
	}
	a.freezer.stopped, a.freezer.continued, a.freezer.until = nil, continued, now().Add(goOnTime)
	for _, c := range a.allCommands() {
		c.mu.Lock()
		c.limit.goOn()
		c.mu.Unlock()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frozen = ""
	return len(continued)
}

// goOnAs is goOn with all that a new incarnation must be told before; another sandbox than the one that froze has more.
func (a *agent) goOnAs(who identity, another bool) map[string]any {
	goOnAt(who.Now)
	programs := []string{}
	if another {
		if a.forgetHost(who) { // takes seconds, and nobody waits for it: a server reads them when it starts
			go a.reseed("/usr/bin/ssh-keygen", who.Sandbox, now().Add(keysTime), "-A", "-f", strings.TrimSuffix(a.users.folder, "/etc"))
		}
		a.forgetCommands()
	}
	addEntropy(who.SessionKey)
	hooks, _ := os.ReadDir(a.users.folder + reseedFolder)
	for _, hook := range hooks[:min(len(hooks), 100)] {
		path := a.users.folder + reseedFolder + "/" + hook.Name()
		if file, err := os.Stat(path); err == nil && file.Mode().IsRegular() && file.Mode()&0o111 != 0 {
			programs = append(programs, path)
		}
	}
	reseeded, failed := []string{}, []string{}
	for end := now().Add(reseedTime); len(programs) > 0; programs = programs[1:] {
		if name := filepath.Base(programs[0]); a.reseed(programs[0], who.Sandbox, end) {
			reseeded = append(reseeded, name)
		} else {
			failed = append(failed, name)
		}
	}
	return map[string]any{"reseeded": reseeded, "failed": failed, "continued": a.goOn()}
}

// forgetHost takes from the disk what must not be equal in two sandboxes, and says whether it had ssh host keys.
func (a *agent) forgetHost(who identity) bool {
	folder := a.users.folder
	a.makeMachineID(who)
	keys, _ := filepath.Glob(folder + "/ssh/ssh_host_*")
	for _, key := range keys {
		os.Remove(key)
	}
	return len(keys) > 0
}

// forgetCommands leaves the programs of all commands to themselves.
func (a *agent) forgetCommands() {
	held := a.allCommands()
	a.mu.Lock()
	clear(a.commands)
	clear(a.leaders)
	a.mu.Unlock()
	for _, c := range held {
		c.mu.Lock()
		c.lost = true
		for _, s := range c.out {
			s.acknowledge(s.written)
		}
		c.mu.Unlock()
		go func() {
			<-c.done
			c.mu.Lock()
			defer c.mu.Unlock()
			c.release()
		}()
	}
}

// addEntropy gives the kernel what no copy of it has. Refused where it is not the guest's own.
func addEntropy(key []byte) {
	pool := struct {
		bits, size int32
		data       [sha256.Size]byte
	}{8 * sha256.Size, sha256.Size, sha256.Sum256(append([]byte("cpuos-entropy\n"), key...))}
	if fd, err := syscall.Open("/dev/urandom", syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0); err == nil {
		syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), addEntropyCall, uintptr(unsafe.Pointer(&pool)))
		syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), reseedCall, 0)
		syscall.Close(fd)
	}
}

// reseed runs one program, and is true when it ended well and in time.
func (a *agent) reseed(program, sandbox string, end time.Time, arguments ...string) bool {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer null.Close()
	argv, fd := append([]string{program}, arguments...), null.Fd()
	ended := make(chan syscall.WaitStatus, 1)
	pid, err := a.children.spawn(program, argv, &syscall.ProcAttr{
		Dir: "/", Env: []string{"PATH=" + searchPath, "HOME=/root", "LANG=C.UTF-8", "CPUOS_SANDBOX=" + sandbox},
		Files: []uintptr{fd, fd, fd}, Sys: &syscall.SysProcAttr{Setsid: true},
	}, func(status syscall.WaitStatus) { ended <- status })
	if err != nil {
		return false
	}
	select {
	case status := <-ended:
		return status.Exited() && status.ExitStatus() == 0
	case <-time.After(time.Until(end)):
		syscall.Kill(-pid, syscall.SIGKILL)
		return false
	}
}

// listeners are the ports on which something waits for connections, but for the agent's own.
func listeners(own string) []listener {
	found := []listener{}
	for _, name := range []string{"tcp", "tcp6"} {
		text, _ := os.ReadFile("/proc/net/" + name)
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if len(fields) < 4 || fields[3] != "0A" || len(found) == maxListeners {
				continue
			}
			number, digits, _ := strings.Cut(fields[1], ":")
			bytes, _ := hex.DecodeString(number)
			for word := range slices.Chunk(bytes, 4) { // each in the host's order
				slices.Reverse(word)
			}
			address, ok := netip.AddrFromSlice(bytes)
			port, err := strconv.ParseUint(digits, 16, 16)
			if at := netip.AddrPortFrom(address, uint16(port)); ok && err == nil && at.String() != own {
				found = append(found, listener{port, address.String()})
			}
		}
	}
	return found
}

// timeLimit stands still while the sandbox does. The command's lock guards it.
type timeLimit struct {
	over  func()
	left  time.Duration
	end   time.Time
	timer *time.Timer // nil: it stands, or there is none
}

func (l *timeLimit) goOn() {
	if l.timer == nil && l.left > 0 {
		l.end, l.timer = now().Add(l.left), time.AfterFunc(l.left, l.over)
	}
}

func (l *timeLimit) hold() {
	if l.timer != nil {
		left := max(1, time.Until(l.end))
		if l.left = 0; l.timer.Stop() {
			l.left = left
		}
		l.timer = nil
	}
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}
