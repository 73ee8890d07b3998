package main

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Trees travel as tar: links as links, and of the rest only files and folders.

const maxTreeDepth = 4096 // beyond any path that the kernel takes

// readTree looks through the whole tree first: what may not be read is told before the answer begins.
func (a *agent) readTree(r *request) any {
	p, who := a.target(r, "path")
	defer doing("read tree", p)
	who.run(func() {
		folder := got(os.Stat(p))
		if !folder.IsDir() {
			check(syscall.ENOTDIR)
		}
		demandReadable(p, folder, false)
		r.keepAlive = false // whatever goes wrong from here on is told by a missing last chunk
		r.send(r.head(200, "application/x-tar", -1, ""))
		body := bufio.NewWriterSize(chunkWriter{r.link}, 256<<10)
		archive := tar.NewWriter(body)
		walk(p, "", maxTreeDepth, func(full, name string, file fs.FileInfo) { pack(archive, full, name, file) })
		check(errors.Join(archive.Close(), body.Flush()))
		r.send([]byte("0\r\n\r\n"))
	})
	return nil
}

type chunkWriter struct{ link }

func (w chunkWriter) Write(data []byte) (int, error) {
	return len(data), attempt(func() { w.send(fmt.Appendf(nil, "%x\r\n", len(data)), data, []byte("\r\n")) })
}

// demandReadable ends a call with what reading a tree would meet; all says that devices, sockets and pipes count.
func demandReadable(p string, file fs.FileInfo, all bool) {
	look := func(full, _ string, file fs.FileInfo) {
		defer doing("read", full)
		switch kind := kindOf(file); {
		case kind == "other" && all:
			demandRegular(file)
		case kind == "file":
			check(syscall.Faccessat(atFdcwd, full, 4, atEaccess))
		case kind == "directory":
			check(syscall.Faccessat(atFdcwd, full, 4|1, atEaccess)) // names alone do not make a copy
		}
	}
	if look(p, "", file); file.IsDir() {
		walk(p, "", maxTreeDepth, look)
	}
}

// pack adds one entry; a file that shrinks meanwhile is an error, as its header is out already.
func pack(archive *tar.Writer, full, name string, file fs.FileInfo) {
	st := file.Sys().(*syscall.Stat_t)
	header := tar.Header{Format: tar.FormatPAX, Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), ModTime: file.ModTime()}
	switch kindOf(file) {
	case "directory":
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		check(archive.WriteHeader(&header))
	case "symlink":
		header.Typeflag, header.Linkname = tar.TypeSymlink, got(os.Readlink(full))
		check(archive.WriteHeader(&header))
	case "file":
		data := got(os.OpenFile(full, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0))
		defer data.Close()
		header.Typeflag, header.Size = tar.TypeReg, file.Size()
		check(archive.WriteHeader(&header))
		got(io.CopyN(archive, data, header.Size))
	}
}

func (a *agent) writeTree(r *request) any {
	p, who := a.target(r, "path")
	defer doing("write tree", p)
	u := unpacker{}
	who.run(func() {
		check(os.MkdirAll(p, 0o755))
		u.unpack(p, bufio.NewReaderSize(struct{ io.Reader }{r}, 256<<10))
	})
	got(io.Copy(io.Discard, struct{ io.Reader }{r})) // an archive may be padded
	return map[string]any{"files": u.files, "bytes": u.bytes}
}

// unpacker makes entries below a folder's handle, which nothing leaves. Within it no link is followed either.
type unpacker struct {
	root    *os.Root
	folder  string // the last parent known to be a folder
	folders []*tar.Header
	files   int
	bytes   int64
}

func (u *unpacker) unpack(p string, body io.Reader) {
	u.root = got(os.OpenRoot(p))
	defer u.root.Close()
	archive := tar.NewReader(body)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = attempt(func() { u.entry(header, archive) })
		}
		check(treeError(err))
	}
	slices.Reverse(u.folders) // a folder's mode may forbid writing: last, and the innermost first
	for _, header := range u.folders {
		u.finish(header, header.Name)
	}
}

