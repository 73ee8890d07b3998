package main

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
)

const (
	maxEntries   = 20_000
	maxListDepth = 64
	temporary    = ".cpuos-tmp-" // before the random name of a file being written
)

// fileInfo is the contract's FileInfo. A path that is not UTF-8 comes with its bytes.
type fileInfo struct {
	Path       string  `json:"path"`
	Raw        *string `json:"raw"`
	Kind       string  `json:"kind"`
	Size       int64   `json:"size"`
	Mode       uint32  `json:"mode"`
	User       string  `json:"user"`
	Group      string  `json:"group"`
	UID        uint32  `json:"uid"`
	GID        uint32  `json:"gid"`
	ModifiedAt string  `json:"modified_at"`
	LinkTarget *string `json:"link_target"`
}

// rawPath gives a path as text, and its bytes in base64 where the text cannot hold them.
func rawPath(p string) (text string, raw *string) {
	if utf8.ValidString(p) {
		return p, nil
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(p))
	return strings.ToValidUTF8(p, "\uFFFD"), &encoded
}

func (a *agent) info(p string, st *syscall.Stat_t, target string) fileInfo {
	i := fileInfo{
		Kind: kindOf(st.Mode), Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		ModifiedAt: time.Unix(st.Mtim.Unix()).UTC().Format(time.RFC3339Nano),
	}
	i.Path, i.Raw = rawPath(p)
	i.User, i.Group = a.users.owner(st.Uid, st.Gid)
	if i.Kind == "symlink" {
		target = strings.ToValidUTF8(target, "\uFFFD")
		i.LinkTarget = &target
	}
	return i
}

func kindOf(mode uint32) string {
	switch mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return "file"
	case syscall.S_IFDIR:
		return "directory"
	case syscall.S_IFLNK:
		return "symlink"
	}
	return "other"
}

// absolute counts a relative path from the work folder. Only a path without ".." is tidied: the kernel alone knows where
// the parent of a link is.
func absolute(p string) string {
	if !strings.HasPrefix(p, "/") {
		p = workFolder + "/" + p
	}
	if slices.Contains(strings.Split(p, "/"), "..") {
		return p
	}
	return path.Clean(p)
}

// target reads the path and the user of a file call.
func (a *agent) target(r *request, name string) (string, *user, error) {
	p, given := r.query[name]
	if !given || p == "" || strings.Contains(p, "\x00") {
		return "", nil, fail(422, "file_name_invalid", "%s is empty or has a zero byte", name)
	}
	account := r.query["user"]
	if account == "" {
		account = "user"
	}
	who, err := a.users.find(account)
	if strings.HasSuffix(p, "/") && r.method == "PUT" && r.path == "/v1/files" {
		return "", nil, fileError("write", p, syscall.EISDIR)
	}
	return absolute(p), who, err
}

func (a *agent) readFile(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	offset, e1 := r.number("offset", 0, 10)
	length, e2 := r.number("length", 1<<62, 10)
	if e1 != nil || e2 != nil {
		return invalid("offset and length are numbers")
	}
	var fd int
	var st syscall.Stat_t
	if err := who.run(func() (err error) {
		fd, st, err = openRegular(p)
		return err
	}); err != nil {
		return fileError("read", p, err)
	}
	defer syscall.Close(fd)
	size := st.Size
	if size == 0 {
		if data := readUnsized(fd); len(data) > 0 { // the kernel's own files have no size, only content
			data = data[min(offset, int64(len(data))):]
			data = data[:min(length, int64(len(data)))]
			r.head(200, "application/octet-stream", int64(len(data)), fmt.Sprintf("X-File-Size: %d\r\n", len(data)))
			return r.send(data)
		}
	}
	length = min(length, max(0, size-offset))
	if err := r.head(200, "application/octet-stream", length, fmt.Sprintf("X-File-Size: %d\r\n", size)); err != nil {
		return err
	}
	if err := r.sendFile(fd, offset, length); err != nil {
		r.keepAlive = false // the announced length cannot be kept: only a cut connection says so
		return err
	}
	return nil
}

func openRegular(p string) (fd int, st syscall.Stat_t, err error) {
	if st, err = fstatat(atFdcwd, p, 0); err != nil { // before the open: opening a device may do something
		return -1, st, err
	}
	if err = demandRegular(st.Mode, p); err != nil {
		return -1, st, err
	}
	if fd, err = syscall.Open(p, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0); err != nil {
		return -1, st, err
	}
	if err = syscall.Fstat(fd, &st); err == nil {
		err = demandRegular(st.Mode, p)
	}
	if err != nil {
		syscall.Close(fd)
	}
	return fd, st, err
}

