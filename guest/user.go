package main

import (
	"cmp"
	"errors"
	"iter"
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
	mu            sync.Mutex // guards the rest
	folder        string
	files         map[string]cachedFile
	users         map[string]*user
	names, gnames map[uint32]string
}

// cachedFile is a small file of the image, read again only when its identity or time changed.
type cachedFile struct {
	state [4]int64
	text  string
}

// read gives a file's text, and whether it is another than before.
func (t *userTable) read(name string) (text string, changed bool) {
	var st syscall.Stat_t
	syscall.Stat(t.folder+"/"+name, &st)
	state := [4]int64{int64(st.Ino), st.Size, st.Mtim.Sec, int64(st.Mtim.Nsec)}
	file, known := t.files[name]
	if changed = !known || state != file.state; changed {
		file = cachedFile{state: state}
		if st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Size <= 1<<20 {
			data, _ := os.ReadFile(t.folder + "/" + name)
			file.text = string(data)
		}
		t.files[name] = file
	}
	return file.text, changed
}

func (t *userTable) load() {
	passwd, changedUsers := t.read("passwd")
	group, changedGroups := t.read("group")
	if !changedUsers && !changedGroups {
		return
	}
	t.users, t.names, t.gnames = map[string]*user{}, map[uint32]string{}, map[uint32]string{}
	for f, uid := range tableLines(passwd, 7) {
		gid, err := strconv.ParseUint(f[3], 10, 32)
		if err == nil && t.users[f[0]] == nil {
			t.users[f[0]] = &user{f[0], f[5], f[6], uid, uint32(gid), []uint32{uint32(gid)}}
			t.names[uid] = cmp.Or(t.names[uid], f[0])
		}
	}
	for f, gid := range tableLines(group, 4) {
		t.gnames[gid] = cmp.Or(t.gnames[gid], f[0])
		for member := range strings.SplitSeq(f[3], ",") {
			if u := t.users[member]; u != nil && gid != u.gid {
				u.groups = append(u.groups, gid)
			}
		}
	}
}

// tableLines gives the fields of each whole line with its number, which is the third.
func tableLines(text string, fields int) iter.Seq2[[]string, uint32] {
	return func(yield func([]string, uint32) bool) {
		for line := range strings.Lines(text) {
			f := strings.Split(strings.TrimRight(line, "\n"), ":")
			if len(f) < fields {
				continue
			}
			if number, err := strconv.ParseUint(f[2], 10, 32); err == nil && !yield(f, uint32(number)) {
				return
			}
		}
	}
}

// environment is the image's own, as its file says it.
func (t *userTable) environment() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text, _ := t.read("environment")
	return text
}

func (t *userTable) find(name string) *user {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.load()
	if t.users[name] == nil {
		check(fail(422, "user_not_found", "cannot find user %s in the image", name))
	}
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
