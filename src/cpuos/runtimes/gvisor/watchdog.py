"""Keeps a sandbox below its memory limit by killing its biggest process, before the host kills all of it.

gVisor has no OOM killer of its own: at the limit of the host's control group the host kills the sentry, and with it
everything, or what stands for one process of the guest. So the group's memory is looked at often, and from 80 % on
the largest guest process is killed. Where the host was faster, and the sandbox lives, that is told too.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from cpuos.errors import PlatformError
from cpuos.runtimes.gvisor.urpc import ControlSocket, UrpcFailure
from cpuos.runtimes.limits import ControlGroups, MemoryGauge

__all__ = ["MemoryWatchdog", "OomKill", "VictimWorker"]

_THRESHOLD = 0.8
# Without an answer the whole sandbox goes after so many tries, or at once when so much of its limit is used.
_TRIES, _LAST_RESORT = 3, 0.95
_POLL_S = 0.02
_SLOW_POLL_S = 0.2
"""Well below what the gateway waits for the word that explains a SIGKILL."""
# No guest was seen to fill memory faster; what is left below the threshold lasts at least this long.
_FILL_BYTES_PER_S = 4 << 30
_CHOICE_S = 2.0
_MAX_ANSWER = 1024
# How long a killed process may take to give its memory back before the next is chosen.
_RELIEF_S = 0.5

log = structlog.get_logger("cpuos.node")


@dataclass(frozen=True, kw_only=True)
class OomKill:
    """One guest process that was killed for memory."""

    sandbox_id: str
    pids: tuple[int, ...]
    """Numbers in the sandbox: the process, then its ancestors. Empty when the host's kernel was faster: what it chose
    has no number there; and for a whole sandbox."""
    whole: bool = False
    """The whole sandbox had to go."""
    at: float
    """Unix time."""


class VictimWorker:
    """The unprivileged worker process, started when first needed and again when it is gone."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._questions: socket.socket | None = None
        # One start at a time.
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Running already is fine."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self.close()
                await self._start()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-m", "cpuos.runtimes.gvisor.victim", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                env={},
            )
        except OSError as problem:
            ours.close()
            raise PlatformError("cannot start the memory watchdog's worker", str(problem)) from problem
        finally:
            theirs.close()
        ours.setblocking(False)
        self._questions = ours

    async def choose(self, control: socket.socket) -> tuple[int, ...] | None:
        """The guest process to kill behind this control socket and its ancestors: empty when there is none to kill,
        None without a valid answer."""
        with control:
            await self.start()
            assert self._questions is not None
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                with theirs:
                    try:
                        socket.send_fds(self._questions, [b"?"], [control.fileno(), theirs.fileno()])
                    except OSError:
                        return None
                try:
                    async with asyncio.timeout(_CHOICE_S):
                        text = await asyncio.get_running_loop().sock_recv(ours, _MAX_ANSWER)
                except (OSError, TimeoutError):
                    return None
        if text == b"nobody":
            return ()
        numbers = text.split()
        return tuple(map(int, numbers)) if numbers and all(map(bytes.isdigit, numbers)) else None

    async def close(self) -> None:
        if self._questions is not None:
            self._questions.close()
            self._questions = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@dataclass(kw_only=True)
class _Watched:
    sandbox_id: str
    gauge: MemoryGauge
    limit_bytes: int
    control: ControlSocket
    host_kills: int
    """Those that are told."""
    due: float = 0.0
    """The loop's time at which it may have come to the threshold."""
    kills_due: float = 0.0
    """When to ask whether the host has killed: it is told even if nobody saw the memory go up and down."""
    relief: asyncio.Task[None] | None = None
    """It is above the threshold, and is being brought below."""

    @property
    def threshold(self) -> int:
        return int(self.limit_bytes * _THRESHOLD)


