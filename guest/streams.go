package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	pipeBytes = 1 << 20
	readBytes = 512 << 10 // at most in one read, so that sending overlaps with reading
	batchTime = 500 * time.Microsecond

	quietTime = 100 * time.Millisecond // without output after the program's end
	drainTime = time.Second            // in all, should a child go on writing

	copyThreshold = 64 << 10
	copyLimit     = 1 << 30
	logFolder     = "/var/log/cpuos/commands"
	keptFolders   = 32

	stdinBytes = 2 << 20 // held at most; a host keeps 256 KiB unacknowledged
	feedBytes  = 64 << 10
)

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

// stream is one output of a command. Its ring holds what the host has not acknowledged; the command's lock guards it,
// but the free space belongs to the pump and the unacknowledged bytes to the session that sends them.
type stream struct {
	name           string
	kind           byte
	file           *os.File // the agent's end of the pipe
	ring           block
	base           uint64 // offset that lies at the ring's start
	written, acked uint64
	atExit         uint64    // written when the program ended
	giveUp         time.Time // when to read no more after that
	eof            bool
	space          chan struct{} // room was made
	copy           *os.File      // all of the output, for programs inside to search
}

func newStream(name string, kind byte, file *os.File) *stream {
	return &stream{name: name, kind: kind, file: file, ring: takeBlock(), space: make(chan struct{}, 1)}
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
func poke[T any](channel chan T) {
	var nothing T
	select {
	case channel <- nothing:
	default:
	}
}

// pump moves a program's output into the ring until its end, or until the command ended without it; after that a child
// that still holds the pipe writes into nothing, but is never stopped by a full pipe.
func (c *command) pump(s *stream) {
	defer s.file.Close()
	if c.stdin.pty { // closing a terminal hangs up whoever has not exited yet, though it closed its side already
		defer func() { <-c.done }()
	}
	raw := got(s.file.SyscallConn())
	for burst := 0; !s.eof; {
		space := c.waitRoom(s)
		asked := now()
		n := readInto(raw, space)
		waited := now().Sub(asked)
		// Told first: the session sends the bytes while they are copied. They stay where they are until the next read.
		c.produced(s, n)
		c.copyOut(s, space[:n])
		// A program that writes often costs a wake-up each time, more than its bytes: let some gather.
		switch {
		case waited > 4*batchTime:
			burst = 0
		case burst < 8:
			burst++
		case n > 0 && n < len(space):
			time.Sleep(batchTime)
		}
	}
	if s.copy != nil {
		s.copy.Close()
	}
	s.file.SetReadDeadline(never)
	io.Copy(io.Discard, struct{ io.Reader }{s.file})
}

// readInto takes what is there to read, or waits for it. It gives 0 at the end, and when it is too late to wait.
func readInto(raw syscall.RawConn, space []byte) (n int) {
	read := func(fd uintptr) bool {
		var err error
		n, err = syscall.Read(int(fd), space)
		return err != syscall.EAGAIN && err != syscall.EINTR
	}
	if raw.Read(read) != nil { // on a busy machine something may be there all the same
		raw.Control(func(fd uintptr) { read(fd) })
	}
	return max(n, 0)
}

// waitRoom gives the next unbroken piece of room, once there is some.
func (c *command) waitRoom(s *stream) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s.written-s.acked == blockBytes {
		c.mu.Unlock()
		<-s.space
		c.mu.Lock()
		s.giveUp = now().Add(drainTime) // nothing is dropped for the host's slowness
	}
	if c.exit != nil {
		s.file.SetReadDeadline(now().Add(min(quietTime, time.Until(s.giveUp))))
		// More than the program left in its pipe and a read that was under way: a child of it may write for ever.
		if s.written-s.atExit > pipeBytes+readBytes {
			return nil
		}
	}
	// An emptied ring begins at its first pages again. Only here, between two reads; and not before the copy has begun:
	// until then the first bytes still lie there.
	if s.acked == s.written && s.written > copyThreshold {
		s.base = s.written
	}
	at := (s.written - s.base) % blockBytes
	return s.ring[at:min(at+blockBytes-(s.written-s.acked), blockBytes, at+readBytes)]
}

