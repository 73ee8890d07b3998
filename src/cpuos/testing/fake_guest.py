"""The fake runtime's sandbox: a process with a root of its own that runs the fake agent.

A zygote (`python -m cpuos.testing.fake_guest`) has everything imported and forks one guest for each line of JSON on its
stdin, answering its pid. Where the caller may (root, or user namespaces), a guest has its own pid, mount and host-name
namespaces and a root made of the host's programs plus its own /workspace, /home, /tmp and /etc; else only a folder.
"""

from __future__ import annotations

import asyncio
import bz2
import concurrent.futures.thread
import ctypes
import encodings.idna
import gzip
import json
import lzma
import os
import signal
import socket
import sys
import traceback
from base64 import b64decode
from pathlib import Path

from cpuos.testing.fake_agent import FakeAgent

__all__ = ["CLONE_FLAGS", "PROGRAM_FOLDERS", "main"]

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x10000000, 0x20000000
CLONE_FLAGS = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PROGRAM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SHARED_ETC = (
    "alternatives",
    "ssl",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "pam.d",
)

# Imported lazily by what a guest calls; its root does not have them.
_NEEDED_INSIDE = (bz2, concurrent.futures.thread, encodings.idna, gzip, lzma)
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve fork requests until stdin ends. Guests live on."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        print(json.dumps(_fork_guest(json.loads(line))), flush=True)


def _fork_guest(ask: dict[str, str]) -> dict[str, object]:
    pid_read, pid_write = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            os.close(pid_read)
            os.setsid()
            _detach_streams(Path(ask["log"]))
            contained = _unshare()
            guest = os.fork()
            if guest == 0:
                os.close(pid_write)
                _run_guest(ask, contained=contained)
            os.write(pid_write, str(guest).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(pid_write)
    with os.fdopen(pid_read) as pipe:
        text = pipe.read()
    return {"pid": int(text)} if text else {"error": "the guest did not start"}


def _unshare() -> bool:
    """Root unshares what it needs; others through a user namespace where the host allows them."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_FLAGS if uid == 0 else CLONE_FLAGS | CLONE_NEWUSER
    if _libc.unshare(flags) != 0:
        return False
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return True


def _detach_streams(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, target in ((0, null), (1, errors), (2, errors)):
        os.dup2(null if number == 0 else target, number)
    os.close(null)
    os.close(errors)


def _run_guest(ask: dict[str, str], *, contained: bool) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.umask(0o022)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(ask["socket"])
        os.chmod(ask["socket"], 0o666)  # the folder above decides who gets here
        listener.listen(128)
        root = Path(ask["root"])
        switch_users = os.geteuid() == 0 and contained and Path("/proc/self/uid_map").read_text().split()[2] != "1"
        _fill_root(root, Path(ask["workspace"]), contained=contained)
        if contained:
            _enter_root(root)
            root = Path("/")
        agent = FakeAgent(
            ask["sandbox"],
            node_key=b64decode(ask["node_key"]),
            root=root,
            switch_users=switch_users,
            set_hostname=_hostname_setter(contained),
        )
        asyncio.run(_serve(agent, listener))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


async def _serve(agent: FakeAgent, listener: socket.socket) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    await agent.start(listener)
    if os.getpid() == 1:
        reaping = asyncio.create_task(_reap_orphans(agent))
    await stopped.wait()
    if os.getpid() == 1:
        reaping.cancel()
    await agent.close()


async def _reap_orphans(agent: FakeAgent) -> None:
    """PID 1 gets the children of dead programs; its own commands are waited for by their owners."""
    while True:
        await asyncio.sleep(0.5)
        _reap(except_for=agent.commands.pids())


def _reap(*, except_for: set[int]) -> None:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in except_for:
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
            if stat[stat.rindex(b")") + 2 :].split()[:2] == [b"Z", b"1"]:
                os.waitpid(int(entry.name), os.WNOHANG)
        except (OSError, ValueError):
            continue


def _fill_root(root: Path, workspace: Path, *, contained: bool) -> None:
    root.chmod(0o755)
    for name in ("workspace", "home/user", "root", "tmp", "etc", "proc", "dev", "var/log", "var/tmp", "run", "opt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    if not contained:
        (root / "workspace").unlink() if (root / "workspace").is_symlink() else (root / "workspace").rmdir()
        (root / "workspace").symlink_to(workspace)
        return
    texts = {
        "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
        "shadow": "root:*:1::::::\nuser:*:1::::::\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "sudoers": "root ALL=(ALL) NOPASSWD: ALL\nuser ALL=(ALL) NOPASSWD: ALL\n",
    }
    for name, text in texts.items():
        if not (root / "etc" / name).exists():
            (root / "etc" / name).write_text(text)
    (root / "etc/sudoers").chmod(0o440)
    (root / "etc/shadow").chmod(0o600)
    if os.geteuid() == 0:
        try:
            os.chown(root / "home/user", 1000, 1000)
        except OSError:  # a user namespace with one user
            pass


def _enter_root(root: Path) -> None:
    """Make `root` this process's whole file system, and its namespaces' /proc."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount(str(root), str(root), flags=MS_BIND)
    for name in PROGRAM_FOLDERS:
        source = Path("/") / name
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir(exist_ok=True)
            _mount(str(source), str(root / name), flags=MS_BIND | MS_REC)
            _libc.mount(b"none", os.fsencode(root / name), None, MS_BIND | MS_REMOUNT | MS_RDONLY, None)
    for name in SHARED_ETC:
        source, target = Path("/etc") / name, root / "etc" / name
        if not source.exists():
            continue
        target.mkdir(exist_ok=True) if source.is_dir() else target.touch()
        _mount(str(source), str(target), flags=MS_BIND)
    _mount("/dev", str(root / "dev"), flags=MS_BIND | MS_REC)
    workspace = root.parent / "disk" / "workspace"
    _mount(str(workspace.resolve()), str(root / "workspace"), flags=MS_BIND)
    _mount("proc", str(root / "proc"), kind="proc")
    os.chroot(root)
    os.chdir("/")


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _hostname_setter(contained: bool):  # type: ignore[no-untyped-def]
    def set_hostname(name: str) -> None:
        if contained and name:
            socket.sethostname(name)

    return set_hostname


if __name__ == "__main__":
    main()
