package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
)

const (
	temporaryPrefix = ".cpuos-tmp-"            // of a file being written; with its random part far below NAME_MAX
	temporaryNew    = temporaryPrefix + "new-" // of one that replaces nothing: a watch tells them apart
)

func (a *agent) writeFile(r *request, _ string) error {
	p, who := a.target(r, "path")
	w := fileWriter{path: p, who: who, exclusive: r.flag("exclusive", false), mode: r.mode()}
	parents := r.flag("create_parents", true)
	if r.problem != nil {
		return r.problem
	}
	var file fs.FileInfo
	err := error(syscall.EISDIR)
	if !strings.HasSuffix(r.query["path"], "/") {
		err = who.run(func() error { return w.open(parents) })
	}
	if err == nil {
		defer w.close()
		err = r.copyTo(w.file)
	}
	if err == nil {
		err = w.commit()
	}
	if err == nil {
		file, err = w.file.Stat()
	}
	if err != nil {
		return fileError("write", p, err)
	}
	return r.reply(200, a.info(p, file, ""))
}

// copyBody writes a whole body to a file.
func copyBody(file *os.File, body io.Reader) error {
	b := blocks.take()
	defer blocks.give(b, blockBytes)
	for {
		n, err := io.ReadFull(body, b[:])
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return err
		}
		if _, writeErr := file.Write(b[:n]); writeErr != nil {
			return writeErr
		}
		if err != nil {
			return nil
		}
	}
}

// fileWriter replaces one file as a whole: readers see the old or the new one.
type fileWriter struct {
	path      string
	who       *user
	exclusive bool
	mode      int64  // -1: not given
	final     string // the path with links followed
	temporary string
	file      *os.File
	before    *syscall.Stat_t // of the file that is replaced
}

// open looks the place up with the user's rights.
func (w *fileWriter) open(parents bool) (err error) {
	if w.final, err = followLinks(w.path); err != nil {
		return err
	}
	folder, name := path.Split(w.final)
	if name == "" || name == "." || name == ".." {
		return syscall.EISDIR
	}
	if parents {
		if err = os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	there, err := os.Lstat(w.final)
	if err == nil {
		err = w.replaces(there)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return err
	}
	var random [8]byte
	rand.Read(random[:])
	prefix := temporaryNew
	if w.before != nil {
		prefix = temporaryPrefix
	}
	w.temporary = folder + prefix + hex.EncodeToString(random[:])
	w.file, err = os.OpenFile(w.temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	return err
}

func (w *fileWriter) replaces(there fs.FileInfo) error {
	w.before = there.Sys().(*syscall.Stat_t)
	switch {
	case w.exclusive:
		return syscall.EEXIST
	case demandRegular(there) != nil:
		return demandRegular(there)
	case w.mode >= 0 && w.who.uid != 0 && w.who.uid != w.before.Uid:
		return syscall.EPERM // only its owner may change a file's mode
	}
	// Replacing needs only the folder's permission, but a file that the user may not write stays as it is.
	return syscall.Faccessat(atFdcwd, w.final, 2, atEaccess)
}

// commit gives the written file its owner and mode (as root: an owner is kept that the user could not give), and its name.
func (w *fileWriter) commit() error {
	mode := uint32(0o644)
	if w.before != nil {
		mode = w.before.Mode & 0o7777
		if w.who.uid != 0 {
			mode &= 0o1777 // as for any write by an ordinary user, setuid and setgid do not outlive it
		}
		if err := w.file.Chown(int(w.before.Uid), int(w.before.Gid)); err != nil {
			return err
		}
	}
	chmod := func() error { return syscall.Fchmod(int(w.file.Fd()), mode) }
	if w.mode >= 0 {
		mode = uint32(w.mode)
		if err := w.who.run(chmod); err != nil { // what is asked for only as far as the user may: no setgid of a foreign group
			return err
		}
	} else if err := chmod(); err != nil {
		return err
	}
	// No sync: what was written outlives this process and the sandbox's kernel, and no sandbox outlives its host's.
	err := w.who.run(func() error {
		if w.exclusive {
			return renameNew(w.temporary, w.final)
		}
		return syscall.Rename(w.temporary, w.final)
	})
	if err == nil {
		w.temporary = ""
	}
	return err
}

// close removes what was not committed.
func (w *fileWriter) close() {
	w.file.Close()
	if w.temporary != "" {
		os.Remove(w.temporary)
	}
}

// followLinks gives the path that a write through p reaches, which need not exist.
func followLinks(p string) (string, error) {
	for range 40 {
		target, err := os.Readlink(p)
		if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) { // no link, or nothing there
			return p, nil
		}
		if err != nil {
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
