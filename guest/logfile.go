package main

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
)

const (
	logFolder     = "/var/log/cpuos/commands"
	copyThreshold = 64 << 10
	copyLimit     = 1 << 30
	keptFolders   = 32
)

// logFile is the full copy of one stream that programs inside can search. Only the stream's pump uses it.
type logFile struct {
	file *os.File
	lost bool // the copy is not, or no longer, whole
}

// add writes the bytes at the stream's end, which were just read into the ring; the first call over the threshold starts the
// file with all bytes before them, which the ring still holds at its start.
func (l *logFile) add(c *command, s *stream, data []byte) {
	total := s.written
	if l.lost || total <= copyThreshold {
		return
	}
	if l.file == nil {
		data = s.ring[:total]
		var err error
		if l.file, err = c.agent.createLog(c.id, s.name); err != nil {
			l.drop(c)
			return
		}
		c.mu.Lock()
		c.copied = true
		c.mu.Unlock()
	}
	if total > copyLimit {
		l.drop(c)
	} else if _, err := l.file.Write(data); err != nil {
		l.drop(c)
	}
}

func (l *logFile) drop(c *command) {
	l.lost = true
	l.close()
	c.mu.Lock()
	c.copyLost = true
	c.mu.Unlock()
}

func (l *logFile) close() {
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

var logFolders sync.Mutex

// createLog makes a file in the command's folder; only the newest folders are kept.
func (a *agent) createLog(id, name string) (*os.File, error) {
	logFolders.Lock()
	defer logFolders.Unlock()
	folder := filepath.Join(logFolder, id)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	if !slices.Contains(a.logFolders, id) {
		a.logFolders = append(a.logFolders, id)
		if len(a.logFolders) > keptFolders {
			os.RemoveAll(filepath.Join(logFolder, a.logFolders[0]))
			a.logFolders = a.logFolders[1:]
		}
	}
	return os.OpenFile(filepath.Join(folder, name), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
}
