package main

import (
	"archive/tar"
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http/httputil"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Trees travel as tar: links as links, and of the rest only files and folders.

const maxTreeDepth = 4096 // beyond any path that the kernel takes

// readTree looks through the whole tree first: what may not be read is told before the answer begins.
func (a *agent) readTree(f fileCall) any {
	folder := got(os.Stat(f.path))
	demand(folder.IsDir(), syscall.ENOTDIR)
	demandReadable(f.path, folder)
	f.keepAlive = false // whatever goes wrong from here on is told by a missing last chunk
	f.send(f.head(200, "application/x-tar", -1, ""))
	chunks := httputil.NewChunkedWriter(struct{ io.Writer }{f.link})
	body := bufio.NewWriterSize(chunks, 256<<10)
	archive := tar.NewWriter(body)
	walk(f.path, "", maxTreeDepth, func(full, name string, file fs.FileInfo) { pack(archive, full, name, file) })
	check(archive.Close())
	check(body.Flush())
	check(chunks.Close())
	f.send([]byte("\r\n"))
	return nil
}

// demandReadable ends a call with what reading a tree would meet.
func demandReadable(p string, file fs.FileInfo) {
	look := func(full, _ string, file fs.FileInfo) {
		doing("read", full, func() {
			switch kindOf(file) {
			case "file":
				check(access(full, mayRead))
			case "directory":
				check(access(full, mayRead|mayExecute)) // names alone do not make a copy
			}
		})
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

func (a *agent) writeTree(f fileCall) any {
	check(os.MkdirAll(f.path, 0o755))
	u, body := unpacker{}, struct{ io.Reader }{f.request}
	u.unpack(f.path, bufio.NewReaderSize(body, 256<<10))
	got(io.Copy(io.Discard, body)) // an archive may be padded
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
	for header, err := archive.Next(); err != io.EOF; header, err = archive.Next() {
		if err == nil {
			err = attempt(func() { u.entry(header, archive) })
		}
		if problem := asAPIError(err); err != nil && problem.Code == "internal" && problem.Errno == 0 { // not the disk's
			err = invalid("the body is not a tar archive of files, folders and links: %s", err)
		}
		check(err)
	}
	slices.Reverse(u.folders) // a folder's mode may forbid writing: last, and the innermost first
	for _, header := range u.folders {
		u.finish(header, header.Name)
	}
}

func (u *unpacker) entry(header *tar.Header, data io.Reader) {
	name := path.Clean(header.Name)
	if name == "." {
		return
	}
	demand(fs.ValidPath(strings.ToValidUTF8(name, "?")), invalid("the entry %s would leave the folder", header.Name))
	if u.parents(path.Dir(name)); header.Typeflag == tar.TypeDir {
		u.folders = append(u.folders, &tar.Header{Name: name, Mode: header.Mode, ModTime: header.ModTime})
		u.parents(name)
		return
	}
	there, err := u.root.Lstat(name)
	demand(err != nil || !there.IsDir(), fmt.Errorf("cannot replace %s: %w", name, syscall.EISDIR))
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

// moveAcross moves between file systems: a copy by archive beside the new place, then its name, then the removal.
func moveAcross(who *user, from, to string, overwrite bool) {
	if _, err := os.Lstat(to); err == nil && !overwrite {
		check(syscall.EEXIST)
	}
	file := got(os.Lstat(from))
	demandReadable(from, file)
	folder, temporary := path.Dir(to), temporaryNew+rand.Text()
	defer os.RemoveAll(path.Join(folder, temporary)) // gone by then when all is well
	reader, writer := io.Pipe()
	go func() {
		archive := tar.NewWriter(writer)
		add := func(full, name string, file fs.FileInfo) {
			demand(kindOf(file) != "other", fail(409, "file_kind_unsupported", "%s is a device, socket or pipe", full))
			pack(archive, full, name, file)
		}
		writer.CloseWithError(attempt(func() {
			who.run(func() {
				if add(from, temporary, file); file.IsDir() {
					walk(from, temporary, maxTreeDepth, add)
				}
				check(archive.Close())
			})
		}))
	}()
	err := attempt(func() { new(unpacker).unpack(folder, reader) })
	reader.CloseWithError(err)
	check(err)
	check(rename(path.Join(folder, temporary), to, overwrite))
	check(os.RemoveAll(from))
}
