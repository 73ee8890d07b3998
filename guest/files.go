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
	"strconv"
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

func (a *agent) info(p string, file fs.FileInfo, target string) fileInfo {
	st := file.Sys().(*syscall.Stat_t)
	i := fileInfo{
		Kind: kindOf(file), Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		ModifiedAt: file.ModTime().UTC().Format(time.RFC3339Nano),
	}
	i.Path, i.Raw = rawPath(p)
	i.User, i.Group = a.users.owner(st.Uid, st.Gid)
	if i.Kind == "symlink" {
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

// demandRegular is the error of a call that serves files alone.
func demandRegular(file fs.FileInfo) error {
	switch kindOf(file) {
	case "file":
		return nil
	case "directory":
		return syscall.EISDIR
	}
	return fail(409, "file_kind_unsupported", "%s is a device, socket or pipe", file.Name())
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

// target reads the path and the user of a file call; what is wrong with them is left in the request.
func (a *agent) target(r *request, name string) (string, *user) {
	p := r.query[name]
	if p == "" || strings.Contains(p, "\x00") {
		r.problem = fail(422, "file_name_invalid", "%s is empty or has a zero byte", name)
	}
	who, err := a.users.find(cmp.Or(r.query["user"], "user"))
	r.problem = errors.Join(r.problem, err)
	return absolute(p), who
}

func (r *request) mode() int64 {
	mode := r.number("mode", -1, 8)
	if mode > 0o7777 {
		r.problem = invalid("mode is octal, up to 7777")
	}
	return mode
}

func (a *agent) readFile(r *request, _ string) error {
	p, who := a.target(r, "path")
	offset, length := r.number("offset", 0, 10), r.number("length", 1<<62, 10)
	if r.problem != nil {
		return r.problem
	}
	var file *os.File
	var size int64
	err := who.run(func() (err error) {
		file, size, err = openRegular(p)
		return err
	})
	if err != nil {
		return fileError("read", p, err)
	}
	defer file.Close()
	if size == 0 { // the kernel's own files have no size, only content
		if data, _ := io.ReadAll(io.LimitReader(file, 4<<20)); len(data) > 0 {
			size = int64(len(data))
			data = data[min(offset, size):]
			data = data[:min(length, int64(len(data)))]
			return r.send(r.fileHead(int64(len(data)), size), data)
		}
	}
	length = min(length, max(0, size-offset))
	if err = r.send(r.fileHead(length, size)); err == nil {
		err = r.sendFile(file, offset, length)
	}
	if err != nil {
		r.keepAlive = false // the announced length cannot be kept: only a cut connection says so
	}
	return err
}

func (r *request) fileHead(length, size int64) []byte {
	return r.head(200, "application/octet-stream", length, "X-File-Size: "+strconv.FormatInt(size, 10)+"\r\n")
}

// openRegular looks before it opens: opening a device may do something.
func openRegular(p string) (*os.File, int64, error) {
	before, err := os.Stat(p)
	if err == nil {
		err = demandRegular(before)
	}
	if err != nil {
		return nil, 0, err
	}
	file, err := os.OpenFile(p, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, 0, err
	}
	now, err := file.Stat()
	if err == nil {
		err = demandRegular(now)
	}
	if err != nil {
		file.Close()
		return nil, 0, err
	}
	return file, now.Size(), nil
}

func (a *agent) statFile(r *request, _ string) error {
	p, who := a.target(r, "path")
	follow := r.flag("follow", false)
	if r.problem != nil {
		return r.problem
	}
	return a.replyInfo(r, "stat", p, who, follow)
}

// replyInfo answers with what is at p, as the user sees it.
func (a *agent) replyInfo(r *request, verb, p string, who *user, follow bool) error {
	var file fs.FileInfo
	target := ""
	err := who.run(func() (err error) {
		if follow {
			file, err = os.Stat(p)
		} else if file, err = os.Lstat(p); err == nil && kindOf(file) == "symlink" {
			target, err = os.Readlink(p)
		}
		return err
	})
	if err != nil {
		return fileError(verb, p, err)
	}
	return r.reply(200, a.info(p, file, target))
}

func (a *agent) listFiles(r *request, _ string) error {
	p, who := a.target(r, "path")
	depth := r.number("depth", 1, 10)
	if r.problem != nil {
		return r.problem
	}
	if depth < 1 || depth > maxListDepth {
		return invalid("depth is 1 to %d", maxListDepth)
	}
	entries, truncated := []fileInfo{}, false
	err := who.run(func() error {
		return walk(p, "", int(depth), func(full, _ string, file fs.FileInfo) error {
			if len(entries) == maxEntries {
				return errTruncated
			}
			target := ""
			if kindOf(file) == "symlink" {
				target, _ = os.Readlink(full)
			}
			entries = append(entries, a.info(full, file, target))
			return nil
		})
	})
	if truncated = errors.Is(err, errTruncated); err != nil && !truncated {
		return fileError("list", p, err)
	}
	slices.SortFunc(entries, func(x, y fileInfo) int { return strings.Compare(x.bytes(), y.bytes()) })
	return r.reply(200, map[string]any{"entries": entries, "truncated": truncated})
}

func (i fileInfo) bytes() string {
	if i.Raw == nil {
		return i.Path
	}
	data, _ := base64.StdEncoding.DecodeString(*i.Raw)
	return string(data)
}

var errTruncated = fail(429, "limit_reached", "there are more entries than one answer tells")

// walk visits what is in a folder, sorted, each subfolder after its own entry. Links are not followed, but for the folder
// itself. A huge folder is cut, so that it cannot fill the agent's memory; a subfolder that may not be read is passed over.
func walk(folder, name string, depth int, visit func(full, name string, file fs.FileInfo) error) error {
	flags := os.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NONBLOCK
	if name != "" {
		flags |= syscall.O_NOFOLLOW
	}
	dir, err := os.OpenFile(folder, flags, 0)
	if err != nil {
		return err
	}
	entries, err := dir.ReadDir(5 * maxEntries)
	dir.Close()
	if err != nil && err != io.EOF {
		return err
	}
	slices.SortFunc(entries, func(x, y fs.DirEntry) int { return strings.Compare(x.Name(), y.Name()) })
	for _, entry := range entries {
		file, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return err // a folder that only tells names, a path that is too long: nothing below may be missing unsaid
		}
		full, below := folder+"/"+entry.Name(), path.Join(name, entry.Name())
		if folder == "/" {
			full = "/" + entry.Name()
		}
		if err = visit(full, below, file); err == nil && depth > 1 && entry.IsDir() {
			err = walk(full, below, depth-1, visit)
			if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
		if err != nil {
			return err
		}
	}
	if len(entries) == 5*maxEntries {
		return errTruncated
	}
	return nil
}

func (a *agent) makeFolder(r *request, _ string) error {
	p, who := a.target(r, "path")
	parents, mode := r.flag("parents", true), r.mode()
	if r.problem != nil {
		return r.problem
	}
	err := who.run(func() (err error) {
		if parents {
			err = os.MkdirAll(path.Dir(p), 0o755)
		}
		if err == nil {
			err = os.Mkdir(p, 0o755)
		}
		if file, e := os.Stat(p); errors.Is(err, fs.ErrExist) && parents && e == nil && file.IsDir() {
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
	from, who := a.target(r, "path")
	to, _ := a.target(r, "to")
	overwrite := r.flag("overwrite", false)
	if r.problem != nil {
		return r.problem
	}
	err := who.run(func() (err error) {
		if overwrite {
			err = syscall.Rename(from, to)
		} else {
			err = renameNew(from, to)
		}
		if err == syscall.EXDEV {
			err = moveAcross(who, from, to, overwrite)
		}
		return err
	})
	if err != nil {
		return fileError("move "+from+" to", to, err)
	}
	return a.replyInfo(r, "move", to, who, false)
}

func (a *agent) removeFile(r *request, _ string) error {
	p, who := a.target(r, "path")
	recursive := r.flag("recursive", false)
	if r.problem != nil {
		return r.problem
	}
	err := who.run(func() error {
		file, err := os.Lstat(p)
		switch {
		case err != nil:
			return err
		case !file.IsDir():
			return syscall.Unlink(p)
		case recursive:
			return os.RemoveAll(p)
		}
		return syscall.Rmdir(p)
	})
	if err != nil {
		return fileError("remove", p, err)
	}
	return r.reply(200, map[string]any{})
}
