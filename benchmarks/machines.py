"""MicroVMs, apart from the others since each cold boot takes seconds where it is emulated.

`python -m benchmarks.machines [ROUNDS]`: restore against cold boot, in turns, and the pages of its own that an idle
copy has against those of an idle cold one.
`python -m benchmarks.machines boots [ROUNDS]`: from the VMM's start to the agent's first answer, against the same
kernel with a first program that ends at once.

Each in seconds of the clock and of the processor: on a busy machine only the latter says something.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuos import Sandbox
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm.launch import Launch, guest_memory_mib, user_for
from cpuos.runtimes.microvm.memory import HELD_AS
from cpuos.runtimes.microvm.qemu import Qemu
from cpuos.runtimes.microvm.vmm import Machine
from cpuos.settings import load_settings
from cpuos.setup import initrd
from cpuos.testing.instance import Instance

__all__ = ["boots", "main"]

_SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "256MiB", "timeout": "30m"}
_IDLE_S = 3.0
_TIMES = ("wall_s", "cpu_s")


# reboot(LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_RESTART) of x86_64, and no more.
_REBOOT = bytes.fromhex("b8a9000000bfaddee1febe69191228ba674523010f05ebfe")
_LOADED_AT, _HEADERS = 0x400000, 120


def main(rounds: int) -> dict[str, Any]:
    """Medians, and their ratios."""
    cold, warm, shares = [], [], []
    with Instance(runtime="microvm", max_sandboxes=4, allow_emulated=True) as instance:
        client = instance.client()
        with Sandbox.create(client=client, **_SHAPE) as origin:
            origin.exec(["true"], check=True)
            snapshot = origin.snapshot()
        for _ in range(rounds):
            *times, of_cold = _turn(instance, client=client, **_SHAPE)
            cold.append(times)
            *times, of_copy = _turn(instance, client=client, snapshot=snapshot)
            warm.append(times)
            shares.append(of_copy / of_cold)
        snapshot.delete()
    told = {"cold": _medians(cold), "restored": _medians(warm)}
    faster = {name: told["cold"][name] / told["restored"][name] for name in told["cold"]}
    return told | {"faster": faster, "own_memory": statistics.median(shares), "load": os.getloadavg()[0]}


def _turn(instance: Instance, **options: Any) -> tuple[float, float, int]:
    """From a create to its first command's end: seconds of the clock, seconds of all that works for it; and then the
    bytes that it has alone."""
    groups, parts = ControlGroups(instance.settings.instance_id), [os.getpid(), *instance.pids().values()]
    before, since = sum(map(_cpu_s, parts)), time.perf_counter()
    with Sandbox.create(**options) as sandbox:
        sandbox.exec(["true"], check=True)
        taken, spent = time.perf_counter() - since, sum(map(_cpu_s, parts)) - before
        spent += groups.cpu_seconds(sandbox.id)
        time.sleep(_IDLE_S)
        return taken, spent, _own_bytes(instance, sandbox.id)


def boots(rounds: int) -> dict[str, Any]:
    """`agent`: what the VMM has used when the agent has answered; `empty`: when its first program has ended it."""
    agent, empty = [], []
    with Instance(runtime="microvm", max_sandboxes=4, allow_emulated=True) as instance, _Empty() as bare:
        client, groups = instance.client(), ControlGroups(instance.settings.instance_id)
        for _ in range(rounds):
            since = time.perf_counter()
            with Sandbox.create(client=client, **_SHAPE) as booted:
                agent.append((time.perf_counter() - since, groups.cpu_seconds(booted.id)))
            empty.append(bare.boot())
    told = {"agent": _medians(agent), "empty": _medians(empty)}
    ratio = statistics.median(one[1] / other[1] for one, other in zip(agent, empty, strict=True))
    return told | {"ratio": ratio, "load": os.getloadavg()[0]}


class _Empty:
    """Boots the kernel of microVMs as they are booted, but for a first program of one call."""

    def __enter__(self) -> _Empty:
        self._folder = Path(tempfile.mkdtemp(prefix="cpuos-bench-"))
        image = load_settings().microvm_dir
        boot = self._folder / "boot"
        boot.mkdir()
        shutil.copy(image / "vmlinux", boot / "vmlinux")
        (boot / "initrd").write_bytes(initrd.pack([initrd.file("init", _program(_REBOOT), executable=True)]))
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self._folder)

    def boot(self) -> tuple[float, float]:
        machine = Machine(
            kernel="/boot/vmlinux",
            initrd="/boot/initrd",
            arguments="",
            cpu=1,
            memory_mib=guest_memory_mib(256),
        )
        root = self._folder / "root"
        root.mkdir()
        plan = Launch(
            name="empty", root=root, boot=self._folder / "boot", uid=user_for(self._folder.name, taken=()), kvm=False
        )
        since = time.perf_counter()
        process, said = Qemu(kvm=False).launch(plan, machine)
        _, status, used = os.wait4(process, 0)
        taken = time.perf_counter() - since
        words = os.read(said, 4096).decode(errors="replace")
        os.close(said)
        root.rmdir()
        if status != 0:
            raise RuntimeError(f"the empty machine ended with {status}: {words}")
        return taken, used.ru_utime + used.ru_stime


def _program(code: bytes) -> bytes:
    """A static one for x86_64 (ELF, one segment)."""
    size = _HEADERS + len(code)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, _LOADED_AT + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, _LOADED_AT, _LOADED_AT, size, size, 4096) + code


def _cpu_s(pid: int) -> float:
    """Of the threads that it has, and of its children that have ended (proc(5), fields 16 and 17 of stat)."""
    threads = [int((path / "schedstat").read_text().split()[0]) for path in Path(f"/proc/{pid}/task").iterdir()]
    text = Path(f"/proc/{pid}/stat").read_text()
    children = sum(map(int, text[text.rindex(")") + 2 :].split()[13:15]))
    return sum(threads) / 1e9 + children / os.sysconf("SC_CLK_TCK")


def _medians(values: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        name: round(statistics.median(part), 3) for name, part in zip(_TIMES, zip(*values, strict=True), strict=True)
    }


def _own_bytes(instance: Instance, sandbox_id: str) -> int:
    """What the mapping of its guest's memory holds that no other has."""
    record = json.loads((instance.settings.node_state_dir / "journal" / f"{sandbox_id}.json").read_text())
    process = record["process"]["pid"]
    inode = os.stat(f"/proc/{process}/fd/{HELD_AS}").st_ino
    found, inside = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = words[4] == str(inode) and words[3] != "00:00"
        elif inside and words[0] == "Private_Dirty:":
            found += int(words[1]) << 10
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    measure = boots if words[:1] == ["boots"] else main
    numbers = words[1:] if measure is boots else words
    print(json.dumps(measure(int(numbers[0]) if numbers else 3), indent=1))
