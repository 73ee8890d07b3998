package main

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// user is one line of the image's user table with all its groups.
type user struct {
	name, home, shell string
	uid, gid          uint32
	groups            []uint32
}

// userTable reads passwd and group of the image itself: the programs inside may change them at any time.
type userTable struct {
	folder string

	mu      sync.Mutex // guards the rest
	passwd  cachedFile
	group   cachedFile
	checked time.Time
	users   map[string]*user
	names   map[uint32]string
	gnames  map[uint32]string
}

func newUserTable(folder string) *userTable {
	return &userTable{folder: folder, passwd: cachedFile{path: folder + "/passwd"}, group: cachedFile{path: folder + "/group"}}
}

func (t *userTable) load() {
	t.checked = now()
	passwd, changedUsers := t.passwd.read()
	group, changedGroups := t.group.read()
	if !changedUsers && !changedGroups && t.users != nil {
		return
	}
	t.users, t.names, t.gnames = map[string]*user{}, map[uint32]string{}, map[uint32]string{}
	for line := range bytes.Lines(passwd) {
		f := strings.Split(strings.TrimRight(string(line), "\n"), ":")
		if len(f) < 7 {
			continue
		}
		uid, e1 := strconv.ParseUint(f[2], 10, 32)
		gid, e2 := strconv.ParseUint(f[3], 10, 32)
		if e1 != nil || e2 != nil || t.users[f[0]] != nil {
			continue
		}
		u := &user{name: f[0], uid: uint32(uid), gid: uint32(gid), home: f[5], shell: f[6], groups: []uint32{uint32(gid)}}
		t.users[u.name] = u
		if _, taken := t.names[u.uid]; !taken {
			t.names[u.uid] = u.name
		}
	}
	for line := range bytes.Lines(group) {
		f := strings.Split(strings.TrimRight(string(line), "\n"), ":")
		if len(f) < 4 {
			continue
		}
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			continue
		}
		if _, taken := t.gnames[uint32(gid)]; !taken {
			t.gnames[uint32(gid)] = f[0]
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if u := t.users[member]; u != nil && uint32(gid) != u.gid {
				u.groups = append(u.groups, uint32(gid))
			}
		}
	}
}

func (t *userTable) find(name string) (*user, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.load()
	if u := t.users[name]; u != nil {
		return u, nil
	}
	return nil, fail(422, "user_not_found", "cannot find user %s in the image", name)
}

// owner names the ids of a file, or gives them as digits.
func (t *userTable) owner(uid, gid uint32) (string, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now().Sub(t.checked) > 100*time.Millisecond { // a long listing looks once
		t.load()
	}
	name, group := t.names[uid], t.gnames[gid]
	if name == "" {
		name = strconv.FormatUint(uint64(uid), 10)
	}
	if group == "" {
		group = strconv.FormatUint(uint64(gid), 10)
	}
	return name, group
}

// cachedFile is a small file read again only when its identity or time changed.
type cachedFile struct {
	path  string
	state [4]int64
	data  []byte
}

func (c *cachedFile) read() (data []byte, changed bool) {
	var st syscall.Stat_t
	if syscall.Stat(c.path, &st) != nil {
		st = syscall.Stat_t{}
	}
	state := [4]int64{int64(st.Ino), st.Size, st.Mtim.Sec, int64(st.Mtim.Nsec)}
	if state == c.state && c.data != nil {
		return c.data, false
	}
	c.state, c.data = state, []byte{}
	if st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Size <= 1<<20 {
		if data, err := os.ReadFile(c.path); err == nil {
			c.data = data
		}
	}
	return c.data, true
}

var errThreadLost = errors.New("cannot take back the agent's credentials")

// run does work with the user's credentials on this thread alone: the kernel then decides what the user may do. Real and
// saved ids stay root's, so that no program of the user can signal the thread. Work must not start goroutines that rely
// on the credentials. After errThreadLost the goroutine must end: its thread, still locked, dies with it.
func (u *user) run(work func() error) (err error) {
	if int(u.uid) == os.Geteuid() {
		return work()
	}
	runtime.LockOSThread()
	defer func() {
		if setCredentials(0, 0, []uint32{0}) != nil {
			err = errThreadLost
			return
		}
		runtime.UnlockOSThread()
	}()
	if err = setCredentials(u.uid, u.gid, u.groups); err != nil {
		return err
	}
	return work()
}

func setCredentials(uid, gid uint32, groups []uint32) error {
	if uid == 0 { // first, for the right to do the rest
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, noChange, 0, noChange); e != 0 {
			return e
		}
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, noChange, uintptr(gid), noChange); e != 0 {
		return e
	}
	if uid != 0 {
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, noChange, uintptr(uid), noChange); e != 0 {
			return e
		}
	}
	return nil
}
