package main

import (
	"cmp"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

// user is one line of the image's user table with all its groups.
type user struct {
	name, home, shell string
	uid, gid          uint32
	groups            []uint32
}

// userTable reads files of the image itself: the programs inside may change them at any time.
type userTable struct {
	folder string

	mu            sync.Mutex // guards the rest
	passwd, group imageFile
	environment   imageFile
	users         map[string]*user
	names, gnames map[uint32]string
}

// imageFile is a small file of the image, read again only when its identity or time changed.
type imageFile struct {
	inode    uint64
	size     int64
	modified syscall.Timespec
	text     string
}

func (f *imageFile) read(path string) (text string, changed bool) {
	var st syscall.Stat_t
	syscall.Stat(path, &st)
	if changed = f.inode != st.Ino || f.size != st.Size || f.modified != st.Mtim; changed {
		*f = imageFile{st.Ino, st.Size, st.Mtim, ""}
		if st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Size <= 1<<20 {
			data, _ := os.ReadFile(path)
			f.text = string(data)
		}
	}
	return f.text, changed
}

// load is called under the lock.
func (t *userTable) load() {
	passwd, changedUsers := t.passwd.read(t.folder + "/passwd")
	group, changedGroups := t.group.read(t.folder + "/group")
	if !changedUsers && !changedGroups {
		return
	}
	t.users, t.names, t.gnames = map[string]*user{}, map[uint32]string{}, map[uint32]string{}
	for line := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) < 7 || t.users[f[0]] != nil {
			continue
		}
		uid, problem := strconv.ParseUint(f[2], 10, 32)
		gid, err := strconv.ParseUint(f[3], 10, 32)
		if u := (&user{f[0], f[5], f[6], uint32(uid), uint32(gid), []uint32{uint32(gid)}}); problem == nil && err == nil {
			t.users[u.name], t.names[u.uid] = u, cmp.Or(t.names[u.uid], u.name)
		}
	}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		gid, err := strconv.ParseUint(f[min(2, len(f)-1)], 10, 32)
		if len(f) < 4 || err != nil {
			continue
		}
		t.gnames[uint32(gid)] = cmp.Or(t.gnames[uint32(gid)], f[0])
		for member := range strings.SplitSeq(f[3], ",") {
			if u := t.users[member]; u != nil && uint32(gid) != u.gid {
				u.groups = append(u.groups, uint32(gid))
			}
		}
	}
}

func (t *userTable) find(name string) *user {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.load()
	demand(t.users[name] != nil, fail(422, "user_not_found", "cannot find user %s in the image", name))
	return t.users[name]
}

// owner names the ids of a file, or gives them as digits; what find read last is good enough for that.
func (t *userTable) owner(uid, gid uint32) (name, group string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return cmp.Or(t.names[uid], strconv.Itoa(int(uid))), cmp.Or(t.gnames[gid], strconv.Itoa(int(gid)))
}

var errThreadLost = errors.New("cannot take back the agent's credentials")

// run does work with the user's credentials on this thread alone: the kernel then decides what the user may do. Real and
// saved ids stay root's, so that no program of the user can signal the thread. After errThreadLost the goroutine must
// end: its thread, still locked, dies with it.
func (u *user) run(work func()) {
	if int(u.uid) == os.Geteuid() {
		work()
		return
	}
	runtime.LockOSThread()
	defer func() {
		if setCredentials(0, 0, rootGroups) != nil {
			panic(failure{errThreadLost})
		}
		runtime.UnlockOSThread()
	}()
	check(setCredentials(u.uid, u.gid, u.groups))
	work()
}

var rootGroups = []uint32{0} // not on a stack, which may move under the kernel's pointer; nor are those of a user

func setCredentials(uid, gid uint32, groups []uint32) error {
	const keep = ^uintptr(0)
	calls := [][4]uintptr{
		{syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0},
		{syscall.SYS_SETRESGID, keep, uintptr(gid), keep},
		{syscall.SYS_SETRESUID, keep, uintptr(uid), keep},
	}
	if uid == 0 { // first, for the right to do the rest
		calls[0], calls[2] = calls[2], calls[0]
	}
	for _, call := range calls {
		if _, _, e := syscall.RawSyscall(call[0], call[1], call[2], call[3]); e != 0 {
			return e
		}
	}
	return nil
}
