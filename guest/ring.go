package main

import (
	"os"
	"syscall"
	"time"
)

const (
	pipeBytes  = 1 << 20
	batchBytes = 64 << 10
	batchTime  = 500 * time.Microsecond
	readBytes  = 512 << 10 // at most in one read, so that sending overlaps with reading
)

// stream is one output of a command. Its ring holds what the host has not acknowledged; the command's lock guards it,
// but the free space belongs to the pump and the unacknowledged bytes to the session that sends them.
type stream struct {
	name     string
	kind     byte
	file     *os.File // the agent's end of the pipe; nil without this stream
	ring     block
	base     uint64 // offset that lies at the ring's start
	written  uint64 // offset after the last byte read from the program
	acked    uint64
	atExit   uint64 // written when the program ended
	lastRead time.Time
	full     bool
	eof      bool
	space    chan struct{} // room was made, or the output is no longer wanted
	copy     logFile
}

// free gives the next unbroken piece of room.
func (s *stream) free() []byte {
	at := (s.written - s.base) % blockBytes
	return s.ring[at:min(at+blockBytes-(s.written-s.acked), blockBytes, at+readBytes)]
}

// unsent gives the next unbroken piece from an offset on.
func (s *stream) unsent(from uint64) []byte {
	at := (from - s.base) % blockBytes
	return s.ring[at:min(at+s.written-from, blockBytes, at+readBytes)]
}

// acknowledge frees the bytes before an offset.
func (s *stream) acknowledge(offset uint64) {
	if offset <= s.acked {
		return
	}
	s.acked = min(offset, s.written)
	poke(s.space)
}

// startOver lets an emptied ring begin at its first pages again. Only the pump may do it, between two reads: one that
// waits in a read already has its place. Not before the copy has begun: until then the first bytes still lie there.
func (s *stream) startOver() {
	if s.acked == s.written && s.written > copyThreshold {
		s.base = s.written
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
	if n < 0 {
		n = 0
	}
	if waited != nil {
		err = waited
	}
	return n, err
}

// readLast takes what a pipe still holds once the command's end was called: 0 when that is nothing, or when as much came
// after the program's end as the pipe can hold, since a child of it may write for ever.
func (c *command) readLast(s *stream, raw syscall.RawConn, space []byte) (n int) {
	c.mu.Lock()
	enough := s.written-s.atExit >= pipeBytes
	c.mu.Unlock()
	if enough {
		return 0
	}
	raw.Control(func(fd uintptr) {
		for {
			var err error
			if n, err = syscall.Read(int(fd), space); err != syscall.EINTR {
				return
			}
		}
	})
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
	for {
		space := c.waitRoom(s)
		asked := now()
		n, err := readInto(raw, space)
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
		// Told first: the session sends the bytes while they are copied. They stay where they are until this loop's next read.
		c.produced(s, n)
		if n == 0 {
			break
		}
		s.copy.add(c, s, space[:n])
	}
	c.release()
	if !last {
		return
	}
	s.file.SetReadDeadline(never)
	scratch := make([]byte, 4096)
	for {
		if n, err := readInto(raw, scratch); n == 0 && !os.IsTimeout(err) {
			return
		}
	}
}

// waitRoom gives room in the ring, once there is some.
func (c *command) waitRoom(s *stream) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s.written-s.acked == blockBytes {
		s.full = true
		c.mu.Unlock()
		<-s.space
		c.mu.Lock()
		s.full = false
	}
	s.startOver()
	return s.free()
}

func (c *command) produced(s *stream, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.written += uint64(n)
	s.lastRead = now()
	if n == 0 {
		s.eof = true
		c.endIfDone()
	}
	poke(c.wake)
}
