package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	initPath   = "/init"
	moduleList = "/modules/order" // names below /modules, in the order in which they need each other
	oldRoot    = "/lower"
	layer      = "/upper" // the disk of the root's writable layer
	newRoot    = "/new"
	deviceTime = 10 * time.Second
	newDisk    = "noinit_itable" // its image was all zeros when the host made it: nothing is left to clear

	holdCall, releaseCall = 0xC0045877, 0xC0045878 // FIFREEZE, FITHAW
)

// disks are those that this kernel alone writes.
var disks []*os.File

var (
	tasks     = flag.Int("tasks", 0, "as /init of a guest kernel: limit of processes and threads that commands start")
	memoryMiB = flag.Int("memory", 0, "as /init of a guest kernel: its memory in MiB")
	word      = flag.String("word", "", "as /init of a guest kernel: give the sum of this, and end")
	drives    = flag.String("drives", "", "as /init of a guest kernel: names of its drives in their order, where their VMM gives them none")
)

// makeMachine does what a guest kernel leaves to its first process: modules, mounts, limits and the link. Where a runtime
// has done all that, the agent is not started as /init. What fails here ends the guest, and the kernel's log says why.
func makeMachine() {
	if os.Getpid() != 1 || os.Args[0] != initPath {
		return
	}
	err := attempt(func() {
		mount("devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755")
		if *word != "" { // all that is asked is whether this machine comes so far
			sum := sha256.Sum256([]byte(*word)) // the word itself the kernel has printed, with its command line
			os.WriteFile("/dev/console", []byte("\n"+hex.EncodeToString(sum[:])+"\n"), 0)
			syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
		}
		mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		loadModules()
		seedRandom()
		mountRoot()
		mountFolders()
		enterRoot()
		makeGroup()
		joinNetwork()
		if name := os.Getenv("CPUOS_HOSTNAME"); name != "" {
			check(syscall.Sethostname([]byte(name)))
		}
	})
	if err != nil {
		os.WriteFile("/dev/kmsg", []byte("cpuos-agent: cannot make the machine: "+err.Error()+"\n"), 0)
		os.Exit(1)
	}
}

// isKernels is true of the threads of a kernel of our own, which nobody stops: kthreadd and its children.
func (p process) isKernels() bool {
	return os.Args[0] == initPath && (p.pid == 2 || p.parent == 2)
}

func mount(source, target, kind string, flags uintptr, options string) {
	if err := syscall.Mount(source, target, kind, flags, options); err != nil {
		panic(failure{fmt.Errorf("mount %s on %s: %w", source, target, err)})
	}
}

func loadModules() {
	names := got(os.ReadFile(moduleList))
	for name := range strings.FieldsSeq(string(names)) {
		path := filepath.Dir(moduleList) + "/" + name
		file := got(os.Open(path))
		if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil && err != syscall.EEXIST {
			panic(failure{fmt.Errorf("load %s: %w", name, err)})
		}
		file.Close()
		os.Remove(path) // it takes memory
	}
}

// seedRandom takes from the host what the kernel would else wait for.
func seedRandom() {
	source, err := os.Open("/dev/hwrng")
	if err != nil {
		return
	}
	defer source.Close()
	seed := make([]byte, sha256.Size)
	source.Read(seed)
	addEntropy(seed)
}

// drive is the block device that the host gave this name.
func drive(name string) string {
	for end := now().Add(deviceTime); now().Before(end); time.Sleep(5 * time.Millisecond) {
		if path := inOrder(name, *drives); path != "" {
			if _, err := os.Stat(path); err == nil {
				return path
			}
			continue
		}
		paths, _ := filepath.Glob("/sys/block/*/serial")
		for _, path := range paths {
			if serial, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(serial)) == name {
				return "/dev/" + filepath.Base(filepath.Dir(path))
			}
		}
	}
	panic(failure{fmt.Errorf("no drive %s within %s", name, deviceTime)})
}

// inOrder is what the kernel calls the drive of this name, where only their order is known; empty where it is not.
func inOrder(name, order string) string {
	place := slices.Index(strings.Split(order, ","), name)
	if place < 0 {
		return ""
	}
	return "/dev/vd" + string(rune('a'+place))
}

// mountRoot puts the template below the disk of the sandbox's own changes.
func mountRoot() {
	mount(drive("template"), oldRoot, "erofs", unix.MS_RDONLY|unix.MS_NODEV, "")
	mount(drive("root"), layer, "ext4", unix.MS_NOATIME|unix.MS_NODEV, newDisk)
	for _, folder := range []string{layer + "/upper", layer + "/work"} {
		if err := os.Mkdir(folder, 0o755); err != nil && !os.IsExist(err) {
			panic(failure{err})
		}
	}
	options := "lowerdir=" + oldRoot + ",upperdir=" + layer + "/upper,workdir=" + layer + "/work"
	mount("root", newRoot, "overlay", unix.MS_NOATIME, options)
	os.MkdirAll(newRoot+workFolder, 0o755)
	mount(drive("workspace"), newRoot+workFolder, "ext4", unix.MS_NOATIME|unix.MS_NODEV, newDisk)
	os.Remove(newRoot + workFolder + "/lost+found") // of a disk that is new: an empty folder of root's
	disks = []*os.File{got(os.Open(layer)), got(os.Open(newRoot + workFolder))}
}

