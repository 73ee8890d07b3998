package main

import (
	"os"
	"sync"
)

const stdinWindow = 1 << 20

// stdinQueue takes what the host sends and feeds it to the program as fast as that reads. It has a lock of its own: the
// program's slowness must not hold up its output.
type stdinQueue struct {
	file   *os.File // nil: /dev/null
	pty    bool
	notify func() // bytes were written: the session acknowledges

	mu       sync.Mutex // guards the rest
	changed  *sync.Cond
	queue    [][]byte
	queued   int
	accepted uint64 // offset after the last byte taken
	written  uint64 // offset after the last byte that the program's pipe took
	end      bool
	feeding  bool
	closed   bool
}

func newStdinQueue(file *os.File, pty bool) *stdinQueue {
	q := &stdinQueue{file: file, pty: pty, closed: file == nil}
	q.changed = sync.NewCond(&q.mu)
	return q
}

// put takes bytes at an offset; those already taken are skipped. It waits while the queue is full.
func (q *stdinQueue) put(offset uint64, data []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.queued >= stdinWindow && !q.closed {
		q.changed.Wait()
	}
	if offset > q.accepted {
		return invalid("stdin at offset %d leaves a gap: %d bytes were taken", offset, q.accepted)
	}
	skip := q.accepted - offset
	if skip >= uint64(len(data)) {
		return nil
	}
	if q.end {
		return invalid("stdin has ended at offset %d", q.accepted)
	}
	data = data[skip:]
	q.accepted += uint64(len(data))
	if q.closed {
		q.written = q.accepted
		q.notify()
		return nil
	}
	q.queue = append(q.queue, append([]byte(nil), data...))
	q.queued += len(data)
	q.feed()
	return nil
}

func (q *stdinQueue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.end = true
	q.feed()
}

func (q *stdinQueue) feed() {
	if !q.feeding && !q.closed {
		q.feeding = true
		go q.run()
	}
}

func (q *stdinQueue) run() {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer func() { q.feeding = false }()
	for !q.closed {
		if len(q.queue) == 0 {
			if q.end {
				q.shut()
			}
			return
		}
		data := q.queue[0]
		q.queue = q.queue[1:]
		q.mu.Unlock()
		_, err := q.file.Write(data)
		q.mu.Lock()
		q.queued -= len(data)
		q.written += uint64(len(data))
		if err != nil {
			q.closed = true // the program closed its stdin: the rest has no reader
			q.drop()
		}
		q.changed.Broadcast()
		q.notify()
	}
	if !q.pty {
		q.file.Close()
	}
}

// shut ends the program's stdin. A terminal has no end: Ctrl-D at the start of a line is one.
func (q *stdinQueue) shut() {
	if q.pty {
		q.mu.Unlock()
		q.file.Write([]byte{4})
		q.mu.Lock()
		return
	}
	q.closed = true
	q.file.Close()
}

func (q *stdinQueue) drop() {
	q.queue, q.queued, q.written = nil, 0, q.accepted
	q.changed.Broadcast()
}

// abandon is called when the program has ended.
func (q *stdinQueue) abandon() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.closed = true
	q.drop()
	if !q.pty {
		q.file.Close() // wakes a write that waits
	}
}

func (q *stdinQueue) offsets() (accepted, written uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.accepted, q.written
}
