package main

import "syscall"

// Blocks are 1 MiB pieces of memory outside Go's heap: an untouched page costs nothing, and a block goes back to the
// kernel when its command or transfer ends, not when a garbage collection happens to run.
const blockBytes = 1 << 20

type block = *[blockBytes]byte

var idle = make(chan block, 4) // kept for the next command

func takeBlock() block {
	select {
	case b := <-idle:
		return b
	default:
		return block(got(syscall.Mmap(-1, 0, blockBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)))
	}
}

// giveBlock takes a block back of which the first used bytes were written; one that holds much is emptied.
func giveBlock(b block, used uint64) {
	if used > 64<<10 {
		syscall.Madvise(b[:], syscall.MADV_DONTNEED)
	}
	select {
	case idle <- b:
	default:
		syscall.Munmap(b[:])
	}
}
