package main

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Bulk moves in calls that block. Where the kernel is gVisor, every poll for a piece costs more than the piece, and one
// call that waits for a whole block costs the guest one switch.

const bulkBytes = 4 * blockBytes // from here on; below, the preparation is not worth it

// blocking gives the connection's descriptor, set to block, to work. Only one goroutine may use the connection then.
func (c *conn) blocking(work func(fd int) error) (err error) {
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := raw.Control(func(descriptor uintptr) {
		fd, limit := int(descriptor), syscall.NsecToTimeval(int64(stallTime))
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit)
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit)
		syscall.SetNonblock(fd, false)
		defer syscall.SetNonblock(fd, true)
		err = work(fd)
	})
	return errors.Join(controlErr, err)
}

// cut ends a connection whoever uses it: closing alone would wake nobody who is in a call that blocks.
func (c *conn) cut() {
	c.tcp.CloseRead()
	c.tcp.CloseWrite()
	c.tcp.Close()
}

// receiveWhole fills p from a socket that blocks.
func receiveWhole(fd int, p []byte) error {
	for len(p) > 0 {
		n, _, e := syscall.Syscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), syscall.MSG_WAITALL, 0, 0)
		if e == syscall.EINTR {
			continue
		}
		if e != 0 || n == 0 {
			return errIncomplete
		}
		p = p[n:]
	}
	return nil
}

func sendWhole(fd int, p []byte) error {
	for len(p) > 0 {
		n, err := syscall.Write(fd, p)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// copyTo writes the body to a file.
func (r *request) copyTo(file *os.File) error {
	if r.chunked || r.remaining < bulkBytes {
		return copyBody(file, r)
	}
	// What came along with the head, and the answer to Expect, are the reader's.
	first := make([]byte, 1)
	if _, err := r.Read(first); err != nil {
		return err
	}
	first = append(first, make([]byte, r.in.Buffered())...)
	if _, err := io.ReadFull(r, first[1:]); err != nil {
		return err
	}
	if _, err := file.Write(first); err != nil {
		return err
	}
	return r.blocking(func(fd int) error { return r.copyBulk(fd, file) })
}

// copyBulk receives one block while another is written.
func (r *request) copyBulk(fd int, file *os.File) (err error) {
	free, full, result := make(chan block, 2), make(chan []byte, 2), make(chan error, 1)
	var failed atomic.Bool
	for range cap(free) {
		free <- blocks.take()
	}
	go func() {
		var err error
		for piece := range full {
			if err == nil {
				_, err = file.Write(piece)
				failed.Store(err != nil)
			}
			free <- block(piece[:blockBytes])
		}
		result <- err
	}()
	for r.remaining > 0 && err == nil && !failed.Load() {
		piece := (<-free)[:min(r.remaining, blockBytes)]
		if err = receiveWhole(fd, piece); err == nil {
			r.remaining -= int64(len(piece))
			r.bodyEnd = r.remaining == 0
		} else {
			piece = piece[:0]
		}
		full <- piece
	}
	close(full)
	if written := <-result; written != nil {
		err = written
	}
	for range cap(free) {
		blocks.give(<-free, blockBytes)
	}
	return err
}

// sendFile sends exactly length bytes, or fails.
func (r *request) sendFile(file *os.File, offset, length int64) error {
	b := blocks.take()
	defer blocks.give(b, blockBytes)
	move := func(send func([]byte) error) error {
		for length > 0 {
			n, err := file.ReadAt(b[:min(length, blockBytes)], offset)
			if n == 0 {
				return err
			}
			if err := send(b[:n]); err != nil {
				return err
			}
			offset, length = offset+int64(n), length-int64(n)
		}
		return nil
	}
	if length < bulkBytes {
		return move(func(p []byte) error { return r.send(p) })
	}
	return r.blocking(func(fd int) error { return move(func(p []byte) error { return sendWhole(fd, p) }) })
}
