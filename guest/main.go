// The guest agent of cpuOS: PID 1 of a sandbox, serving the contract api/guest.md to the host side alone.
package main

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	guestAddress = "10.0.0.2:1"
	hostAddress  = "10.0.0.1"
	bindTime     = time.Minute // the address may appear after the agent started

	reservedThreads = 32
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("cpuos-agent: ")
	// gVisor takes up a saved sandbox only with the arguments that it was started with; the environment may differ.
	sandbox := flag.String("sandbox", os.Getenv("CPUOS_SANDBOX"), "id of this sandbox (CPUOS_SANDBOX)")
	nodeKey := flag.String("node-key", "", "base64 of the node's Ed25519 public key")
	listen := flag.String("listen", "", "for tests: serve this loopback address, and say it on stdout")
	userTable := flag.String("user-table", "/etc", "folder of passwd and group")
	flag.Parse()
	makeMachine()
	key, err := base64.StdEncoding.DecodeString(*nodeKey)
	if err != nil || len(key) != ed25519.PublicKeySize || *sandbox == "" {
		log.Fatal("usage: cpuos-agent --sandbox ID --node-key BASE64")
	}
	address, peer := guestAddress, net.ParseIP(hostAddress)
	if *listen != "" {
		address, peer = *listen, net.IPv4(127, 0, 0, 1)
	}
	listener, err := bind(address)
	if err != nil {
		log.Fatal("cannot listen on ", address, ": ", err)
	}
	if *listen != "" {
		fmt.Println(listener.Addr())
	}
	a := newAgent(*sandbox, key, *userTable)
	go a.children.loop()
	a.prepare = sync.OnceFunc(func() {
		beLean()
		beInit()
		reserveThreads()
	})
	a.accept(listener, peer)
}

// beLean trades some of Go's speed for memory: every idle sandbox holds one agent.
func beLean() {
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(48 << 20)
	runtime.GOMAXPROCS(max(2, min(4, runtime.NumCPU())))
}

// reserveThreads makes the threads that the agent may need before a program can take all that the sandbox may have: Go
// ends a process that cannot make one. Parked threads stay with the runtime and serve any goroutine that blocks.
func reserveThreads() {
	var running, parked sync.WaitGroup
	running.Add(reservedThreads)
	for range reservedThreads {
		parked.Go(func() {
			runtime.LockOSThread() // a goroutine tied to its thread makes the runtime start another for the next one
			defer runtime.UnlockOSThread()
			running.Done()
			running.Wait()
		})
	}
	parked.Wait()
}

// beInit does what the first process owes: signals never end it, orphans come to it, and programs get sane limits.
func beInit() {
	beDeaf()
	syscall.Umask(0o022)
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	if os.Getpid() != 1 {
		unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	var files syscall.Rlimit
	syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files)
	files.Cur = min(files.Max, 1<<16)
	syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files)
	os.Chdir("/")
}

// beDeaf has signals do nothing here. They are caught, not ignored, as programs would inherit that. But Go sets each that it
// handles back in every child, sixty calls before a program starts: so it believes that they are ignored, also before.
func beDeaf() {
	for number := syscall.Signal(1); number <= 64; number++ {
		if number != syscall.SIGURG { // Go's own
			var action [4]uintptr
			signal.Ignore(number)
			signal.Notify(make(chan os.Signal, 1), number)
			sigaction(number, nil, &action)
			signal.Ignore(number)
			if number == syscall.SIGCHLD { // the reaper waits anyway
				action = [4]uintptr{}
			}
			sigaction(number, &action, nil)
		}
	}
}

func sigaction(number syscall.Signal, to, from *[4]uintptr) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(number), uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(from)), 8, 0, 0)
}

func bind(address string) (listener net.Listener, err error) {
	config := net.ListenConfig{KeepAlive: -1} // the other end is this machine's
	for end := now().Add(bindTime); ; time.Sleep(5 * time.Millisecond) {
		if listener, err = config.Listen(context.Background(), "tcp4", address); err == nil || now().After(end) {
			return listener, err
		}
	}
}
