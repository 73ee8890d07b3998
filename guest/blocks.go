package main

import (
	"sync"
	"syscall"
)

// Blocks are 1 MiB pieces of memory outside Go's heap: an untouched page costs nothing, and a block goes back to the
// kernel when its command or transfer ends, not when a garbage collection happens to run.

const blockBytes = 1 << 20

type block = *[blockBytes]byte

type blockPool struct {
	mu   sync.Mutex // guards idle
	idle []block
}

var blocks blockPool

func (p *blockPool) take() block {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		b := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return b
	}
	p.mu.Unlock()
	memory, err := syscall.Mmap(-1, 0, blockBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return new([blockBytes]byte)
	}
	return block(memory)
}

// give takes a block back of which the first used bytes were written. Four are kept for the next command, emptied when
// they hold much.
func (p *blockPool) give(b block, used uint64) {
	if used > 64<<10 {
		syscall.Madvise(b[:], syscall.MADV_DONTNEED)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) < 4 {
		p.idle = append(p.idle, b)
		return
	}
	syscall.Munmap(b[:])
}
