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
func (a *agent) readTree(r *request, _ string) error {
	p, who := a.target(r, "path")
	if r.problem != nil {
		return r.problem
	}
	err := who.run(func() error {
		file, err := os.Stat(p)
		if err == nil && !file.IsDir() {
			err = syscall.ENOTDIR
		}
		if err == nil {
			err = demandReadable(p, file, false)
		}
		return err
	})
	if err != nil {
		return fileError("read tree", p, err)
	}
	r.keepAlive = false // whatever goes wrong from here on is told by a missing last chunk
	if err := r.send(r.head(200, "application/x-tar", -1, "")); err != nil {
		return err
	}
	return who.run(func() error {
		body := bufio.NewWriterSize(chunkWriter{r}, 256<<10)
		archive := tar.NewWriter(body)
		err := walk(p, "", maxTreeDepth, func(full, name string, file fs.FileInfo) error { return pack(archive, full, name, file) })
		if err = errors.Join(err, archive.Close(), body.Flush()); err != nil {
			return err
		}
		return r.send([]byte("0\r\n\r\n"))
	})
}

// demandReadable is the error that reading a tree would meet; all says that devices, sockets and pipes are one too.
func demandReadable(p string, file fs.FileInfo, all bool) error {
	look := func(full, _ string, file fs.FileInfo) error {
		switch kindOf(file) {
		case "symlink":
			return nil
		case "other":
			if all {
				return demandRegular(file)
			}
			return nil
		}
		needs := uint32(4)
		if file.IsDir() {
			needs |= 1 // names alone do not make a copy
		}
		return fileError("read", full, syscall.Faccessat(atFdcwd, full, needs, atEaccess))
	}
	if err := look(p, "", file); err != nil || !file.IsDir() {
		return err
	}
	return walk(p, "", maxTreeDepth, look)
}

type chunkWriter struct{ r *request }

func (w chunkWriter) Write(data []byte) (int, error) {
	return len(data), w.r.send(fmt.Appendf(nil, "%x\r\n", len(data)), data, []byte("\r\n"))
}

// pack adds one entry; a file that shrinks meanwhile is an error, as its header is out already.
func pack(archive *tar.Writer, full, name string, file fs.FileInfo) error {
	st := file.Sys().(*syscall.Stat_t)
	header := tar.Header{
		Format: tar.FormatPAX, Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), ModTime: file.ModTime(),
	}
	switch kindOf(file) {
	case "directory":
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
	case "symlink":
		target, err := os.Readlink(full)
		if err != nil {
			return err
		}
		header.Typeflag, header.Linkname = tar.TypeSymlink, target
	case "file":
		data, err := os.OpenFile(full, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer data.Close()
		header.Typeflag, header.Size = tar.TypeReg, file.Size()
		if err := archive.WriteHeader(&header); err != nil {
			return err
		}
		_, err = io.CopyN(archive, data, header.Size)
		return err
	default:
		return nil
	}
	return archive.WriteHeader(&header)
}

func (a *agent) writeTree(r *request, _ string) error {
	p, who := a.target(r, "path")
	if r.problem != nil {
		return r.problem
	}
	u := unpacker{}
	err := who.run(func() error {
		if err := os.MkdirAll(p, 0o755); err != nil {
			return err
		}
		return u.unpack(p, bufio.NewReaderSize(r, 256<<10))
	})
	if err == nil {
		_, err = io.Copy(io.Discard, r) // an archive may be padded
	}
	if err != nil {
		return fileError("write tree", p, err)
	}
	return r.reply(200, map[string]any{"files": u.files, "bytes": u.bytes})
}

// unpacker makes entries below a folder's handle, which nothing leaves. Within it no link is followed either.
type unpacker struct {
	root    *os.Root
	folder  string // the last parent known to be a folder
	folders []*tar.Header
	files   int
	bytes   int64
}

func (u *unpacker) unpack(p string, body io.Reader) (err error) {
	if u.root, err = os.OpenRoot(p); err != nil {
		return err
	}
	defer u.root.Close()
	archive := tar.NewReader(body)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = u.entry(header, archive)
		}
		if err != nil {
			return treeError(err)
		}
	}
	slices.Reverse(u.folders) // a folder's mode may forbid writing: last, and the innermost first
	for _, header := range u.folders {
		if err := u.finish(header, path.Clean(header.Name)); err != nil {
			return err
		}
	}
	return nil
}

