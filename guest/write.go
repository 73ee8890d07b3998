package main

import (
	"crypto/rand"
	"errors"
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
	if strings.HasSuffix(f.query.Get("path"), "/") {
		check(syscall.EISDIR)
	}
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
	if name == "" || name == "." || name == ".." {
		check(syscall.EISDIR)
	}
	if parents {
		check(os.MkdirAll(folder, 0o755))
	}
	prefix := temporaryNew
	if there, err := os.Lstat(w.final); err == nil {
		w.before, prefix = there.Sys().(*syscall.Stat_t), temporaryPrefix
		if w.exclusive {
			check(syscall.EEXIST)
		}
		demandRegular(there)
		// Replacing needs only the folder's permission, but a file that the user may not write stays as it is.
		check(access(w.final, mayWrite))
		if w.mode >= 0 && w.who.uid != 0 && w.who.uid != w.before.Uid {
			check(syscall.EPERM) // only its owner may change a file's mode
		}
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
	w.temporary = ""
}

// close removes what was not committed.
func (w *fileWriter) close() {
	w.file.Close()
	if w.temporary != "" {
		os.Remove(w.temporary)
	}
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
