package main

import (
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
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

// Bulk moves in calls that block. Where the kernel is gVisor, every poll for a piece costs more than the piece, and one
// call that waits for a whole block costs the guest one switch.
const bulkBytes = 4 * blockBytes // from here on; below, the preparation is not worth it

// blocking gives the connection as a file whose calls block. Nobody else may use the connection then.
func (l link) blocking(work func(socket *os.File)) {
	control(l.TCPConn, func(fd int) {
		limit := unix.NsecToTimeval(int64(stallTime))
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit)
		syscall.SetNonblock(fd, false)
	})
	defer control(l.TCPConn, func(fd int) { syscall.SetNonblock(fd, true) })
	socket := got(l.File())
	defer socket.Close()
	work(socket)
}

// copyTo writes the body to a file.
func (r *request) copyTo(file *os.File) {
	b := takeBlock()
	defer giveBlock(b, blockBytes)
	if r.remaining < bulkBytes { // or of unknown length
		got(io.CopyBuffer(struct{ io.Writer }{file}, struct{ io.Reader }{r}, b[:]))
		return
	}
	// What came along with the head, and the answer to Expect, are the reader's.
	n := got(r.Read(b[:1]))
	n += got(io.ReadFull(r, b[1:1+r.in.Buffered()]))
	got(file.Write(b[:n]))
	r.blocking(func(socket *os.File) { r.receive(socket, file) })
}

// receive takes one block while another is written.
func (r *request) receive(socket, file *os.File) {
	free, full := make(chan []byte, 2), make(chan []byte, 2)
	for range cap(free) {
		b := takeBlock()
		defer giveBlock(b, blockBytes)
		free <- b[:]
	}
	go func() {
		defer close(full)
		for left, n := r.remaining, 1; left > 0 && n > 0; left -= int64(n) {
			space := <-free
			if space == nil { // writing failed
				return
			}
			n = fill(int(socket.Fd()), space[:min(left, blockBytes)])
			full <- space[:n]
		}
	}()
	var err error
	for piece := range full {
		r.remaining -= int64(len(piece))
		if _, err = file.Write(piece); err != nil {
			piece = nil
		}
		free <- piece[:cap(piece)]
	}
	if r.bodyEnd = r.remaining == 0; err == nil && !r.bodyEnd {
		err = errIncomplete
	}
	check(err)
}

// fill receives as much as the space holds, or 0 when no more comes.
func fill(fd int, space []byte) (n int) {
	for err := error(syscall.EINTR); err == syscall.EINTR; {
		n, _, err = syscall.Recvfrom(fd, space, syscall.MSG_WAITALL)
	}
	return max(n, 0)
}

// sendFile sends the whole section, or fails: then only the cut connection says so.
func (r *request) sendFile(section *io.SectionReader) {
	b := takeBlock()
	defer giveBlock(b, blockBytes)
	send := func(w io.Writer) {
		if got(io.CopyBuffer(struct{ io.Writer }{w}, section, b[:])) < section.Size() {
			check(io.ErrUnexpectedEOF)
		}
	}
	if section.Size() < bulkBytes {
		send(r.link)
	} else {
		r.blocking(func(socket *os.File) { send(socket) })
	}
}
