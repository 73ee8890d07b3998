package main

import (
	"os"
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
	p, e1 := syscall.BytePtrFromString(from)
	q, e2 := syscall.BytePtrFromString(to)
	if e1 != nil || e2 != nil {
		return syscall.EINVAL
	}
	there := ^uintptr(-atFdcwd - 1)
	_, _, e := syscall.Syscall6(sysRenameat2, there, uintptr(unsafe.Pointer(p)), there, uintptr(unsafe.Pointer(q)), renameNoreplace, 0)
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

// makePipe gives an ordinary end for the program and a polled, non-blocking one for the agent.
func makePipe(agentReads bool) (agent *os.File, program int, err error) {
	var p [2]int
	if err = syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return nil, 0, err
	}
	ours, theirs := p[0], p[1]
	if !agentReads {
		ours, theirs = p[1], p[0]
	}
	// Only for speed: refused where the kernel's limit is lower.
	syscall.Syscall(syscall.SYS_FCNTL, uintptr(ours), fSetpipeSize, pipeBytes)
	syscall.SetNonblock(ours, true)
	return os.NewFile(uintptr(ours), "pipe"), theirs, nil
}
