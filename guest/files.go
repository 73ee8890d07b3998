package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
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

func (a *agent) info(p string, file fs.FileInfo) fileInfo {
	st := file.Sys().(*syscall.Stat_t)
	i := fileInfo{Kind: kindOf(file), Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid}
	i.ModifiedAt = file.ModTime().UTC().Format(time.RFC3339Nano)
	i.Path, i.Raw = rawPath(p)
	i.User, i.Group = a.users.owner(st.Uid, st.Gid)
	if i.Kind == "symlink" {
		target, _ := os.Readlink(p)
		target, _ = rawPath(target)
		i.LinkTarget = &target
	}
	return i
}

// rawPath gives a path as text, and its bytes in base64 where the text cannot hold them.
func rawPath(p string) (text string, raw *string) {
	if utf8.ValidString(p) {
		return p, nil
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(p))
	return strings.ToValidUTF8(p, "\uFFFD"), &encoded
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

// demandRegular ends a call that serves files alone.
func demandRegular(file fs.FileInfo) {
	switch kindOf(file) {
	case "directory":
		check(syscall.EISDIR)
	case "other":
		check(fail(409, "file_kind_unsupported", "%s is a device, socket or pipe", file.Name()))
	}
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
func (a *agent) target(r *request, name string) (string, *user) {
	p := r.query[name]
	if p == "" || strings.Contains(p, "\x00") {
		check(fail(422, "file_name_invalid", "%s is empty or has a zero byte", name))
	}
	return absolute(p), a.users.find(cmp.Or(r.query["user"], "user"))
}

func (r *request) mode() int64 {
	mode := r.number("mode", -1, 8)
	if mode > 0o7777 {
		check(invalid("mode is octal, up to 7777"))
	}
	return mode
}

func (a *agent) readFile(r *request) any {
	p, who := a.target(r, "path")
	offset, length := r.number("offset", 0, 10), r.number("length", 1<<62, 10)
	defer doing("read", p)
	var file *os.File
	who.run(func() {
		demandRegular(got(os.Stat(p))) // before the open, as opening a device may do something
		file = got(os.OpenFile(p, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0))
	})
	defer file.Close()
	now := got(file.Stat())
	demandRegular(now)
	size, content := now.Size(), io.ReaderAt(file)
	if size == 0 { // the kernel's own files have no size, only content
		data, _ := io.ReadAll(io.LimitReader(file, 4<<20))
		size, content = int64(len(data)), strings.NewReader(string(data))
	}
	length = min(length, max(0, size-offset))
	r.send(r.head(200, "application/octet-stream", length, fmt.Sprintf("X-File-Size: %d\r\n", size)))
	r.sendFile(content, offset, length)
	return nil
}

func (a *agent) statFile(r *request) any {
	p, who := a.target(r, "path")
	return a.seen(p, who, "stat", r.flag("follow", false))
}

// seen is what is at p, as the user sees it.
func (a *agent) seen(p string, who *user, verb string, follow bool) (i fileInfo) {
	defer doing(verb, p)
	look := os.Lstat
	if follow {
		look = os.Stat
	}
	who.run(func() { i = a.info(p, got(look(p))) })
	return i
}

func (a *agent) listFiles(r *request) any {
	p, who := a.target(r, "path")
	depth := r.number("depth", 1, 10)
	if depth < 1 || depth > maxListDepth {
		check(invalid("depth is 1 to %d", maxListDepth))
	}
	defer doing("list", p)
	type entry struct {
		path string
		fileInfo
	}
	found := []entry{}
	err := attempt(func() {
		who.run(func() {
			walk(p, "", int(depth), func(full, _ string, file fs.FileInfo) {
				if len(found) == maxEntries {
					check(errTooMany)
				}
				found = append(found, entry{full, a.info(full, file)})
			})
		})
	})
	if !errors.Is(err, errTooMany) {
		check(err)
	}
	slices.SortFunc(found, func(x, y entry) int { return strings.Compare(x.path, y.path) })
	entries := []fileInfo{}
	for _, e := range found {
		entries = append(entries, e.fileInfo)
	}
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
	if err != io.EOF {
		check(err)
	}
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
	if len(entries) == 5*maxEntries {
		check(errTooMany)
	}
}

func (a *agent) makeFolder(r *request) any {
	p, who := a.target(r, "path")
	parents, mode := r.flag("parents", true), r.mode()
	defer doing("make folder", p)
	who.run(func() {
		if parents {
			check(os.MkdirAll(path.Dir(p), 0o755))
		}
		err := os.Mkdir(p, 0o755)
		if file, e := os.Stat(p); errors.Is(err, fs.ErrExist) && parents && e == nil && file.IsDir() {
			return
		}
		if check(err); mode >= 0 {
			check(syscall.Chmod(p, uint32(mode)))
		}
	})
	return a.seen(p, who, "stat", true)
}

func (a *agent) moveFile(r *request) any {
	from, who := a.target(r, "path")
	to, _ := a.target(r, "to")
	overwrite := r.flag("overwrite", false)
	defer doing("move "+from+" to", to)
	who.run(func() {
		rename := renameNew
		if overwrite {
			rename = syscall.Rename
		}
		err := rename(from, to)
		if err == syscall.EXDEV {
			moveAcross(who, from, to, overwrite)
		} else {
			check(err)
		}
	})
	return a.seen(to, who, "stat", false)
}

const procFileSystem = 0x9fa0 // statfs(2): PROC_SUPER_MAGIC

// demandRemovable refuses the root and what the kernel only shows: below /proc are doors to the root again.
func demandRemovable(p string) error {
	var system syscall.Statfs_t
	if err := syscall.Statfs(p, &system); err != nil {
		return err
	}
	if path.Clean(p) == "/" || system.Type == procFileSystem {
		return syscall.EBUSY
	}
	return nil
}

func (a *agent) removeFile(r *request) any {
	p, who := a.target(r, "path")
	recursive := r.flag("recursive", false)
	defer doing("remove", p)
	who.run(func() {
		switch file := got(os.Lstat(p)); {
		case !file.IsDir():
			check(syscall.Unlink(p))
		case recursive:
			check(demandRemovable(p))
			check(os.RemoveAll(p))
		default:
			check(syscall.Rmdir(p))
		}
	})
	return map[string]any{}
}
