package main

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

// Calls that the standard library lacks.

const (
	atFdcwd         = -0x64
	atEaccess       = 0x200
	fSetpipeSize    = 1031
	prSetDumpable   = 4
	prSetSubreaper  = 36
	renameNoreplace = 1
	noChange        = ^uintptr(0)
)

// renameNew fails with EEXIST where something has the new name.
func renameNew(from, to string) error {
	p, q := got(syscall.BytePtrFromString(from)), got(syscall.BytePtrFromString(to))
	there, number := ^uintptr(-atFdcwd-1), map[string]uintptr{"amd64": 316, "arm64": 276}[runtime.GOARCH]
	_, _, e := syscall.Syscall6(number, there, uintptr(unsafe.Pointer(p)), there, uintptr(unsafe.Pointer(q)), renameNoreplace, 0)
	return errnoOrNil(e)
}

func ioctl(fd uintptr, request uintptr, argument unsafe.Pointer) error {
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(argument))
	return errnoOrNil(e)
}

func prctl(option, argument uintptr) error {
	_, _, e := syscall.Syscall6(syscall.SYS_PRCTL, option, argument, 0, 0, 0, 0)
	return errnoOrNil(e)
}

func errnoOrNil(e syscall.Errno) error {
	if e != 0 {
		return e
	}
	return nil
}

// makePipe gives a polled, non-blocking end for the agent and an ordinary one for the program.
func makePipe(agentReads bool) (agent *os.File, program int) {
	var p [2]int
	check(syscall.Pipe2(p[:], syscall.O_CLOEXEC))
	if !agentReads {
		p[0], p[1] = p[1], p[0]
	}
	// Only for speed: refused where the kernel's limit is lower.
	syscall.Syscall(syscall.SYS_FCNTL, uintptr(p[0]), fSetpipeSize, pipeBytes)
	syscall.SetNonblock(p[0], true)
	return os.NewFile(uintptr(p[0]), "pipe"), p[1]
}

// openPty makes a terminal whose program side belongs to the user.
func openPty(who *user, size windowSize) (master *os.File, slave int) {
	fd := got(syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0))
	master = os.NewFile(uintptr(fd), "pty")
	err := attempt(func() {
		var unlock, number int32
		check(ioctl(uintptr(fd), syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)))
		check(ioctl(uintptr(fd), syscall.TIOCGPTN, unsafe.Pointer(&number)))
		resizePty(master, size)
		slave = got(syscall.Open("/dev/pts/"+strconv.Itoa(int(number)), syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0))
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
	if size.Cols < 1 || size.Rows < 1 || size.Cols > 1000 || size.Rows > 1000 {
		check(invalid("a terminal has 1 to 1000 columns and rows"))
	}
	window := [4]uint16{size.Rows, size.Cols, 0, 0}
	control(master, func(fd uintptr) { ioctl(fd, syscall.TIOCSWINSZ, unsafe.Pointer(&window)) })
}

// control works on a descriptor that stays open meanwhile; on a closed file it does nothing.
func control(file syscall.Conn, work func(fd uintptr)) {
	if raw, err := file.SyscallConn(); err == nil {
		raw.Control(work)
	}
}
