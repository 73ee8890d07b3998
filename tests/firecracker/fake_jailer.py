#!/usr/bin/python3 -IS
"""Stands in for Firecracker's jailer: takes its documented options and no others, and does what it says it does
(docs/jailer.md, "Jailer Operation"), for the static program it is given. What lies beside it as `script` goes along."""

import ctypes
import os
import resource
import shutil
import sys

VERSION = "1.15.1"
LIBC = ctypes.CDLL(None, use_errno=True)
ONCE = {"id", "exec-file", "uid", "gid", "chroot-base-dir", "netns", "cgroup-version", "parent-cgroup"}
MANY = {"resource-limit", "cgroup"}
LIMITS = {"no-file": resource.RLIMIT_NOFILE, "fsize": resource.RLIMIT_FSIZE}
SLAVE, BIND, REC, DETACH, NEWNS, NEWNET, PIVOT_ROOT = 1 << 19, 4096, 16384, 2, 0x20000, 0x40000000, 155


def parse(words):
    options = {name: [] for name in MANY}
    while words and words[0] != "--":
        name = words.pop(0).removeprefix("--")
        if name in ONCE and name not in options:
            options[name] = words.pop(0)
        elif name in MANY:
            options[name].append(words.pop(0))
        else:
            sys.exit(f"Error: ArgumentParsing(UnexpectedArgument({name!r}))")
    if len(options["id"]) > 64 or not options["id"].replace("-", "").isalnum():
        sys.exit("Error: InvalidInstanceId")
    return options, words[1:]


def call(result):
    if result:
        sys.exit(f"Error: {os.strerror(ctypes.get_errno())}")


def join_groups(options):
    if options.get("cgroup-version", "1") == "2" and not options["cgroup"]:
        group = f"/sys/fs/cgroup/{options.get('parent-cgroup', 'firecracker')}"
        if os.path.exists(group):
            with open(f"{group}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))


def pivot(root):
    call(LIBC.unshare(NEWNS))
    call(LIBC.mount(None, b"/", None, ctypes.c_ulong(SLAVE | REC), None))
    call(LIBC.mount(root.encode(), root.encode(), None, ctypes.c_ulong(BIND | REC), None))
    os.chdir(root)
    os.mkdir("old_root", 0o600)
    call(LIBC.syscall(PIVOT_ROOT, b".", b"old_root"))
    os.chdir("/")
    call(LIBC.umount2(b"old_root", DETACH))
    os.rmdir("old_root")


def main():
    if sys.argv[1:] == ["--version"]:
        print(f"Jailer v{VERSION}\n")
        return
    options, extra = parse(sys.argv[1:])
    os.closerange(3, 4096)
    program, uid, gid = os.path.realpath(options["exec-file"]), int(options["uid"]), int(options["gid"])
    name = os.path.basename(program)
    root = f"{os.path.realpath(options['chroot-base-dir'])}/{name}/{options['id']}/root"
    os.makedirs(root, exist_ok=True)
    join_groups(options)
    with open(program, "rb") as source:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        copy = os.open(f"{root}/{name}", flags, 0o755)
        os.fchown(copy, uid, gid)
        with os.fdopen(copy, "wb") as target:
            shutil.copyfileobj(source, target)
    script = os.path.join(os.path.dirname(os.path.realpath(__file__)), "script")
    if os.path.exists(script):
        shutil.copy(script, f"{root}/script")
        os.chmod(f"{root}/script", 0o444)
    if "netns" in options:
        namespace = os.open(options["netns"], os.O_RDONLY)
        call(LIBC.setns(namespace, NEWNET))
        os.close(namespace)
    for limit in options["resource-limit"]:
        which, _, value = limit.partition("=")
        resource.setrlimit(LIMITS[which], (int(value), int(value)))
    pivot(root)
    for folder in ("/", "/dev", "/dev/net", "/run"):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o700)
        os.chown(folder, uid, gid)
    for path, major, minor in (("/dev/net/tun", 10, 200), ("/dev/kvm", 10, 232), ("/dev/urandom", 1, 9)):
        os.mknod(path, 0o020600, os.makedev(major, minor))
        os.chown(path, uid, gid)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    times = ["--start-time-us", "1", "--start-time-cpu-us", "1", "--parent-cpu-time-us", "1"]
    os.execve(f"/{name}", [f"/{name}", "--id", options["id"], *times, *extra], {})


main()