// treeError tells a broken archive from a broken disk.
func treeError(err error) error {
	var number syscall.Errno
	var known *apiError
	if errors.As(err, &number) || errors.As(err, &known) {
		return err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errIncomplete
	}
	return invalid("the body is not a tar archive of files, folders and links: %s", err)
}

func (u *unpacker) entry(header *tar.Header, data io.Reader) error {
	name := path.Clean(header.Name)
	if name == "." {
		return nil
	}
	if strings.HasPrefix(name, "/") || name == ".." || strings.HasPrefix(name, "../") {
		return invalid("the entry %s would leave the folder", header.Name)
	}
	if err := u.parents(path.Dir(name)); err != nil {
		return err
	}
	u.files++
	switch header.Typeflag {
	case tar.TypeDir:
		u.files--
		u.folders = append(u.folders, &tar.Header{Name: name, Mode: header.Mode, ModTime: header.ModTime})
		return u.parents(name)
	case tar.TypeReg:
		return u.file(header, name, data)
	case tar.TypeSymlink:
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Symlink(header.Linkname, name)
	case tar.TypeLink:
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Link(path.Clean(header.Linkname), name)
	}
	return fail(409, "file_kind_unsupported", "the entry %s is a device or pipe", header.Name)
}

// parents makes the folders on the way; anything else there is in the way.
func (u *unpacker) parents(folder string) error {
	if folder == "." || folder == u.folder || strings.HasPrefix(u.folder, folder+"/") {
		return nil
	}
	if err := u.parents(path.Dir(folder)); err != nil {
		return err
	}
	there, err := u.root.Lstat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		err = u.root.Mkdir(folder, 0o755)
	} else if err == nil && !there.IsDir() {
		err = fileError("make folder", folder, syscall.ENOTDIR)
	}
	if err == nil {
		u.folder = folder
	}
	return err
}

// clear makes room for a link; a folder is not removed.
func (u *unpacker) clear(name string) error {
	there, err := u.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && there.IsDir() {
		err = fileError("replace", name, syscall.EISDIR)
	}
	if err != nil {
		return err
	}
	return u.root.Remove(name)
}

func (u *unpacker) file(header *tar.Header, name string, data io.Reader) error {
	temporary := path.Join(path.Dir(name), fmt.Sprintf("%s%d-%d", temporaryNew, os.Getpid(), u.files))
	file, err := u.root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(file, data)
	u.bytes += n
	if err = errors.Join(err, file.Close()); err == nil {
		err = u.finish(header, temporary)
	}
	if err == nil {
		err = u.root.Rename(temporary, name)
	}
	if err != nil {
		u.root.Remove(temporary)
	}
	return err
}

// finish gives an entry its mode and time.
func (u *unpacker) finish(header *tar.Header, name string) error {
	mode := fs.FileMode(header.Mode & 0o777)
	for bit, flag := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if header.Mode&bit != 0 {
			mode |= flag
		}
	}
	return errors.Join(u.root.Chmod(name, mode), u.root.Chtimes(name, header.ModTime, header.ModTime))
}

// moveAcross moves between file systems: a copy by archive, then the removal. It runs with the user's credentials.
func moveAcross(who *user, from, to string, overwrite bool) error {
	there, err := os.Lstat(to)
	if err == nil && (!overwrite || there.IsDir()) {
		return syscall.EEXIST
	}
	fresh := err != nil
	file, err := os.Lstat(from)
	if err == nil {
		err = demandReadable(from, file, true)
	}
	if err != nil {
		return err
	}
	reader, writer := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := who.run(func() error { return new(unpacker).unpack(path.Dir(to), reader) })
		reader.CloseWithError(err)
		unpacked <- err
	}()
	archive := tar.NewWriter(writer)
	err = pack(archive, from, path.Base(to), file)
	if err == nil && file.IsDir() {
		err = walk(from, path.Base(to), maxTreeDepth, func(full, name string, file fs.FileInfo) error { return pack(archive, full, name, file) })
	}
	err = errors.Join(err, archive.Close())
	writer.CloseWithError(err)
	if err = errors.Join(<-unpacked, err); err != nil {
		if fresh {
			os.RemoveAll(to)
		}
		return err
	}
	return os.RemoveAll(from)
}
