"""Output rings and process trees of the fake agent's commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["RING_BYTES", "Ring", "find_tree", "listeners", "readable"]

RING_BYTES = 1 << 20


class Ring:
    """Output that the host has not acknowledged; no more is read from the program while it is full."""

    def __init__(self) -> None:
        self.start = 0
        self.data = bytearray()
        self.acknowledged = asyncio.Event()

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    @property
    def full(self) -> bool:
        return len(self.data) >= RING_BYTES

    def drop_until(self, offset: int) -> None:
        count = max(0, min(offset, self.end) - self.start)
        del self.data[:count]
        self.start += count
        self.acknowledged.set()


async def readable(descriptor: int) -> None:
    """Return when there is something to read: output, a process's end for a pidfd."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def listeners(pids: Iterable[int]) -> list[dict[str, Any]]:
    """Ports on which these processes wait for connections by IPv4; others of the host's network are not theirs."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(entry.path))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            packed = bytes.fromhex(address)[::-1]
            found.append({"port": int(port, 16), "address": ".".join(map(str, packed))})
    return found


def find_tree(root_pid: int, command_id: str) -> list[int]:
    """Live processes of a command: descendants, its session, and those that carry its mark."""
    mark = f"CPUOS_COMMAND={command_id}".encode()
    parents, sessions, found = {}, {}, set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
            fields = stat[stat.rindex(b")") + 2 :].split()
            if fields[0] in (b"Z", b"X"):
                continue
            pid = int(entry.name)
            parents[pid], sessions[pid] = int(fields[1]), int(fields[3])
            if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.add(pid)
        except (OSError, ValueError):
            continue
    found |= {pid for pid, session in sessions.items() if session == root_pid}
    if root_pid in parents:
        found.add(root_pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})
