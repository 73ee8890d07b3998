package main

import (
	"encoding/json"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const (
	maxWatches = 8192 // folders below one watched path
	watched    = syscall.IN_CREATE | syscall.IN_DELETE | syscall.IN_MODIFY | syscall.IN_ATTRIB | syscall.IN_MOVED_FROM | syscall.IN_MOVED_TO |
		syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF
)

type fileEvent struct {
	Kind    string  `json:"kind"`
	Path    string  `json:"path"`
	Raw     *string `json:"raw"`
	MovedTo *string `json:"moved_to"`
}

// watcher turns the kernel's events of a tree into the contract's.
type watcher struct {
	r         *request
	who       *user
	file      *os.File
	root      string
	recursive bool
	paths     map[int32]string // by watch descriptor
	last      fileEvent        // a program that writes much makes the same event again and again
	gone      bool
}

func (a *agent) watchFiles(r *request, _ string) error {
	p, who := a.target(r, "path")
	w := watcher{r: r, who: who, root: p, recursive: r.flag("recursive", false), paths: map[int32]string{}}
	if r.upgrade != framesProtocol {
		return invalid("watch needs Upgrade: %s", framesProtocol)
	}
	if r.problem != nil {
		return r.problem
	}
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return err
	}
	w.file = os.NewFile(uintptr(fd), "inotify")
	defer w.file.Close()
	if err := who.run(func() error { return w.add(p, nil) }); err != nil {
		return fileError("watch", p, err)
	}
	if err := r.upgradeToFrames(); err != nil {
		return err
	}
	go func() { // the host says nothing; its end ends the watch
		r.in.Peek(1)
		w.file.SetReadDeadline(time.Unix(1, 0))
		r.tcp.Close()
	}()
	return w.run()
}

// add watches a folder and, if asked, those below it; found is called for what was in them already.
func (w *watcher) add(p string, found func(full string)) error {
	fd, err := syscall.InotifyAddWatch(int(w.file.Fd()), p, watched)
	if err != nil {
		return err
	}
	w.paths[int32(fd)] = p
	if len(w.paths) > maxWatches {
		return fail(429, "limit_reached", "a watch covers %d folders at most", maxWatches)
	}
	if file, err := os.Stat(p); !w.recursive || err != nil || !file.IsDir() {
		return nil
	}
	return walk(p, "", 1, func(full, _ string, file fs.FileInfo) error {
		if found != nil {
			found(full)
		}
		if !file.IsDir() {
			return nil
		}
		if err := w.add(full, found); err != syscall.EACCES && err != syscall.ENOENT {
			return err
		}
		return nil
	})
}

func (w *watcher) run() error {
	buffer := make([]byte, 32<<10)
	for !w.gone {
		w.file.SetReadDeadline(now().Add(keepaliveTime))
		n, err := w.file.Read(buffer)
		if os.IsTimeout(err) {
			if err := w.r.sendFrame(frameKeepalive, 0, nil); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := w.batch(buffer[:n]); err != nil {
			return err
		}
		w.last = fileEvent{}
	}
	problem := fail(404, "file_not_found", "%s is no longer there", strings.ToValidUTF8(w.root, "\uFFFD"))
	return w.r.sendFrame(frameError, 0, problem)
}

// batch sends the events of one read. Both halves of a move come in a row.
func (w *watcher) batch(data []byte) (err error) {
	var from string // of a move whose other half has not come
	var cookie uint32
	for len(data) >= syscall.SizeofInotifyEvent && err == nil {
		event := *(*syscall.InotifyEvent)(unsafe.Pointer(&data[0]))
		name := strings.TrimRight(string(data[syscall.SizeofInotifyEvent:syscall.SizeofInotifyEvent+event.Len]), "\x00")
		data = data[syscall.SizeofInotifyEvent+event.Len:]
		p := w.paths[event.Wd]
		if name != "" {
			p = path.Join(p, name)
		}
		if from != "" && (event.Mask&syscall.IN_MOVED_TO == 0 || event.Cookie != cookie) {
			err = w.tell("removed", from, "")
			from = ""
		}
		switch {
		case event.Mask&syscall.IN_Q_OVERFLOW != 0:
			err = w.tell("overflow", w.root, "")
		case event.Mask&(syscall.IN_DELETE_SELF|syscall.IN_MOVE_SELF) != 0:
			if p == w.root {
				w.gone, err = true, w.tell("removed", p, "")
			}
		case event.Mask&syscall.IN_IGNORED != 0:
			delete(w.paths, event.Wd)
		case event.Mask&syscall.IN_MOVED_FROM != 0:
			from, cookie = p, event.Cookie
		case event.Mask&syscall.IN_MOVED_TO != 0 && strings.HasPrefix(path.Base(from), temporaryNew):
			from, err = "", w.tell("created", p, "") // a file was written as a whole
		case event.Mask&syscall.IN_MOVED_TO != 0 && strings.HasPrefix(path.Base(from), temporaryPrefix):
			from, err = "", w.tell("modified", p, "")
		case event.Mask&syscall.IN_MOVED_TO != 0 && from != "":
			err = w.tell("moved", from, p)
			w.renamed(from, p)
			from = ""
		case event.Mask&(syscall.IN_CREATE|syscall.IN_MOVED_TO) != 0:
			err = w.appeared(p, event.Mask&syscall.IN_ISDIR != 0)
		case event.Mask&syscall.IN_DELETE != 0:
			err = w.tell("removed", p, "")
		case event.Mask&(syscall.IN_MODIFY|syscall.IN_ATTRIB) != 0:
			err = w.tell("modified", p, "")
		}
	}
	if from != "" && err == nil {
		err = w.tell("removed", from, "")
	}
	return err
}

// appeared tells of a new entry; a new folder is watched too, and what came into it before that is told.
func (w *watcher) appeared(p string, folder bool) error {
	if err := w.tell("created", p, ""); err != nil || !folder || !w.recursive {
		return err
	}
	err := w.who.run(func() error { return w.add(p, func(full string) { w.tell("created", full, "") }) })
	if err != nil {
		return w.tell("overflow", p, "") // it cannot be watched: its events are lost
	}
	return nil
}

// renamed keeps the paths of watched folders true.
func (w *watcher) renamed(from, to string) {
	for fd, p := range w.paths {
		if p == from || strings.HasPrefix(p, from+"/") {
			w.paths[fd] = to + p[len(from):]
		}
	}
}

func (w *watcher) tell(kind, p, to string) error {
	event := fileEvent{Kind: kind}
	event.Path, event.Raw = rawPath(p)
	if to != "" {
		to = strings.ToValidUTF8(to, "\uFFFD")
		event.MovedTo = &to
	}
	if strings.HasPrefix(path.Base(p), temporaryPrefix) || (kind == "modified" && event.Kind == w.last.Kind && event.Path == w.last.Path) {
		return nil
	}
	w.last = event
	payload, err := json.Marshal(event)
	if err != nil {
		return err
	}
	return w.r.send(encodeFrame(frameEvent, 0, payload))
}
