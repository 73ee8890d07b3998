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

// logFile is the full copy of one stream that programs inside can search. Only the stream's pump writes it.
type logFile struct {
	file *os.File
	lost bool // the copy is not, or no longer, whole
}

// add writes the bytes at the stream's end, which were just read into the ring; the first call over the threshold starts
// the file with all bytes before them, which the ring still holds at its start.
func (l *logFile) add(c *command, s *stream, data []byte) {
	total := s.written
	if l.lost || total <= copyThreshold || len(data) == 0 {
		return
	}
	var err error
	if l.file == nil {
		data = s.ring[:total]
		l.file, err = createLog(c.id, s.name)
	}
	if err == nil && total <= copyLimit {
		_, err = l.file.Write(data)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.copied = true
	if err != nil || total > copyLimit {
		l.lost, c.copyLost = true, true
		l.file.Close()
	}
}

var logs struct {
	mu      sync.Mutex // guards folders
	folders []string
}

// createLog makes a file in the command's folder; only the newest folders are kept.
func createLog(id, name string) (*os.File, error) {
	logs.mu.Lock()
	defer logs.mu.Unlock()
	folder := filepath.Join(logFolder, id)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	if !slices.Contains(logs.folders, id) {
		logs.folders = append(logs.folders, id)
	}
	if len(logs.folders) > keptFolders {
		os.RemoveAll(filepath.Join(logFolder, logs.folders[0]))
		logs.folders = logs.folders[1:]
	}
	return os.OpenFile(filepath.Join(folder, name), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
}
