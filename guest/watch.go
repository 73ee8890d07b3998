package main

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
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
	fileCall
	file      *os.File
	recursive bool
	paths     map[int32]string // by watch descriptor
	from      string           // of a move whose other half has not come
	cookie    uint32
	last      fileEvent // a program that writes much makes the same event again and again
	gone      bool
}

func (a *agent) watchFiles(f fileCall) any {
	w := watcher{fileCall: f, recursive: f.flag("recursive", false), paths: map[int32]string{}}
	w.demandUpgrade(framesProtocol)
	w.file = os.NewFile(uintptr(got(syscall.InotifyInit1(syscall.IN_CLOEXEC|syscall.IN_NONBLOCK))), "inotify")
	defer w.file.Close()
	w.who.run(func() { w.add(w.path, false) })
	w.send(w.upgradeHead())
	go func() { // the host says nothing; its end ends the watch
		w.in.Read(make([]byte, 1))
		w.file.Close()
	}()
	w.run()
	return nil
}

// add watches a folder and, if asked, those below it; tell says of what is in them already.
func (w *watcher) add(p string, tell bool) {
	fd := got(syscall.InotifyAddWatch(int(w.file.Fd()), p, watched))
	w.paths[int32(fd)] = p
	demand(len(w.paths) <= maxWatches, fail(429, "limit_reached", "a watch covers %d folders at most", maxWatches))
	if file, err := os.Stat(p); !w.recursive || err != nil || !file.IsDir() {
		return
	}
	walk(p, "", 1, func(full, _ string, file fs.FileInfo) {
		if tell {
			w.tell("created", full, "")
		}
		if file.IsDir() {
			err := attempt(func() { w.add(full, tell) })
			demand(errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.ENOENT), err)
		}
	})
}

func (w *watcher) run() {
	buffer := make([]byte, 32<<10)
	for !w.gone {
		w.file.SetReadDeadline(now().Add(keepaliveTime))
		n, err := w.file.Read(buffer)
		if os.IsTimeout(err) {
			w.send(encodeFrame(frameKeepalive, 0, nil))
			continue
		}
		check(err)
		for data := buffer[:n]; len(data) >= syscall.SizeofInotifyEvent; {
			event := *(*syscall.InotifyEvent)(unsafe.Pointer(&data[0]))
			size := syscall.SizeofInotifyEvent + event.Len
			w.take(event, strings.TrimRight(string(data[syscall.SizeofInotifyEvent:size]), "\x00"))
			data = data[size:]
		}
		w.leftBehind()
		w.last = fileEvent{}
	}
	w.sendJSON(frameError, fail(404, "file_not_found", "%s is no longer there", strings.ToValidUTF8(w.path, "\uFFFD")))
}

// take tells of one event. Both halves of a move come in a row.
func (w *watcher) take(event syscall.InotifyEvent, name string) {
	p := path.Join(w.paths[event.Wd], name)
	has := func(bits uint32) bool { return event.Mask&bits != 0 }
	if !has(syscall.IN_MOVED_TO) || event.Cookie != w.cookie {
		w.leftBehind()
	}
	from, temporary := w.from, path.Base(w.from)
	w.from = ""
	switch {
	case has(syscall.IN_Q_OVERFLOW):
		w.tell("overflow", w.path, "")
	case has(syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF):
		if w.gone = w.gone || p == w.path; w.gone {
			w.tell("removed", p, "")
		}
	case has(syscall.IN_IGNORED):
		delete(w.paths, event.Wd)
	case has(syscall.IN_MOVED_FROM):
		w.from, w.cookie = p, event.Cookie
	case has(syscall.IN_MOVED_TO) && strings.HasPrefix(temporary, temporaryNew):
		w.tell("created", p, "") // a file was written as a whole
	case has(syscall.IN_MOVED_TO) && strings.HasPrefix(temporary, temporaryPrefix):
		w.tell("modified", p, "")
	case has(syscall.IN_MOVED_TO) && from != "":
		w.tell("moved", from, p)
		for fd, known := range w.paths {
			if known == from || strings.HasPrefix(known, from+"/") {
				w.paths[fd] = p + known[len(from):]
			}
		}
	case has(syscall.IN_CREATE | syscall.IN_MOVED_TO):
		w.tell("created", p, "")
		if has(syscall.IN_ISDIR) && w.recursive { // what came into it before it is watched is told too
			if attempt(func() { w.who.run(func() { w.add(p, true) }) }) != nil {
				w.tell("overflow", p, "") // it cannot be watched: its events are lost
			}
		}
	case has(syscall.IN_DELETE):
		w.tell("removed", p, "")
	case has(syscall.IN_MODIFY | syscall.IN_ATTRIB):
		w.tell("modified", p, "")
	}
}

// leftBehind tells of a move to a place that is not watched.
func (w *watcher) leftBehind() {
	if w.from != "" {
		w.tell("removed", w.from, "")
		w.from = ""
	}
}

func (w *watcher) tell(kind, p, to string) {
	event := fileEvent{Kind: kind}
	if event.Path, event.Raw = rawPath(p); to != "" {
		event.MovedTo = new(strings.ToValidUTF8(to, "\uFFFD"))
	}
	again := kind == "modified" && w.last.Kind == kind && w.last.Path == event.Path
	if !again && !strings.HasPrefix(path.Base(p), temporaryPrefix) {
		w.last = event
		w.sendJSON(frameEvent, event)
	}
}