// produced counts what was read; nothing is the end.
func (c *command) produced(s *stream, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.written += uint64(n)
	if s.eof = n == 0; s.eof {
		c.endIfDone()
	}
	if c.lost {
		s.acknowledge(s.written)
	}
	poke(c.wake)
}

// copyOut writes what was just read to a file; the first call over the threshold starts it with all bytes before, which
// the ring still holds at its start.
func (c *command) copyOut(s *stream, data []byte) {
	if s.written <= copyThreshold || len(data) == 0 || c.copyLost.Load() {
		return
	}
	var err error
	if s.copy == nil {
		data = s.ring[:s.written]
		s.copy, err = c.agent.logs.create(c.id, s.name)
	}
	if err == nil && s.written <= copyLimit {
		_, err = s.copy.Write(data)
	}
	c.copied.Store(true)
	c.copyLost.CompareAndSwap(false, err != nil || s.written > copyLimit)
}

// logFolders are those with copies of output, oldest first.
type logFolders struct {
	mu  sync.Mutex // guards ids
	ids []string
}

// create makes a file in the command's folder; only the newest folders are kept.
func (l *logFolders) create(id, name string) (*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Contains(l.ids, id) {
		l.ids = append(l.ids, id)
	}
	if len(l.ids) > keptFolders {
		os.RemoveAll(filepath.Join(logFolder, l.ids[0]))
		l.ids = l.ids[1:]
	}
	folder := filepath.Join(logFolder, id)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	return os.Create(filepath.Join(folder, name)) // ours alone to write: the umask is 022
}

// stdinQueue takes what the host sends and feeds it to the program as fast as that reads. The command's lock guards it, but
// not during a write: the program's slowness must not hold up its output.
type stdinQueue struct {
	file     *os.File // nil: /dev/null
	pty      bool
	queue    []byte
	accepted uint64 // offset after the last byte taken
	written  uint64 // offset after the last byte that the program's pipe took, or that was thrown away
	end      bool
	feeding  bool
	closed   bool
}

// takeStdin takes bytes at an offset; those already taken are skipped. A gap or too much is out of contract.
func (c *command) takeStdin(offset uint64, data []byte, end bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.stdin
	demand(offset <= q.accepted && len(q.queue)+len(data) <= stdinBytes, errFrame)
	if skip := q.accepted - offset; skip < uint64(len(data)) && !q.end {
		q.accepted += uint64(len(data)) - skip
		q.queue = append(q.queue, data[skip:]...)
	}
	if end && !q.end && q.pty { // a terminal has no end: Ctrl-D at the start of a line is one
		q.queue = append(q.queue, 4)
	}
	if q.end = q.end || end; !q.feeding {
		q.feeding = true
		go c.feed()
	}
}

// feed writes until there is no more for now.
func (c *command) feed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.stdin
	for len(q.queue) > 0 && !q.closed {
		data := q.queue[:min(len(q.queue), feedBytes)]
		c.mu.Unlock()
		_, err := q.file.Write(data)
		c.mu.Lock()
		q.written = min(q.written+uint64(len(data)), q.accepted)
		if q.queue = q.queue[min(len(data), len(q.queue)):]; err != nil {
			q.shut() // the program closed its stdin: the rest has no reader
		}
		poke(c.wake)
	}
	if q.feeding = false; q.closed || q.end && !q.pty {
		q.shut()
		poke(c.wake)
	}
}

// shut ends the program's stdin, also under a write that waits; what comes later is thrown away. A terminal's file is its
// output's too: the pump closes it.
func (q *stdinQueue) shut() {
	if !q.closed && !q.pty && q.file != nil {
		q.file.Close()
	}
	q.closed, q.queue, q.written = true, nil, q.accepted
}
