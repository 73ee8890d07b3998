package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// demandRegular ends a call that serves files alone.
func demandRegular(file fs.FileInfo) {
	switch kindOf(file) {
	case "directory":
		check(syscall.EISDIR)
	case "other":
		check(fail(409, "file_kind_unsupported", "%s is a device, socket or pipe", file.Name()))
	}
}

func (a *agent) readFile(f fileCall) any {
	offset, length := f.number("offset", 0, 10), f.number("length", 1<<62, 10)
	var file *os.File
	f.who.run(func() {
		demandRegular(got(os.Stat(f.path))) // before the open, as opening a device may do something
		file = got(os.OpenFile(f.path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0))
	})
	defer file.Close()
	now := got(file.Stat())
	demandRegular(now)
	size, content := now.Size(), io.ReaderAt(file)
	if size == 0 { // the kernel's own files have no size, only content
		data, _ := io.ReadAll(io.LimitReader(file, 4<<20))
		size, content = int64(len(data)), bytes.NewReader(data)
	}
	length = min(length, max(0, size-offset))
	f.send(f.head(200, "application/octet-stream", length, fmt.Sprintf("X-File-Size: %d\r\n", size)))
	f.sendFile(io.NewSectionReader(content, offset, length))
	return nil
}

const (
	temporaryPrefix = ".cpuos-tmp-"            // of a file being written; with its random part far below NAME_MAX
	temporaryNew    = temporaryPrefix + "new-" // of one that replaces nothing: a watch tells them apart
)

// fileWriter replaces one file as a whole: readers see the old or the new one.
type fileWriter struct {
	who       *user
	exclusive bool
	mode      int64  // -1: not given
	final     string // the path with links followed
	temporary string
	file      *os.File
	before    *syscall.Stat_t // of the file that is replaced
}

func (a *agent) writeFile(f fileCall) any {
	w := fileWriter{who: f.who, exclusive: f.flag("exclusive", false), mode: f.mode()}
	parents := f.flag("create_parents", true)
	demand(!strings.HasSuffix(f.query.Get("path"), "/"), syscall.EISDIR)
	f.who.run(func() { w.open(f.path, parents) })
	defer w.close()
	f.copyTo(w.file)
	w.commit()
	return a.info(f.path, got(w.file.Stat()))
}

// open looks the place up with the user's rights.
func (w *fileWriter) open(p string, parents bool) {
	w.final = followLinks(p)
	folder, name := path.Split(w.final)
	demand(name != "" && name != "." && name != "..", syscall.EISDIR)
	if parents {
		check(os.MkdirAll(folder, 0o755))
	}
	prefix := temporaryNew
	if there, err := os.Lstat(w.final); err == nil {
		w.before, prefix = there.Sys().(*syscall.Stat_t), temporaryPrefix
		demand(!w.exclusive, syscall.EEXIST)
		demandRegular(there)
		// Replacing needs only the folder's permission, but a file that the user may not write stays as it is.
		check(access(w.final, mayWrite))
		demand(w.mode < 0 || w.who.uid == 0 || w.who.uid == w.before.Uid, syscall.EPERM) // only its owner may change a file's mode
	} else if !errors.Is(err, fs.ErrNotExist) {
		check(err)
	}
	w.temporary = folder + prefix + rand.Text()
	w.file = got(os.OpenFile(w.temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600))
}

// commit gives the written file its owner and mode (as root: an owner is kept that the user could not give), and its name.
func (w *fileWriter) commit() {
	mode := uint32(0o644)
	if w.before != nil {
		if mode = w.before.Mode & 0o7777; w.who.uid != 0 {
			mode &= 0o1777 // as for any write by an ordinary user, setuid and setgid do not outlive it
		}
		check(w.file.Chown(int(w.before.Uid), int(w.before.Gid)))
	}
	if w.mode < 0 {
		check(syscall.Fchmod(int(w.file.Fd()), mode))
	}
	// No sync: what was written outlives this process and the sandbox's kernel, and no sandbox outlives its host's.
	w.who.run(func() {
		if w.mode >= 0 { // what is asked for only as far as the user may: no setgid of a foreign group
			check(syscall.Fchmod(int(w.file.Fd()), uint32(w.mode)))
		}
		check(rename(w.temporary, w.final, !w.exclusive))
	})
}

// close removes what was not committed: nothing else has the temporary name.
func (w *fileWriter) close() {
	w.file.Close()
	os.Remove(w.temporary)
}

// followLinks gives the path that a write through p reaches, which need not exist.
func followLinks(p string) string {
	for range 40 {
		target, err := os.Readlink(p)
		if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) { // no link, or nothing there
			return p
		}
		if check(err); !strings.HasPrefix(target, "/") {
			folder, _ := path.Split(p)
			target = folder + target
		}
		p = target
	}
	panic(failure{syscall.ELOOP})
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
			if space == nil {
				return
			}
			n = fill(int(socket.Fd()), space[:min(left, blockBytes)])
			full <- space[:n]
		}
	}()
	var err error
	for piece := range full {
		r.remaining -= int64(len(piece))
		if err == nil {
			_, err = file.Write(piece)
		}
		if err != nil { // what comes is not taken any more
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
		demand(got(io.CopyBuffer(struct{ io.Writer }{w}, section, b[:])) == section.Size(), io.ErrUnexpectedEOF)
	}
	if section.Size() < bulkBytes {
		send(r.link)
	} else {
		r.blocking(func(socket *os.File) { send(socket) })
	}
}
