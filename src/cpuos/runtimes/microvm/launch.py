"""How a VMM is started: what it is handed, who it is, and the program that puts it into its jail."""

from __future__ import annotations

import base64
import hashlib
import marshal
import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.microvm import jail
from cpuos.runtimes.microvm.memory import answer_open

__all__ = ["CONTROL", "Launch", "drive_numbers", "guest_arguments", "guest_memory_mib", "launch", "spawn", "user_for"]

CONTROL = "control"
_FIRST = 100
"""Numbers of descriptors that are handed over; none below is in use in a program that was just started."""
_ASK = 99
_OPEN_S = 30.0
# Above what is given to people, services, containers and their users (systemd.io/UIDS-GIDS), below the sign bit.
_FIRST_USER, _USERS = 0x7000_0000, 0x0F00_0000
# Of a distribution's kernel: its code and data, and 64 bytes for each page of 4096.
_KERNEL_MIB, _PAGES_SHARE = 36, 64
_LIMITS = {"CORE": 0, "NOFILE": 4096, "MEMLOCK": 0}
_ENVIRONMENT = {"PATH": "/usr/bin", "LANG": "C.UTF-8"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    name: str
    """Of the machine, unique on this host: letters and digits."""
    root: Path
    """An empty folder for its root, in a folder of the machine's own."""
    boot: Path
    """What it boots from, seen by it as /boot."""
    uid: int
    command: list[str] = field(default_factory=list)
    groups: tuple[Path, ...] = ()
    files: Mapping[int, tuple[Path, bool]] = field(default_factory=dict)
    """Number to a file and whether it may write."""
    tap: tuple[int, Path, str] | None = None
    """Number, network namespace, name of the device."""
    control: int | None = None
    kvm: bool = False
    memory: int | None = None
    """An open file, which it gets for the one path that it opens for writing."""
    saves: Path | None = None
    """A folder on the data volume, for a VMM that saves by itself."""


def drive_numbers(count: int) -> range:
    return range(_FIRST, _FIRST + count)


def guest_arguments(spec: SandboxSpec) -> str:
    """Those words of the kernel's command line that are the first process's: environment, then arguments."""
    key = base64.b64encode(spec.node_public_key).decode()
    # The agent's parts are short: to break into one by a signal is only work, and much where it is emulated.
    go = "GOMAXPROCS=1 GODEBUG=asyncpreemptoff=1"
    environment = f"CPUOS_SANDBOX={spec.id} CPUOS_HOSTNAME={spec.hostname} {go}"
    return f"{environment} -- --node-key {key} --tasks {spec.max_processes} --memory {spec.memory_mib}"


def guest_memory_mib(memory_mib: int) -> int:
    """What a machine gets, for its programs to see that much: its kernel takes a part before it counts."""
    return memory_mib + _KERNEL_MIB + memory_mib // _PAGES_SHARE


def user_for(sandbox_id: str, *, taken: Collection[int]) -> int:
    """A user of its own, that nobody else is: two machines share none, nor do those of two instances but by chance."""
    number = int.from_bytes(hashlib.sha256(sandbox_id.encode()).digest()[:4], "big") % _USERS
    while _FIRST_USER + number in taken:
        number = (number + 1) % _USERS
    return _FIRST_USER + number


def launch(plan: Launch, *, control: socket.socket | None = None) -> tuple[int, int]:
    """Start it: its process number, and a descriptor of what it says. Raises OSError."""
    handed = {}
    if control is not None and plan.control is not None:
        handed[plan.control] = control.fileno()
    if plan.memory is None:
        return spawn(jail.__file__, _told(plan), handed=handed)
    asked, ask = socket.socketpair()
    with asked:
        with ask:
            pid, said = spawn(jail.__file__, _told(plan), handed={**handed, _ASK: ask.fileno()})
        try:
            answer_open(asked, plan.memory, limit_s=_OPEN_S)
        except OSError:  # it does not come up, and what it says tells why
            os.kill(pid, signal.SIGKILL)
    return pid, said


def spawn(program: str, plan: Mapping[str, object], *, handed: Mapping[int, int] | None = None) -> tuple[int, int]:
    """Start a program of this package that becomes a VMM, with its plan on stdin: its process number, and a descriptor
    of what it says. `handed`: its number for a descriptor of ours. Raises OSError."""
    read, write = os.pipe2(os.O_CLOEXEC)
    stdin_read, stdin_write = os.pipe2(os.O_CLOEXEC)
    numbers = {**(handed or {}), 0: stdin_read, 1: write, 2: write}
    actions = [(os.POSIX_SPAWN_DUP2, ours, its) for its, ours in numbers.items()]
    argv = [sys.executable, "-I", "-S", program]
    try:
        pid = os.posix_spawn(argv[0], argv, _ENVIRONMENT, file_actions=actions, setsid=True)
    except BaseException:
        os.close(read)
        os.close(stdin_write)
        raise
    finally:
        os.close(write)
        os.close(stdin_read)
    try:
        with os.fdopen(stdin_write, "wb") as stdin:
            stdin.write(marshal.dumps(plan))  # for the same interpreter, which reads JSON 10 ms later
    except BrokenPipeError:
        pass  # it ended; what it said tells why
    return pid, read


def _told(plan: Launch) -> dict[str, object]:
    return {
        "argv": plan.command,
        "environment": _ENVIRONMENT,
        "root": str(plan.root),
        "boot": str(plan.boot),
        "uid": plan.uid,
        "groups": [str(group) for group in plan.groups],
        "files": {number: [str(path), writable] for number, (path, writable) in plan.files.items()},
        "tap": None if plan.tap is None else [plan.tap[0], str(plan.tap[1]), plan.tap[2]],
        "keep": [] if plan.control is None else [plan.control],
        "ask": None if plan.memory is None else _ASK,
        "limits": _LIMITS,
        "kvm": plan.kvm,
    }
