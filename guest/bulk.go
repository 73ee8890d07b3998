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
func (l link) blocking(work func(fd int)) {
	var err error
	control(l.TCPConn, func(descriptor uintptr) {
		fd, limit := int(descriptor), syscall.NsecToTimeval(int64(stallTime))
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit)
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit)
		syscall.SetNonblock(fd, false)
		defer syscall.SetNonblock(fd, true)
		err = attempt(func() { work(fd) })
	})
	check(err)
}

// receiveWhole fills p from a socket that blocks.
func receiveWhole(fd int, p []byte) error {
	for len(p) > 0 {
		n, _, e := syscall.Syscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), syscall.MSG_WAITALL, 0, 0)
		if e == 0 && n > 0 {
			p = p[n:]
		} else if e != syscall.EINTR {
			return errIncomplete
		}
	}
	return nil
}

func sendWhole(fd int, p []byte) {
	for len(p) > 0 {
		n, err := syscall.Write(fd, p)
		if err != syscall.EINTR {
			check(err)
		}
		p = p[max(n, 0):]
	}
}

// copyTo writes the body to a file.
func (r *request) copyTo(file *os.File) {
	b := takeBlock()
	defer giveBlock(b, blockBytes)
	if r.chunked || r.remaining < bulkBytes {
		got(io.CopyBuffer(struct{ io.Writer }{file}, struct{ io.Reader }{r}, b[:]))
		return
	}
	// What came along with the head, and the answer to Expect, are the reader's.
	n := got(r.Read(b[:1]))
	n += got(io.ReadFull(r, b[1:1+r.in.Buffered()]))
	got(file.Write(b[:n]))
	r.blocking(func(fd int) { check(r.receiveFile(fd, file)) })
}

// receiveFile receives one block while another is written.
func (r *request) receiveFile(fd int, file *os.File) (err error) {
	free, full, result := make(chan block, 2), make(chan []byte, 2), make(chan error, 1)
	var failed atomic.Bool
	for range cap(free) {
		free <- takeBlock()
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
		if err = receiveWhole(fd, piece); err != nil {
			piece = piece[:0]
		}
		r.remaining -= int64(len(piece))
		r.bodyEnd = r.remaining == 0
		full <- piece
	}
	close(full)
	err = errors.Join(<-result, err)
	for range cap(free) {
		giveBlock(<-free, blockBytes)
	}
	return err
}

// sendFile sends exactly length bytes, or fails: then only the cut connection says so.
func (r *request) sendFile(content io.ReaderAt, offset, length int64) {
	b := takeBlock()
	defer giveBlock(b, blockBytes)
	send := func(write func([]byte)) {
		for length > 0 {
			n, err := content.ReadAt(b[:min(length, blockBytes)], offset)
			if n == 0 {
				check(err)
			}
			write(b[:n])
			offset, length = offset+int64(n), length-int64(n)
		}
	}
	if length < bulkBytes {
		send(func(p []byte) { r.send(p) })
	} else {
		r.blocking(func(fd int) { send(func(p []byte) { sendWhole(fd, p) }) })
	}
}