// treeError tells a broken archive from a broken disk.
func treeError(err error) error {
	var number syscall.Errno
	var known *apiError
	switch {
	case err == nil || errors.As(err, &number) || errors.As(err, &known):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errIncomplete
	}
	return invalid("the body is not a tar archive of files, folders and links: %s", err)
}

func (u *unpacker) entry(header *tar.Header, data io.Reader) {
	name := path.Clean(header.Name)
	if name == "." {
		return
	}
	if !fs.ValidPath(strings.ToValidUTF8(name, "?")) {
		check(invalid("the entry %s would leave the folder", header.Name))
	}
	if u.parents(path.Dir(name)); header.Typeflag == tar.TypeDir {
		u.folders = append(u.folders, &tar.Header{Name: name, Mode: header.Mode, ModTime: header.ModTime})
		u.parents(name)
		return
	}
	there, err := u.root.Lstat(name)
	if err == nil && there.IsDir() {
		check(fmt.Errorf("cannot replace %s: %w", name, syscall.EISDIR))
	}
	temporary := path.Join(path.Dir(name), fmt.Sprintf("%s%d-%d", temporaryNew, os.Getpid(), u.files))
	defer u.root.Remove(temporary) // fails when all is well
	switch u.files++; header.Typeflag {
	case tar.TypeReg:
		file := got(u.root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600))
		n, err := io.Copy(file, data)
		u.bytes += n
		check(errors.Join(err, file.Close()))
		u.finish(header, temporary)
	case tar.TypeSymlink:
		check(u.root.Symlink(header.Linkname, temporary))
	case tar.TypeLink:
		check(u.root.Link(path.Clean(header.Linkname), temporary))
	default:
		check(fail(409, "file_kind_unsupported", "the entry %s is a device or pipe", header.Name))
	}
	check(u.root.Rename(temporary, name))
}

// parents makes the folders on the way; anything else there is in the way.
func (u *unpacker) parents(folder string) {
	if folder == "." || folder == u.folder || strings.HasPrefix(u.folder, folder+"/") {
		return
	}
	u.parents(path.Dir(folder))
	there, err := u.root.Lstat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		err = u.root.Mkdir(folder, 0o755)
	} else if err == nil && !there.IsDir() {
		err = fmt.Errorf("cannot make folder %s: %w", folder, syscall.ENOTDIR)
	}
	check(err)
	u.folder = folder
}

// finish gives an entry its mode and time.
func (u *unpacker) finish(header *tar.Header, name string) {
	check(errors.Join(u.root.Chmod(name, header.FileInfo().Mode()), u.root.Chtimes(name, header.ModTime, header.ModTime)))
}

// moveAcross moves between file systems: a copy by archive, then the removal. It runs with the user's credentials.
func moveAcross(who *user, from, to string, overwrite bool) {
	there, err := os.Lstat(to)
	if err == nil && (!overwrite || there.IsDir()) {
		check(syscall.EEXIST)
	}
	fresh := err != nil
	file := got(os.Lstat(from))
	demandReadable(from, file, true)
	reader, writer := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := attempt(func() { who.run(func() { new(unpacker).unpack(path.Dir(to), reader) }) })
		reader.CloseWithError(err)
		unpacked <- err
	}()
	archive := tar.NewWriter(writer)
	err = attempt(func() {
		if pack(archive, from, path.Base(to), file); file.IsDir() {
			walk(from, path.Base(to), maxTreeDepth, func(full, name string, file fs.FileInfo) { pack(archive, full, name, file) })
		}
		check(archive.Close())
	})
	writer.CloseWithError(err)
	if err = errors.Join(<-unpacked, err); err != nil && fresh {
		os.RemoveAll(to)
	}
	check(err)
	check(os.RemoveAll(from))
}
