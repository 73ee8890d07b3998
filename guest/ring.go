package main

import (
	"os"
	"syscall"
	"time"
)

const (
	pipeBytes  = 1 << 20
	readBytes  = 512 << 10 // at most in one read, so that sending overlaps with reading
	batchBytes = 64 << 10
	batchTime  = 500 * time.Microsecond
)

// stream is one output of a command. Its ring holds what the host has not acknowledged; the command's lock guards it,
// but the free space belongs to the pump and the unacknowledged bytes to the session that sends them.
type stream struct {
	name           string
	kind           byte
	file           *os.File // the agent's end of the pipe
	ring           block
	base           uint64 // offset that lies at the ring's start
	written, acked uint64
	atExit         uint64 // written when the program ended
	lastRead       time.Time
	full, eof      bool
	space          chan struct{} // room was made
	copy           logFile
}

// unsent gives the next unbroken piece from an offset on.
func (s *stream) unsent(from uint64) []byte {
	at := (from - s.base) % blockBytes
	return s.ring[at:min(at+s.written-from, blockBytes, at+readBytes)]
}

// acknowledge frees the bytes before an offset.
func (s *stream) acknowledge(offset uint64) {
	if offset > s.acked {
		s.acked = min(offset, s.written)
		poke(s.space)
	}
}

// poke wakes whoever waits on a channel of one slot.
func poke(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// readInto waits until there is something to read. n is 0 at the end.
func readInto(raw syscall.RawConn, space []byte) (n int, err error) {
	waited := raw.Read(func(fd uintptr) bool {
		n, err = syscall.Read(int(fd), space)
		return err != syscall.EAGAIN && err != syscall.EINTR
	})
	if waited != nil {
		err = waited
	}
	return max(n, 0), err
}

// readLast takes what a pipe still holds once the command's end was called: 0 when that is nothing, or when as much came
// after the program's end as the pipe can hold, since a child of it may write for ever.
func (c *command) readLast(s *stream, raw syscall.RawConn, space []byte) (n int) {
	c.mu.Lock()
	enough := s.written-s.atExit >= pipeBytes
	c.mu.Unlock()
	for err := error(syscall.EINTR); !enough && err == syscall.EINTR; {
		raw.Control(func(fd uintptr) { n, err = syscall.Read(int(fd), space) })
	}
	return max(n, 0)
}

// pump moves a program's output into the ring until its end, or until the command ended without it; after that a child
// that still holds the pipe writes into nothing, but is never stopped by a full pipe.
func (c *command) pump(s *stream) {
	defer s.file.Close()
	raw, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	if c.stdin.pty { // closing a terminal hangs up whoever has not exited yet, though it closed its side already
		defer func() { <-c.done }()
	}
	burst, last := 0, false
	for n := 1; n > 0; {
		space := c.waitRoom(s)
		asked := now()
		n, err = readInto(raw, space)
		if last = n == 0 && os.IsTimeout(err); last {
			n = c.readLast(s, raw, space)
		}
		// A program that writes little and often costs a wake-up each time, more than its bytes: let some gather.
		switch {
		case now().Sub(asked) > 4*batchTime:
			burst = 0
		case burst < 8:
			burst++
		case n > 0 && n < min(len(space), batchBytes):
			time.Sleep(batchTime)
		}
		// Told first: the session sends the bytes while they are copied. They stay where they are until the next read.
		c.produced(s, n)
		s.copy.add(c, s, space[:n])
	}
	if c.release(); last {
		s.file.SetReadDeadline(never)
		scratch := make([]byte, 4096)
		for n := 1; n > 0; {
			n, _ = readInto(raw, scratch)
		}
	}
}

// waitRoom gives the next unbroken piece of room, once there is some.
func (c *command) waitRoom(s *stream) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s.full = s.written-s.acked == blockBytes; s.full; s.full = s.written-s.acked == blockBytes {
		c.mu.Unlock()
		<-s.space
		c.mu.Lock()
	}
	// An emptied ring begins at its first pages again. Only here, between two reads; and not before the copy has begun:
	// until then the first bytes still lie there.
	if s.acked == s.written && s.written > copyThreshold {
		s.base = s.written
	}
	at := (s.written - s.base) % blockBytes
	return s.ring[at:min(at+blockBytes-(s.written-s.acked), blockBytes, at+readBytes)]
}

func (c *command) produced(s *stream, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.written += uint64(n)
	s.lastRead = now()
	if s.eof = n == 0; s.eof {
		c.endIfDone()
	}
	poke(c.wake)
}
