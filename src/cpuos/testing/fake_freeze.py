"""Freeze and thaw of the fake agent, as in api/guest.md, but for ports, time limits and what a copy forgets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuos.testing.fake_commands import FakeCommands
from cpuos.testing.fake_http import GuestError
from cpuos.testing.fake_process import find_tree, listeners

__all__ = ["FakeFreezer"]

FREEZE_S = 5.0
SERVED = {("GET", "/v1/hello"), ("POST", "/v1/freeze"), ("POST", "/v1/thaw")}


class FakeFreezer:
    """Stops the sandbox's processes where the agent is its first one, else those of its commands."""

    def __init__(self, commands: FakeCommands, *, cut: Callable[[], None]) -> None:
        self._commands = commands
        self._cut = cut
        """Ends every connection but the one that asks."""
        self.frozen: str | None = None
        self._told: dict[str, Any] = {}
        self._ours: set[int] = set()

    def check(self, method: str, path: str) -> None:
        """Raise for a call that a frozen sandbox does not serve."""
        if self.frozen is not None and (method, path) not in SERVED:
            raise GuestError("frozen", "the sandbox is frozen")

    async def freeze(self, freeze: str) -> dict[str, Any]:
        if len(freeze) != 32 or not set(freeze) <= set("0123456789abcdef"):
            raise GuestError("invalid", "freeze is 32 hex digits")
        if self.frozen is not None:
            if self.frozen != freeze:
                raise GuestError("frozen", "the sandbox is frozen")
            return self._told
        self.frozen, self._ours = freeze, set()
        self._cut()
        before = {pid for pid in self._processes() if _state(pid) in "Tt"}
        running = [facts["id"] for facts in self._commands.list() if facts["status"] == "running"]
        deadline = time.monotonic() + FREEZE_S
        while pids := {pid for pid in self._processes() if _state(pid) not in "TtZX"}:
            if time.monotonic() > deadline:
                self.go_on()
                raise GuestError("freeze_failed", f"{len(pids)} processes still run")
            for pid in sorted(pids):
                self._ours.add(pid)
                _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(0.001)
        self._ours |= {pid for pid in self._processes() if pid not in before}
        programs = [{"pid": pid, "name": name} for pid in sorted(self._ours) if (name := _name(pid))]
        self._told = {
            "processes": len(self._ours),
            "programs": programs,
            "listeners": listeners(self._processes()),
            "commands": running,
        }
        return self._told

    def missing(self, told: dict[str, Any]) -> list[str]:
        """What of it is not there any more."""
        present = listeners(self._processes())
        lost = [
            was for was in told.get("programs", []) if _state(was["pid"]) in "ZX" or _name(was["pid"]) != was["name"]
        ]
        gone = [f"process {was['pid']} ({was['name']})" for was in lost]
        pids = {was["pid"] for was in lost}
        # One that ended as all was stopped may be known as running: its process is none of these.
        known = {facts["id"] for facts in self._commands.list() if facts.get("pid") not in pids}
        gone += [f"command {one}" for one in told.get("commands", []) if one not in known]
        return gone + [
            f"listener on {was['address']}:{was['port']}" for was in told.get("listeners", []) if was not in present
        ]

    def thaw(self, freeze: str) -> dict[str, Any]:
        if self.frozen not in (None, freeze):
            raise GuestError("frozen", "the sandbox is frozen by another freeze")
        return {"continued": self.go_on()}

    def go_on(self) -> int:
        """Let go on what the freeze stopped; how many."""
        ours, self._ours, self.frozen = self._ours, set(), None
        for pid in sorted(ours, reverse=True):
            _signal(pid, signal.SIGCONT)
        return len(ours)

    def _processes(self) -> set[int]:
        if os.getpid() == 1:
            return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}
        commands = [facts for facts in self._commands.list() if facts["status"] == "running"]
        return {pid for facts in commands for pid in find_tree(facts["pid"], facts["id"])}


def _state(pid: int) -> str:
    """Its letter in /proc; X when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :][:1].decode()
    except (OSError, ValueError):
        return "X"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").removesuffix("\n")
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
