"""Firecracker in the jail of its own jailer, and told by its API what machine it is.

    run_dir/ID/root/     where the jail is mounted, in its own mount namespace alone
    run_dir/ID/door/     the jail's /run while the VMM starts: its socket appears there
    run_dir/ID/control   that socket again, which the VMM can neither move nor replace
    run_dir/ID/log  metrics    pipes that it writes to

All of it is made before the VMM starts. Once its guest runs nothing is opened by a name that the VMM could have made:
the socket has a second name by then, and the folder of the first is root's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from cpuos.runtimes.base import DeviceRates
from cpuos.runtimes.microvm.firecracker_api import call
from cpuos.runtimes.microvm.firecracker_calls import (
    MEMORY_FILE,
    STATE_FILE,
    boot_calls,
    describe_call,
    drive_path,
    load_call,
    report_calls,
    save_call,
    state_call,
    version_call,
)
from cpuos.runtimes.microvm.jailer import Bind, jail_plan, start_jailer
from cpuos.runtimes.microvm.launch import Launch
from cpuos.runtimes.microvm.reports import PIPES, make_pipes
from cpuos.runtimes.microvm.saved import MEMORY, STATE
from cpuos.runtimes.microvm.vmm import Machine

__all__ = ["DOOR", "Firecracker", "check_version"]

DOOR = "door"
_SOCKET = "firecracker.socket"
_MINIMUM = {(1, 14): (1, 14, 4), (1, 15): (1, 15, 1)}
"""Before them a guest's root could write out of bounds in the VMM (CVE-2026-5747), and before 1.14.1 the jailer
followed links that another user made (CVE-2026-1386). Lines that are newer are taken, older ones are not."""
_OVERHEAD_MIB = 96
"""Its own memory, the page tables of its guest's, and the root of its jail with the copy of the program."""
_SOCKET_S, _CALL_S, _POLL_S = 10.0, 20.0, 0.002
_SLACK = 64 << 20


class Firecracker:
    name: ClassVar[str] = "firecracker"
    saves_files: ClassVar[bool] = True
    kvm = True

    def __init__(self, *, program: Path, jailer: Path, rates: DeviceRates | None = None) -> None:
        self.program = program
        self._jailer = jailer
        self._rates = rates or DeviceRates()

    def version(self) -> str:
        """Of both programs, which are of one release that is new enough. Raises OSError."""
        own, jailers = _version_of(self.program), _version_of(self._jailer)
        if own != jailers:
            raise OSError(f"{self.program} is of version {own} and {self._jailer} of {jailers}")
        check_version(own)
        return own

    def overhead_mib(self) -> int:
        return _OVERHEAD_MIB

    def command(self, machine: Machine) -> list[str]:
        calls = [f"{one} {json.dumps(one.body)}" for one in boot_calls(machine, rates=self._rates)]
        return [str(self.program), str(self._jailer), *calls]

    def launch(self, plan: Launch, machine: Machine, *, control: Path | None = None) -> tuple[int, int]:
        binds = [*_make_own(plan), *_saved_files(plan, machine)]
        largest = machine.memory_mib << 20
        for drive in machine.drives:
            path, writable = plan.files[drive.descriptor]
            if writable:
                # The VMM opens it by its name in the jail; outside only root gets as far as the file.
                os.chown(path, plan.uid, plan.uid, follow_symlinks=False)
                largest = max(largest, path.stat().st_size)
            binds.append((path, drive_path(drive.name)[1:], writable))
        told = jail_plan(
            plan,
            jailer=self._jailer,
            program=self.program,
            binds=binds,
            largest_file=largest + _SLACK,
            # The default seccomp filter is on as long as nothing is said of it.
            arguments=["--api-sock", f"/run/{_SOCKET}"],
        )
        return start_jailer(told)

    def identity(self, machine: Machine) -> str:
        # What the kernel was told is no part of what the guest's devices are.
        words = "\0".join(self.command(replace(machine, arguments="", saved=None))[2:])
        return f"{self.name} {self.version()} kvm {hashlib.sha256(words.encode()).hexdigest()[:12]}"

    async def boot(self, control: Path, machine: Machine) -> None:
        check_version(await _enter(control))
        # A probe reads what it says from its stdout, with what its guest says.
        calls = [] if machine.tells_console else report_calls()
        if machine.saved is None:
            calls += boot_calls(machine, rates=self._rates)
        else:
            calls += [load_call(), state_call(paused=False)]
        for one in calls:
            await call(control, one, timeout_s=_CALL_S)

    def save(
        self, control: Path, target: int, *, memory: bool, also: Callable[[], None], limit_bytes: int, timeout_s: float
    ) -> None:
        asyncio.run(_save(control, also=also, timeout_s=timeout_s))

    def go_on(self, control: Path, *, timeout_s: float) -> None:
        asyncio.run(call(control, state_call(paused=False), timeout_s=timeout_s))

    async def ask_state(self, control: Path, *, timeout_s: float) -> str:
        answer = await call(control, describe_call(), timeout_s=timeout_s)
        return str(answer.get("state", "it says nothing of its state"))[:40].lower()


