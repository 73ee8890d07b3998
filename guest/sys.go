package main

import (
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// makePipe gives a polled, non-blocking end for the agent and an ordinary one for the program.
func makePipe(agentReads bool) (agent *os.File, program int) {
	var p [2]int
	check(syscall.Pipe2(p[:], syscall.O_CLOEXEC))
	if !agentReads {
		p[0], p[1] = p[1], p[0]
	}
	unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, pipeBytes) // only for speed: refused where the kernel's limit is lower
	syscall.SetNonblock(p[0], true)
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
	if size.Cols < 1 || size.Rows < 1 || size.Cols > 1000 || size.Rows > 1000 {
		check(invalid("a terminal has 1 to 1000 columns and rows"))
	}
	control(master, func(fd int) { unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols}) })
}

// control works on a descriptor that stays open meanwhile; on a closed file it does nothing.
func control(file syscall.Conn, work func(fd int)) {
	if raw, err := file.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { work(int(fd)) })
	}
}