class MemoryWatchdog:
    """One task looks at all that are watched: a task for each would cost many times the look itself."""

    def __init__(self, groups: ControlGroups, *, worker: VictimWorker, on_kill: Callable[[OomKill], None]) -> None:
        self._groups = groups
        self._worker = worker
        self._on_kill = on_kill
        self._watched: dict[str, _Watched] = {}
        self._looking: asyncio.Task[None] | None = None

    def watch(self, sandbox_id: str, *, limit_bytes: int, control: ControlSocket) -> None:
        gauge = self._groups.gauge(sandbox_id)
        self._watched[sandbox_id] = _Watched(
            sandbox_id=sandbox_id,
            gauge=gauge,
            limit_bytes=limit_bytes,
            control=control,
            host_kills=gauge.host_kills(),
        )
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_ever(), name="cpuos-memory-watchdog")

    async def unwatch(self, sandbox_id: str) -> None:
        """Not watched is fine."""
        watched = self._watched.get(sandbox_id)
        if watched is None:
            return
        self._leave(watched)
        if watched.relief is not None:
            watched.relief.cancel()
            await asyncio.wait([watched.relief])

    async def close(self) -> None:
        for sandbox_id in list(self._watched):
            await self.unwatch(sandbox_id)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            now = loop.time()
            for watched in [one for one in self._watched.values() if one.relief is None and one.due < now + _POLL_S]:
                self._look(watched, now=now)
            await asyncio.sleep(_POLL_S)

    def _look(self, watched: _Watched, *, now: float) -> None:
        try:
            used = watched.gauge.read(above=watched.threshold)
            if now >= watched.kills_due:
                watched.kills_due = now + _SLOW_POLL_S
                self._tell_host_kills(watched)
        except OSError:
            self._leave(watched)  # the group went with its sandbox
        except Exception:
            log.exception("memory watchdog failed", sandbox=watched.sandbox_id)
            self._leave(watched)
        else:
            if used > watched.threshold:
                watched.relief = asyncio.create_task(self._bring_below(watched))
            else:
                watched.due = now + min(_SLOW_POLL_S, (watched.threshold - used) / _FILL_BYTES_PER_S)

    def _tell_host_kills(self, watched: _Watched) -> bool:
        """Whether there was one that was not told yet."""
        killed = watched.gauge.host_kills()
        if killed <= watched.host_kills:
            return False
        watched.host_kills = killed
        log.warning("guest process killed by the host's kernel: out of memory", sandbox=watched.sandbox_id)
        self._on_kill(OomKill(sandbox_id=watched.sandbox_id, pids=(), at=time.time()))
        return True

    def _leave(self, watched: _Watched) -> None:
        if self._watched.get(watched.sandbox_id) is watched:
            del self._watched[watched.sandbox_id]
            watched.gauge.close()

    async def _bring_below(self, watched: _Watched) -> None:
        unanswered = 0
        try:
            while watched.gauge.read(above=watched.threshold) > watched.threshold:
                unanswered = 0 if await self._relieve(watched) else unanswered + 1
                full = watched.limit_bytes * _LAST_RESORT
                if unanswered >= _TRIES or (unanswered and watched.gauge.read() > full):
                    await self._kill_all(watched.sandbox_id)
                    self._leave(watched)
                    return
                await asyncio.sleep(_POLL_S)
            watched.relief, watched.due = None, 0.0
        except OSError:
            self._leave(watched)
        except Exception:
            log.exception("memory watchdog failed", sandbox=watched.sandbox_id)
            self._leave(watched)

    async def _relieve(self, watched: _Watched) -> bool:
        """Kill the biggest process and wait for its memory; False when the sandbox gave no valid answer."""
        sandbox_id, gauge = watched.sandbox_id, watched.gauge
        try:
            line = await self._worker.choose(watched.control.connect())
            if line is None:
                return False
            if self._tell_host_kills(watched) or gauge.read(above=watched.threshold) <= watched.threshold:
                return True  # what had the memory is gone, and what was chosen now is another
            if not line:
                return True  # the memory is not a process's; the host's limit is what is left
            self._on_kill(OomKill(sandbox_id=sandbox_id, pids=line, at=time.time()))
            await watched.control.kill(line[0])
        except UrpcFailure as problem:
            log.warning("no answer under memory pressure", sandbox=sandbox_id, why=problem.why)
            return False
        log.warning("guest process killed: out of memory", sandbox=sandbox_id, pid=line[0])
        deadline = time.monotonic() + _RELIEF_S
        while gauge.read(above=watched.threshold) > watched.threshold and time.monotonic() < deadline:  # noqa: ASYNC110 (a file)
            await asyncio.sleep(_POLL_S)
        return True

    async def _kill_all(self, sandbox_id: str) -> None:
        """Better than the host's kernel, which would choose among the sentry's processes and may leave a torso."""
        log.warning("sandbox killed: it is out of memory and does not answer", sandbox=sandbox_id)
        self._on_kill(OomKill(sandbox_id=sandbox_id, pids=(), whole=True, at=time.time()))
        await asyncio.to_thread(self._groups.kill, sandbox_id)
