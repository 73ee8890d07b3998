package main

import (
	"os"
	"syscall"
	"unsafe"
)

// Calls that the standard library lacks, or makes for all threads where one is meant.

const (
	atFdcwd           = -0x64
	atEmptyPath       = 0x1000
	atRemovedir       = 0x200
	atSymlinkNofollow = 0x100
	atEaccess         = 0x200
	oPath             = 0x200000
	fSetpipeSz        = 1031
	prSetSubreaper    = 36
	prSetDumpable     = 4
	renameNoreplace   = 1
	noChange          = ^uintptr(0)
)

func fstatat(dir int, name string, flags int) (syscall.Stat_t, error) {
	var st syscall.Stat_t
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return st, err
	}
	_, _, e := syscall.Syscall6(sysFstatat, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(&st)), uintptr(flags), 0, 0)
	return st, errnoOrNil(e)
}

func lstat(path string) (syscall.Stat_t, error) { return fstatat(atFdcwd, path, atSymlinkNofollow) }

func unlinkat(dir int, name string, flags int) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, e := syscall.Syscall(syscall.SYS_UNLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(flags))
	return errnoOrNil(e)
}

func renameat2(fromDir int, from string, toDir int, to string, flags int) error {
	p, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	q, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	_, _, e := syscall.Syscall6(sysRenameat2, uintptr(fromDir), uintptr(unsafe.Pointer(p)), uintptr(toDir), uintptr(unsafe.Pointer(q)), uintptr(flags), 0)
	return errnoOrNil(e)
}

func symlinkat(target string, dir int, name string) error {
	p, err := syscall.BytePtrFromString(target)
	if err != nil {
		return err
	}
	q, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, e := syscall.Syscall(syscall.SYS_SYMLINKAT, uintptr(unsafe.Pointer(p)), uintptr(dir), uintptr(unsafe.Pointer(q)))
	return errnoOrNil(e)
}

func linkat(fromDir int, from string, toDir int, to string) error {
	p, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	q, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	_, _, e := syscall.Syscall6(syscall.SYS_LINKAT, uintptr(fromDir), uintptr(unsafe.Pointer(p)), uintptr(toDir), uintptr(unsafe.Pointer(q)), 0, 0)
	return errnoOrNil(e)
}

func readlinkat(dir int, name string) (string, error) {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return "", err
	}
	buf := make([]byte, 4096)
	n, _, e := syscall.Syscall6(syscall.SYS_READLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), 0, 0)
	if e != 0 {
		return "", e
	}
	return string(buf[:n]), nil
}

func ioctl(fd uintptr, request uintptr, argument unsafe.Pointer) error {
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(argument))
	return errnoOrNil(e)
}

func fcntl(fd uintptr, command, argument uintptr) error {
	_, _, e := syscall.Syscall(syscall.SYS_FCNTL, fd, command, argument)
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
	fcntl(uintptr(ours), fSetpipeSz, pipeBytes) // only speed: refused where the kernel's limit is lower
	syscall.SetNonblock(ours, true)
	return os.NewFile(uintptr(ours), "pipe"), theirs, nil
}