func demandRegular(mode uint32, p string) error {
	switch kindOf(mode) {
	case "file":
		return nil
	case "directory":
		return syscall.EISDIR
	}
	return fail(409, "file_kind_unsupported", "%s is a device, socket or pipe", p)
}

func readUnsized(fd int) []byte {
	const limit = 4 << 20
	var data []byte
	buffer := make([]byte, 32<<10)
	for len(data) < limit {
		n, err := syscall.Read(fd, buffer)
		if n <= 0 || err != nil {
			break
		}
		data = append(data, buffer[:n]...)
	}
	return data
}

// sendFile sends exactly length bytes, or fails.
func (r *request) sendFile(fd int, offset, length int64) error {
	b := blocks.take()
	defer blocks.give(b, blockBytes)
	for length > 0 {
		n, err := syscall.Pread(fd, b[:min(length, blockBytes)], offset)
		if err == syscall.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		if err := r.send(b[:n]); err != nil {
			return err
		}
		offset, length = offset+int64(n), length-int64(n)
	}
	return nil
}

func (a *agent) writeFile(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	w := fileWriter{path: p, who: who}
	parents, e1 := r.flag("create_parents", true)
	w.exclusive, err = r.flag("exclusive", false)
	mode, e2 := r.number("mode", -1, 8)
	if err = errors.Join(e1, err, e2); err != nil {
		return err
	}
	if mode > 0o7777 {
		return invalid("mode is octal, up to 7777")
	}
	w.mode = mode
	if err := who.run(func() error { return w.open(parents) }); err != nil {
		return fileError("write", p, err)
	}
	defer w.close()
	if err := copyBody(w.fd, r); err != nil {
		return fileError("write", p, err)
	}
	if err := w.commit(); err != nil {
		return fileError("write", p, err)
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(w.fd, &st); err != nil {
		return err
	}
	return r.reply(200, a.info(p, &st, ""))
}

// copyBody writes a whole body to a file.
func copyBody(fd int, body io.Reader) error {
	b := blocks.take()
	defer blocks.give(b, blockBytes)
	for {
		filled := 0
		var err error
		for filled < blockBytes && err == nil {
			var n int
			n, err = body.Read(b[filled:])
			filled += n
		}
		if err != nil && err != io.EOF {
			return err
		}
		for done := 0; done < filled; {
			n, writeErr := syscall.Write(fd, b[done:filled])
			if writeErr == syscall.EINTR {
				continue
			}
			if writeErr != nil {
				return writeErr
			}
			done += n
		}
		if err == io.EOF {
			return nil
		}
	}
}

// fileWriter replaces one file as a whole: readers see the old or the new one. All names are below the handle of the
// folder that was looked up once, with the user's rights.
type fileWriter struct {
	path      string
	who       *user
	exclusive bool
	mode      int64 // -1: not given
	dir       int
	base      string
	temporary string
	fd        int
	before    *syscall.Stat_t // the file that is replaced
}

func (w *fileWriter) open(parents bool) error {
	w.dir, w.fd = -1, -1
	p, err := followLinks(w.path)
	if err != nil {
		return err
	}
	folder, base := path.Split(p)
	if base == "" || base == "." || base == ".." {
		return syscall.EISDIR
	}
	if parents {
		if err := makeFolders(folder); err != nil {
			return err
		}
	}
	w.base = base
	if w.dir, err = syscall.Open(folder, oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0); err != nil {
		return err
	}
	err = w.openTemporary()
	if err != nil {
		w.close()
	}
	return err
}

func (w *fileWriter) openTemporary() error {
	st, err := fstatat(w.dir, w.base, atSymlinkNofollow)
	switch {
	case err == nil && w.exclusive:
		return syscall.EEXIST
	case err == nil:
		if err := demandRegular(st.Mode, w.path); err != nil {
			return err
		}
		if w.mode >= 0 && w.who.uid != 0 && w.who.uid != st.Uid {
			return syscall.EPERM // only its owner may change a file's mode
		}
		// Replacing needs only the folder's permission, but a file that the user may not write stays as it is.
		fd, err := syscall.Openat(w.dir, w.base, syscall.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
		if err == nil {
			syscall.Close(fd)
		} else if err != syscall.ETXTBSY {
			return err
		}
		w.before = &st
	case err != syscall.ENOENT:
		return err
	}
	var random [8]byte
	rand.Read(random[:])
	w.temporary = temporary + hex.EncodeToString(random[:])
	w.fd, err = syscall.Openat(w.dir, w.temporary, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	return err
}

// commit gives the written file its owner and mode (as root: an owner is kept that the user could not give), and its name.
func (w *fileWriter) commit() error {
	mode := uint32(0o644)
	if w.before != nil {
		mode = w.before.Mode & 0o7777
		if w.who.uid != 0 {
			mode &= 0o1777 // as for any write by an ordinary user, setuid and setgid do not outlive it
		}
		var st syscall.Stat_t
		if err := syscall.Fstat(w.fd, &st); err != nil {
			return err
		}
		if st.Uid != w.before.Uid || st.Gid != w.before.Gid {
			if err := syscall.Fchown(w.fd, int(w.before.Uid), int(w.before.Gid)); err != nil {
				return err
			}
		}
	}
	if w.mode >= 0 {
		mode = uint32(w.mode)
	}
	if err := syscall.Fchmod(w.fd, mode); err != nil {
		return err
	}
	if err := syscall.Fsync(w.fd); err != nil {
		return err
	}
	err := w.who.run(func() error {
		if w.exclusive {
			return renameat2(w.dir, w.temporary, w.dir, w.base, renameNoreplace)
		}
		return syscall.Renameat(w.dir, w.temporary, w.dir, w.base)
	})
	if err == nil {
		w.temporary = ""
	}
	return err
}

// close removes what was not committed.
func (w *fileWriter) close() {
	if w.temporary != "" {
		unlinkat(w.dir, w.temporary, 0)
	}
	for _, fd := range []int{w.fd, w.dir} {
		if fd >= 0 {
			syscall.Close(fd)
		}
	}
}

// followLinks gives the path that a write through p reaches, which need not exist.
func followLinks(p string) (string, error) {
	for range 40 {
		target, err := readlinkat(atFdcwd, p)
		if err != nil {
			if err == syscall.EINVAL || err == syscall.ENOENT { // no link, or nothing there
				return p, nil
			}
			return p, err
		}
		if !strings.HasPrefix(target, "/") {
			folder, _ := path.Split(p)
			target = folder + target
		}
		p = target
	}
	return p, syscall.ELOOP
}

// makeFolders makes a folder and its parents, mode 0755.
func makeFolders(p string) error {
	if p == "" {
		return nil
	}
	err := syscall.Mkdir(p, 0o755)
	if err == syscall.ENOENT {
		if err = makeFolders(strings.TrimRight(path.Dir(strings.TrimRight(p, "/")), "/")); err == nil {
			err = syscall.Mkdir(p, 0o755)
		}
	}
	if err == nil {
		return nil
	}
	// Mkdir names the first obstacle it meets, and for a folder that exists that may be a parent one may not write.
	st, statErr := fstatat(atFdcwd, p, 0)
	switch {
	case statErr == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR:
		return nil
	case statErr == nil:
		return syscall.ENOTDIR
	}
	return err
}

func (a *agent) statFile(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	follow, err := r.flag("follow", true)
	if err != nil {
		return err
	}
	return a.replyInfo(r, "stat", p, who, follow)
}

// replyInfo answers with what is at p, as the user sees it.
func (a *agent) replyInfo(r *request, verb, p string, who *user, follow bool) error {
	var st syscall.Stat_t
	link := ""
	err := who.run(func() (err error) {
		flags := atSymlinkNofollow
		if follow {
			flags = 0
		}
		if st, err = fstatat(atFdcwd, p, flags); err == nil && kindOf(st.Mode) == "symlink" {
			link, err = readlinkat(atFdcwd, p)
		}
		return err
	})
	if err != nil {
		return fileError(verb, p, err)
	}
	return r.reply(200, a.info(p, &st, link))
}

func (a *agent) listFiles(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	depth, err := r.number("depth", 1, 10)
	if err != nil {
		return err
	}
	if depth < 1 || depth > maxListDepth {
		return invalid("depth is 1 to %d", maxListDepth)
	}
	l := lister{agent: a}
	if err := who.run(func() error { return l.folder(atFdcwd, p, p, int(depth)) }); err != nil {
		return fileError("list", p, err)
	}
	slices.SortFunc(l.found, func(x, y found) int { return strings.Compare(x.path, y.path) })
	entries := make([]fileInfo, len(l.found))
	for i := range l.found {
		entries[i] = a.info(l.found[i].path, &l.found[i].st, l.found[i].target)
	}
	return r.reply(200, map[string]any{"entries": entries, "truncated": l.truncated})
}

type found struct {
	path, target string
	st           syscall.Stat_t
}

type lister struct {
	agent     *agent
	found     []found
	truncated bool
}

// folder lists one folder below a handle, then its subfolders. Links are never followed, but for the first path itself.
func (l *lister) folder(dir int, name, p string, depth int) error {
	flags := syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_CLOEXEC
	if dir != atFdcwd {
		flags |= syscall.O_NOFOLLOW
	}
	fd, err := syscall.Openat(dir, name, flags, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	names, truncated, err := readNames(fd)
	if err != nil {
		return err
	}
	l.truncated = l.truncated || truncated
	for _, name := range names {
		if len(l.found) >= maxEntries {
			l.truncated = true
			return nil
		}
		st, err := fstatat(fd, name, atSymlinkNofollow)
		if err != nil {
			continue // gone meanwhile
		}
		entry := found{path: path.Join(p, name), st: st}
		if p != path.Clean(p) {
			entry.path = p + "/" + name
		}
		if kindOf(st.Mode) == "symlink" {
			entry.target, _ = readlinkat(fd, name)
		}
		l.found = append(l.found, entry)
		if depth > 1 && kindOf(st.Mode) == "directory" {
			l.folder(fd, name, entry.path, depth-1) // a folder that may not be read is listed without its entries
		}
	}
	return nil
}

// readNames gives the sorted names in an open folder; a huge one is cut, so that it cannot fill the agent's memory.
func readNames(fd int) (names []string, truncated bool, err error) {
	const limit = 5 * maxEntries
	buffer := make([]byte, 32<<10)
	for {
		n, err := syscall.ReadDirent(fd, buffer)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			slices.Sort(names)
			return names, false, err
		}
		_, _, names = syscall.ParseDirent(buffer[:n], -1, names)
		if len(names) > limit {
			slices.Sort(names)
			return names, true, nil
		}
	}
}

func (a *agent) makeFolder(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	parents, e1 := r.flag("parents", true)
	mode, e2 := r.number("mode", -1, 8)
	if err := errors.Join(e1, e2); err != nil {
		return err
	}
	if mode > 0o7777 {
		return invalid("mode is octal, up to 7777")
	}
	err = who.run(func() error {
		if parents {
			if err := makeFolders(path.Dir(p)); err != nil {
				return err
			}
		}
		err := syscall.Mkdir(p, 0o755)
		if st, e := fstatat(atFdcwd, p, 0); err == syscall.EEXIST && parents && e == nil && kindOf(st.Mode) == "directory" {
			return nil
		}
		if err == nil && mode >= 0 {
			err = syscall.Chmod(p, uint32(mode))
		}
		return err
	})
	if err != nil {
		return fileError("make folder", p, err)
	}
	return a.replyInfo(r, "make folder", p, who, true)
}

func (a *agent) moveFile(r *request, _ string) error {
	from, who, e1 := a.target(r, "path")
	to, _, e2 := a.target(r, "to")
	overwrite, e3 := r.flag("overwrite", false)
	if err := errors.Join(e1, e2, e3); err != nil {
		return err
	}
	if strings.HasSuffix(r.query["to"], "/") {
		to = strings.TrimRight(to, "/")
	}
	err := who.run(func() error {
		flags := renameNoreplace
		if overwrite {
			flags = 0
		}
		err := renameat2(atFdcwd, from, atFdcwd, to, flags)
		if err == syscall.EINVAL && !overwrite && !strings.HasPrefix(to+"/", from+"/") { // a file system without the flag
			if _, e := lstat(to); e == nil {
				return syscall.EEXIST
			}
			err = syscall.Rename(from, to)
		}
		if err == syscall.EXDEV {
			err = a.moveAcross(from, to, overwrite)
		}
		return err
	})
	if err != nil {
		return fileError("move "+from+" to", to, err)
	}
	return a.replyInfo(r, "move", to, who, false)
}

func (a *agent) removeFile(r *request, _ string) error {
	p, who, err := a.target(r, "path")
	if err != nil {
		return err
	}
	recursive, err := r.flag("recursive", false)
	if err != nil {
		return err
	}
	err = who.run(func() error {
		st, err := lstat(p)
		switch {
		case err != nil:
			return err
		case kindOf(st.Mode) != "directory":
			return unlinkat(atFdcwd, p, 0)
		case recursive:
			return os.RemoveAll(p)
		}
		return unlinkat(atFdcwd, p, atRemovedir)
	})
	if err != nil {
		return fileError("remove", p, err)
	}
	return r.reply(200, map[string]any{})
}
