package main

import (
	"os"
	"sync"
)

const (
	stdinBytes = 2 << 20 // held at most; a host keeps 256 KiB unacknowledged
	feedBytes  = 64 << 10
)

// stdinQueue takes what the host sends and feeds it to the program as fast as that reads. It has a lock of its own: the
// program's slowness must not hold up its output.
type stdinQueue struct {
	file   *os.File // nil: /dev/null
	pty    bool
	notify chan struct{} // bytes were written: the session acknowledges

	mu       sync.Mutex // guards the rest
	queue    []byte
	accepted uint64 // offset after the last byte taken
	written  uint64 // offset after the last byte that the program's pipe took, or that was thrown away
	end      bool
	feeding  bool
	closed   bool
}

// put takes bytes at an offset; those already taken are skipped. A gap or too much is out of contract.
func (q *stdinQueue) put(offset uint64, data []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if offset > q.accepted || len(q.queue)+len(data) > stdinBytes {
		check(errFrame)
	}
	if skip := q.accepted - offset; skip < uint64(len(data)) && !q.end {
		q.accepted += uint64(len(data)) - skip
		q.queue = append(q.queue, data[skip:]...)
		q.feed()
	}
}

func (q *stdinQueue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.end = true
	q.feed()
}

func (q *stdinQueue) feed() {
	if q.closed {
		q.queue, q.written = nil, q.accepted
		poke(q.notify)
	} else if !q.feeding {
		q.feeding = true
		go q.run()
	}
}

func (q *stdinQueue) run() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.queue) > 0 && !q.closed {
		data := q.queue[:min(len(q.queue), feedBytes)]
		q.mu.Unlock()
		_, err := q.file.Write(data)
		q.mu.Lock()
		if q.written += uint64(len(data)); len(q.queue) > 0 {
			q.queue = q.queue[len(data):]
		}
		if err != nil {
			q.shut() // the program closed its stdin: the rest has no reader
		}
		poke(q.notify)
	}
	q.feeding = false
	if q.end && q.pty && !q.closed { // a terminal has no end: Ctrl-D at the start of a line is one
		q.file.Write([]byte{4})
	} else if q.end {
		q.shut()
	}
}

// shut ends the program's stdin; what comes later is thrown away. A terminal's file is its output's too: the pump closes it.
func (q *stdinQueue) shut() {
	if !q.closed && !q.pty && q.file != nil {
		q.file.Close()
	}
	q.closed, q.queue, q.written = true, nil, q.accepted
}

// abandon is called when the program has ended; it wakes a write that waits.
func (q *stdinQueue) abandon() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.shut()
}

func (q *stdinQueue) offsets() (accepted, written uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.accepted, q.written
}
