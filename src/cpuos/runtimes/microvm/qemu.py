"""QEMU's `microvm` machine: with KVM, or emulated by TCG."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from cpuos.runtimes.microvm.launch import Launch, launch
from cpuos.runtimes.microvm.qmp import go_on, load_state, read_message, save_state, standing_still
from cpuos.runtimes.microvm.vmm import Drive, Machine, Memory

__all__ = ["Qemu", "ask"]

_TRANSLATED_MIB = 128
"""TCG's buffer for translated code."""
_OVERHEAD_MIB = 192
_MAX_ANSWER = 1 << 20
_LOAD_S = 40.0


class Qemu:
    name: ClassVar[str] = "qemu"
    saves_files: ClassVar[bool] = False

    def __init__(self, *, kvm: bool, program: Path = Path("/usr/bin/qemu-system-x86_64")) -> None:
        self.kvm = kvm
        self.program = program
        self._version: tuple[tuple[int, int, int], str] | None = None
        """What this very file said: to ask it takes as long as to start it."""

    def version(self) -> str:
        facts = self.program.stat()
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if self._version is None or self._version[0] != seen:
            self._version = (seen, self._ask_version())
        return self._version[1]

    def _ask_version(self) -> str:
        done = subprocess.run([self.program, "--version"], capture_output=True, text=True, timeout=20, check=False)
        found = re.search(r"version (\S+)", done.stdout)
        if done.returncode != 0 or found is None:
            raise OSError(f"{self.program} --version ended with {done.returncode}")
        return found[1]

    def overhead_mib(self) -> int:
        return _OVERHEAD_MIB if self.kvm else _OVERHEAD_MIB + _TRANSLATED_MIB

    def command(self, machine: Machine) -> list[str]:
        """What is not named here the guest does not get: no display, no serial line, no monitor, no bus but mmio."""
        console = "on" if machine.tells_console else "off"
        accelerator = "kvm" if self.kvm else f"tcg,tb-size={_TRANSLATED_MIB}"
        words = [
            *(str(self.program), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-machine", f"microvm,isa-serial={console},x-option-roms=off,pit=off,pic=off,rtc=on{_backend(machine)}"),
            *("-accel", accelerator, "-cpu", "host" if self.kvm else "max"),
            *("-smp", str(machine.cpu), "-m", str(machine.memory_mib)),
            *_memory(machine),
            *(_boot(machine, kvm=self.kvm) if machine.saved is None else ()),
            *(word for drive in machine.drives for word in _drive(drive)),
            *("-device", "virtio-rng-device"),
        ]
        if machine.tap is not None:
            words += ["-netdev", f"tap,id=net,fd={machine.tap},vhost=off"]
            words += ["-device", f"virtio-net-device,netdev=net,mac={machine.guest_mac}"]
        if machine.control is not None:
            words += ["-chardev", f"socket,id=control,fd={machine.control},server=on,wait=off"]
            words += ["-mon", "chardev=control,mode=control"]
        if machine.saved is not None:
            words += ["-incoming", "defer"]
        words += ["-serial", "stdio" if machine.tells_console else "none", "-monitor", "none"]
        return [*words, "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]

    def launch(self, plan: Launch, machine: Machine, *, control: Path | None = None) -> tuple[int, int]:
        plan = replace(plan, command=self.command(machine))
        if control is None:
            return launch(plan)
        with _listen(control) as listening:
            return launch(plan, control=listening)

    async def boot(self, control: Path, machine: Machine) -> None:
        """It has all of it from its command line, but for what was saved."""
        if machine.saved is not None:
            await asyncio.to_thread(
                load_state, control, machine.saved, memory=machine.memory is Memory.SHARED, timeout_s=_LOAD_S
            )

    def identity(self, machine: Machine) -> str:
        # What the kernel was told, and how its memory is held, is no part of what the guest's devices are.
        plain = replace(machine, arguments="", memory=Memory.SHARED, saved=None)
        words = self.command(plain)
        words[words.index("-append") + 1] = ""
        digest = hashlib.sha256("\0".join(words).encode()).hexdigest()
        return f"{self.name} {self.version()} {'kvm' if self.kvm else 'tcg'} {digest[:12]}"

    def save(
        self, control: Path, target: int, *, memory: bool, also: Callable[[], None], limit_bytes: int, timeout_s: float
    ) -> None:
        with standing_still(control, timeout_s=timeout_s) as qmp:
            save_state(qmp, target, memory=memory, limit_bytes=limit_bytes)
            also()

    def go_on(self, control: Path, *, timeout_s: float) -> None:
        go_on(control, timeout_s=timeout_s)

    async def ask_state(self, control: Path, *, timeout_s: float) -> str:
        answer = await ask(control, "query-status", timeout_s=timeout_s)
        return str(answer.get("status", ""))[:40] if isinstance(answer, dict) else "it says nothing of its state"


def _listen(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(4)
    except OSError:
        made.close()
        raise
    return made


def _backend(machine: Machine) -> str:
    return "" if machine.memory is Memory.OWN else ",memory-backend=ram"


def _memory(machine: Machine) -> list[str]:
    """Whatever the path is, its open is answered from outside of the jail."""
    if machine.memory is Memory.OWN:
        return []
    share = "on" if machine.memory is Memory.SHARED else "off"
    return ["-object", f"memory-backend-file,id=ram,mem-path=/ram,size={machine.memory_mib}M,share={share}"]


def _drive(drive: Drive) -> list[str]:
    read_only = "off" if drive.writable else "on"
    file = f"driver=file,filename=/dev/fdset/{drive.descriptor},locking=off,discard=unmap"
    return [
        *("-add-fd", f"fd={drive.descriptor},set={drive.descriptor}"),  # known as /dev/fdset/N from here on
        *("-blockdev", f"{file},node-name={drive.name}-file,read-only={read_only}"),
        # Raw by name: a guest that writes another format's header into its disk gets nothing by it.
        *("-blockdev", f"driver=raw,file={drive.name}-file,node-name={drive.name},read-only={read_only},discard=unmap"),
        *("-device", f"virtio-blk-device,drive={drive.name},serial={drive.name}"),
    ]


def _boot(machine: Machine, *, kvm: bool) -> list[str]:
    """One that goes on has all of this in its memory, and would only read it."""
    arguments = f"{_kernel_arguments(machine, kvm=kvm)} {machine.arguments}"
    return ["-kernel", machine.kernel, "-initrd", machine.initrd, "-append", arguments]


def _kernel_arguments(machine: Machine, *, kvm: bool) -> str:
    words = ["panic=-1", "reboot=t", "random.trust_cpu=on", "cryptomgr.notests", "ipv6.autoconf=0"]
    # What nobody asks of this kernel, and each call and switch of tasks would pay for.
    words += ["lsm=landlock,yama", "audit=0", "psi=0"]
    words.append("console=ttyS0" if machine.tells_console else "quiet 8250.nr_uarts=0")
    if not kvm:
        # On a busy host the guest's calibration fails, and it hangs: the host knows the rate.
        words.append(f"tsc=reliable tsc_early_khz={_host_khz()} no_timer_check")
        # An emulated processor speculates nothing: what the guest's kernel does against that is only slow.
        words.append("mitigations=off")
    return " ".join(words)


def _host_khz() -> int:
    """Of the time stamp counter, which the guest sees as it is: on x86 the kernel's bogomips are twice its rate. The
    clock of the processor itself changes."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("bogomips"):
            return int(float(line.split(":")[1]) * 500)
    return 2_000_000


async def ask(control: Path, command: str, *, timeout_s: float) -> Any:
    """One command over QMP, by a connection of its own."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_unix_connection(control, limit=_MAX_ANSWER)
        try:
            await _answer(reader, "QMP")
            for word in ("qmp_capabilities", command):
                writer.write(json.dumps({"execute": word}).encode() + b"\n")
                answer = await _answer(reader, "return")
            return answer
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader, key: str) -> Any:
    """The next answer; events come in between."""
    while True:
        try:
            line = await reader.readline()
        except ValueError as problem:
            raise OSError("it answered without an end") from problem
        if not line:
            raise OSError("it closed the connection")
        if key in (message := read_message(line, key)):
            return message[key]
