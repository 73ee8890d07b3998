package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	maxEntries   = 20_000
	maxListDepth = 64
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
	sortKey    string
}

func (a *agent) info(p string, file fs.FileInfo) fileInfo {
	st := file.Sys().(*syscall.Stat_t)
	i := fileInfo{Kind: kindOf(file), Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, sortKey: p}
	i.ModifiedAt = file.ModTime().UTC().Format(time.RFC3339Nano)
	i.Path, i.Raw = rawPath(p)
	i.User, i.Group = a.users.owner(st.Uid, st.Gid)
	if i.Kind == "symlink" {
		target, _ := os.Readlink(p)
		i.LinkTarget = new(strings.ToValidUTF8(target, "\uFFFD"))
	}
	return i
}

// rawPath gives a path as text, and its bytes in base64 where the text cannot hold them.
func rawPath(p string) (text string, raw *string) {
	if utf8.ValidString(p) {
		return p, nil
	}
	return strings.ToValidUTF8(p, "\uFFFD"), new(base64.StdEncoding.EncodeToString([]byte(p)))
}

func kindOf(file fs.FileInfo) string {
	switch file.Mode().Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "directory"
	case fs.ModeSymlink:
		return "symlink"
	}
	return "other"
}

// below counts a relative path from a folder. Only a path without ".." is tidied: the kernel alone knows where the parent
// of a link is.
func below(folder, p string) string {
	if !strings.HasPrefix(p, "/") {
		p = folder + "/" + p
	}
	if slices.Contains(strings.Split(p, "/"), "..") {
		return p
	}
	return path.Clean(p)
}

const mayRead, mayWrite, mayExecute = unix.R_OK, unix.W_OK, unix.X_OK

// access asks the kernel what the thread's present user may do.
func access(p string, mode uint32) error {
	return unix.Faccessat(unix.AT_FDCWD, p, mode, unix.AT_EACCESS)
}

// filePath reads a path of a file call.
func (r *request) filePath(name string) string {
	p := r.query.Get(name)
	demand(p != "" && !strings.Contains(p, "\x00"), fail(422, "file_name_invalid", "%s is empty or has a zero byte", name))
	return below(workFolder, p)
}

// fileCall is a call on a path of a user's.
type fileCall struct {
	*request
	path string
	who  *user
}

// onPath makes a handler of one for a path; its errors say what could not be done to it.
func onPath(verb string, call func(a *agent, f fileCall) any) handler {
	return func(a *agent, r *request) (answer any) {
		f := fileCall{r, r.filePath("path"), a.users.find(cmp.Or(r.query.Get("user"), "user"))}
		doing(verb, f.path, func() { answer = call(a, f) })
		return answer
	}
}

// asUser is onPath with the user's rights, in all that it does.
func asUser(verb string, call func(a *agent, f fileCall) any) handler {
	return onPath(verb, func(a *agent, f fileCall) (answer any) {
		f.who.run(func() { answer = call(a, f) })
		return answer
	})
}

func (r *request) mode() int64 {
	mode := r.number("mode", -1, 8)
	demand(mode <= 0o7777, invalid("mode is octal, up to 7777"))
	return mode
}

func (a *agent) statFile(f fileCall) any { return a.seen(f.path, f.flag("follow", false)) }

// seen is what is at p, as the thread's present user sees it.
func (a *agent) seen(p string, follow bool) fileInfo {
	look := os.Lstat
	if follow {
		look = os.Stat
	}
	return a.info(p, got(look(p)))
}

func (a *agent) listFiles(f fileCall) any {
	depth := f.number("depth", 1, 10)
	demand(depth >= 1 && depth <= maxListDepth, invalid("depth is 1 to %d", maxListDepth))
	entries := []fileInfo{}
	err := attempt(func() {
		walk(f.path, "", int(depth), func(full, _ string, file fs.FileInfo) {
			demand(len(entries) < maxEntries, errTooMany)
			entries = append(entries, a.info(full, file))
		})
	})
	demand(errors.Is(err, errTooMany), err)
	slices.SortFunc(entries, func(x, y fileInfo) int { return cmp.Compare(x.sortKey, y.sortKey) })
	return map[string]any{"entries": entries, "truncated": err != nil}
}

var errTooMany = fail(429, "limit_reached", "there are more entries than one answer tells")

// walk visits what is in a folder, sorted, each subfolder after its own entry. Links are not followed, but for the folder
// itself. A huge folder is cut, so that it cannot fill the agent's memory; a subfolder that may not be read is passed over.
func walk(folder, name string, depth int, visit func(full, name string, file fs.FileInfo)) {
	flags := os.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NONBLOCK
	if name != "" {
		flags |= syscall.O_NOFOLLOW
	}
	dir, err := os.OpenFile(folder, flags, 0)
	if name != "" && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist)) {
		return
	}
	check(err)
	defer dir.Close()
	entries, err := dir.ReadDir(5 * maxEntries)
	demand(err == io.EOF, err)
	slices.SortFunc(entries, func(x, y fs.DirEntry) int { return strings.Compare(x.Name(), y.Name()) })
	for _, entry := range entries {
		file, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		check(err) // a folder that only tells names, a path that is too long: nothing below may be missing unsaid
		full, below := strings.TrimSuffix(folder, "/")+"/"+entry.Name(), path.Join(name, entry.Name())
		if visit(full, below, file); depth > 1 && entry.IsDir() {
			walk(full, below, depth-1, visit)
		}
	}
	demand(len(entries) < 5*maxEntries, errTooMany)
}

func (a *agent) makeFolder(f fileCall) any {
	parents, mode := f.flag("parents", true), f.mode()
	if parents {
		check(os.MkdirAll(path.Dir(f.path), 0o755))
	}
	err := os.Mkdir(f.path, 0o755)
	if file, e := os.Stat(f.path); e == nil && file.IsDir() && parents && errors.Is(err, fs.ErrExist) {
		return a.info(f.path, file)
	}
	if check(err); mode >= 0 {
		check(syscall.Chmod(f.path, uint32(mode)))
	}
	return a.seen(f.path, true)
}

func (a *agent) moveFile(f fileCall) any {
	to, overwrite := f.filePath("to"), f.flag("overwrite", false)
	doing("move "+f.path+" to", to, func() {
		err := rename(f.path, to, overwrite)
		if err == syscall.EXDEV {
			moveAcross(f.who, f.path, to, overwrite)
		} else {
			check(err)
		}
	})
	return a.seen(to, false)
}

// rename fails with EEXIST where something has the new name, unless that is to be replaced.
func rename(from, to string, overwrite bool) error {
	flags := uint(unix.RENAME_NOREPLACE)
	if overwrite {
		flags = 0
	}
	return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags)
}

// demandRemovable refuses the root and what the kernel only shows: below /proc are doors to the root again.
func demandRemovable(p string) error {
	var system unix.Statfs_t
	if err := unix.Statfs(p, &system); err != nil {
		return err
	}
	if path.Clean(p) == "/" || system.Type == unix.PROC_SUPER_MAGIC {
		return syscall.EBUSY
	}
	return nil
}

func (a *agent) removeFile(f fileCall) any {
	switch file := got(os.Lstat(f.path)); {
	case !file.IsDir():
		check(syscall.Unlink(f.path))
	case f.flag("recursive", false):
		check(demandRemovable(f.path))
		check(os.RemoveAll(f.path))
	default:
		check(syscall.Rmdir(f.path))
	}
	return map[string]any{}
}