// holdDisks has nothing written to them until releaseDisks: what is copied of them meanwhile fits what is saved of memory.
func holdDisks() {
	syscall.Sync()
	for _, disk := range disks {
		check(unix.IoctlSetInt(int(disk.Fd()), holdCall, 0))
	}
}

// keepMachineID has one in the layer of a machine that is saved, where each copy has to write another: opened for writing
// it is copied there.
func (a *agent) keepMachineID() {
	if len(disks) == 0 {
		return
	}
	if file := a.openMachineID(); file != nil {
		file.Close()
	} else {
		who, _ := a.present()
		a.makeMachineID(who)
	}
}

// makeMachineID writes one that no other sandbox has; in place, where one is: a new file is six times the work, and every
// copy of a sandbox waits for it.
func (a *agent) makeMachineID(who identity) {
	id := sha256.Sum256(append([]byte("cpuos-machine-id\n"+who.Sandbox+"\n"), who.SessionKey...))
	text := []byte(hex.EncodeToString(id[:16]) + "\n")
	if file := a.openMachineID(); file != nil {
		file.Write(text)
		file.Close()
	} else if partial := a.users.folder + "/.machine-id"; os.WriteFile(partial, text, 0o444) == nil {
		os.Rename(partial, a.users.folder+"/machine-id")
	}
}

// openMachineID gives a plain file that holds a whole one; nil where there is none.
func (a *agent) openMachineID() *os.File {
	file, err := os.OpenFile(a.users.folder+"/machine-id", os.O_WRONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	if facts, err := file.Stat(); err == nil && facts.Mode().IsRegular() && facts.Size() == 33 {
		return file
	}
	file.Close()
	return nil
}

// goOnAt is the first that a machine does which stood still until this moment.
func goOnAt(moment float64) {
	clock := syscall.NsecToTimeval(int64(moment * 1e9))
	syscall.Settimeofday(&clock)
	releaseDisks()
}

func releaseDisks() {
	for _, disk := range disks {
		unix.IoctlSetInt(int(disk.Fd()), releaseCall, 0) // refused where it is not held
	}
}

func mountFolders() {
	for _, folder := range []string{"/dev", "/proc", "/sys"} {
		os.Mkdir(newRoot+folder, 0o755)
		mount(folder, newRoot+folder, "", unix.MS_MOVE, "")
	}
	in := func(path string) string { return newRoot + path }
	for _, folder := range []string{"/dev/pts", "/dev/shm"} {
		check(os.Mkdir(in(folder), 0o755))
	}
	os.Mkdir(in("/tmp"), 0o1777)
	size := "size=" + strconv.Itoa(max(16, *memoryMiB/4)) + "m,mode=1777"
	mount("devpts", in("/dev/pts"), "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666")
	mount("tmpfs", in("/dev/shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, size)
	mount("tmpfs", in("/tmp"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, size)
	mount("cgroup2", in("/sys/fs/cgroup"), "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	for name, target := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		check(os.Symlink("/proc/self/fd"+target, in("/dev/"+name)))
	}
}

// enterRoot leaves the kernel's first root behind, which cannot be unmounted.
func enterRoot() {
	check(os.Chdir(newRoot))
	mount(".", "/", "", unix.MS_MOVE, "")
	check(syscall.Chroot("."))
	check(os.Chdir("/"))
	check(syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 20, Max: 1 << 20}))
	os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0)
}

// joinNetwork gives the devices what they have in every sandbox; IPv6 is on `lo` alone.
func joinNetwork() {
	for device, value := range map[string]string{"all": "1", "default": "1", "lo": "0"} {
		os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/disable_ipv6", []byte(value), 0)
	}
	fd := got(syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0))
	defer syscall.Close(fd)
	setLink(fd, "lo", [4]byte{127, 0, 0, 1}, 8)
	setLink(fd, "eth0", [4]byte{10, 0, 0, 2}, 30)
	// struct rtentry of linux/route.h, on 64 bits
	var route [120]byte
	for offset, address := range map[int][4]byte{8: {}, 24: {10, 0, 0, 1}, 40: {}} {
		binary.NativeEndian.PutUint16(route[offset:], syscall.AF_INET)
		copy(route[offset+4:], address[:])
	}
	binary.NativeEndian.PutUint16(route[56:], syscall.RTF_UP|syscall.RTF_GATEWAY)
	askKernel(fd, syscall.SIOCADDRT, unsafe.Pointer(&route))
}

func setLink(fd int, name string, address [4]byte, bits int) {
	request := got(unix.NewIfreq(name))
	check(request.SetInet4Addr(address[:]))
	check(unix.IoctlIfreq(fd, syscall.SIOCSIFADDR, request))
	mask := [4]byte{}
	binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-bits))
	check(request.SetInet4Addr(mask[:]))
	check(unix.IoctlIfreq(fd, syscall.SIOCSIFNETMASK, request))
	request = got(unix.NewIfreq(name))
	request.SetUint16(syscall.IFF_UP | syscall.IFF_RUNNING)
	check(unix.IoctlIfreq(fd, syscall.SIOCSIFFLAGS, request))
}

func askKernel(fd int, call uintptr, argument unsafe.Pointer) {
	if _, _, number := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), call, uintptr(argument)); number != 0 {
		panic(failure{number})
	}
}