def check_version(version: str) -> None:
    """Raises OSError where it is none, or older than what is known to hold."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version)
    if found is None:
        raise OSError(f"Firecracker tells no version: {version[:40]!r}")
    major, minor, patch = map(int, found.groups())
    if (major, minor, patch) < _MINIMUM.get((major, minor), max(_MINIMUM.values())):
        wanted = " or ".join(".".join(map(str, each)) for each in _MINIMUM.values())
        raise OSError(f"Firecracker {found[0]} has known holes: it has to be {wanted}, or newer")


def _make_own(plan: Launch) -> list[Bind]:
    """The folder of its socket, and its pipes."""
    own = plan.root.parent
    (own / DOOR).mkdir(mode=0o700)
    os.chown(own / DOOR, plan.uid, plan.uid)
    make_pipes(own, uid=plan.uid)
    return [(plan.boot, "boot", False), (own / DOOR, "run", True), *((own / name, name, True) for name in PIPES)]


def _saved_files(plan: Launch, machine: Machine) -> list[Bind]:
    """Two empty files that it may save to, in a folder that is not its own; and those of the image that it goes on
    from. These are others: what it maps is never written to."""
    found: list[Bind] = []
    if plan.saves is not None:
        plan.saves.mkdir(mode=0o700, exist_ok=True)
        for name, inside in ((STATE, STATE_FILE), (MEMORY, MEMORY_FILE)):
            path = plan.saves / name
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            os.chown(path, plan.uid, plan.uid, follow_symlinks=False)
            found.append((path, f"snapshot/{inside}", True))
    if machine.saved is not None:
        for path, inside in ((machine.saved, STATE_FILE), (machine.saved.parent / MEMORY, MEMORY_FILE)):
            path.chmod(0o444)  # clones of it are other users; outside only root gets as far as the file
            found.append((path, f"image/{inside}", False))
    return found


async def _save(control: Path, *, also: Callable[[], None], timeout_s: float) -> None:
    await call(control, state_call(paused=True), timeout_s=timeout_s)
    try:
        await call(control, save_call(), timeout_s=timeout_s)
        await asyncio.to_thread(also)
    finally:
        await call(control, state_call(paused=False), timeout_s=timeout_s)


async def _enter(control: Path) -> str:
    """The version that it answers. Its socket gets a name that is the node's, and the folder is taken away from it."""
    door = control.parent / DOOR
    try:
        async with asyncio.timeout(_SOCKET_S):
            while True:
                if _is_linked(door / _SOCKET, control):
                    _take_over(door)
                    try:
                        answer = await call(control, version_call(), timeout_s=_CALL_S)
                        return str(answer.get("firecracker_version", "none"))
                    except ConnectionRefusedError:
                        pass  # it has a name and does not listen yet
                await asyncio.sleep(_POLL_S)
    except TimeoutError as problem:
        raise OSError(f"its socket did not answer within {_SOCKET_S:g} s") from problem


def _is_linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except FileExistsError:
        return True
    return True


def _take_over(folder: Path) -> None:
    os.chown(folder, 0, 0)
    folder.chmod(0o711)


def _version_of(program: Path) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired as problem:
        raise OSError(f"{program} --version does not end") from problem
    found = re.search(rb"v(\d{1,4}\.\d{1,4}\.\d{1,4})\b", done.stdout[:4096])
    if done.returncode != 0 or found is None:
        raise OSError(f"{program} --version tells no version")
    return found[1].decode()
