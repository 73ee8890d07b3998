"""Which limit a command met, and what can be done about it.

Facts come from outside: the node measures what is used up, when a command fails and when a program writes what programs
write at a limit. Where no fact can be had any more - files that are closed, threads that ended - the program's own
words are told as its own words.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Protocol

import structlog

from cpuos.errors import CpuosError, LimitReached
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.records import RecordedCommand
from cpuos.types.command import CommandStatus
from cpuos.types.limits import FullPlace, LimitFacts, LimitSource, ReachedLimit, SandboxLimit

__all__ = ["GuestLimitReader", "LimitReader", "ReachedLimits", "explain", "name_limit", "session_over"]

ASK_S = 0.5
"""An end is not held up longer than this by what the node may say."""
GUEST_ASK_S = 1.5
"""On top of it, where only the guest knows: one that is emulated, and was just at its limit, is slow."""
ASK_AGAIN_S = 0.5
LOOKED_AT = 4 << 10
"""The end of what is written: an error comes last."""
OPEN_FILES = 1 << 16
"""What the agent gives each program (guest/main.go)."""
_GIB = 1 << 30

# What programs write when the kernel refuses them: errno's own texts (strerror), and those of the usual runtimes.
_WORDS: dict[SandboxLimit, re.Pattern[bytes]] = {
    SandboxLimit.DISK: re.compile(rb"No space left on device|ENOSPC|\bErrno 28\b"),
    SandboxLimit.OPEN_FILES: re.compile(rb"Too many open files|\bEMFILE\b"),
    SandboxLimit.PROCESSES: re.compile(
        rb"\bfork\b[^\n]{0,80}Resource temporarily unavailable|[Cc]an(no|')t (start new thread|fork)"
        rb"|BlockingIOError: \[Errno 11\]|pthread_create[^\n]{0,80}(failed|Resource temporarily unavailable)"
        rb"|unable to create (native )?thread|spawn[^\n]{0,80}EAGAIN"
    ),
}
_WORTH_ASKING = (SandboxLimit.DISK, SandboxLimit.PROCESSES)
_HOLDS = {CommandStatus.TIMED_OUT, CommandStatus.KILLED, CommandStatus.SIGNALLED}

log = structlog.get_logger("gateway.reached")


class LimitReader(Protocol):
    """`cpuos.node.client.DialClient`, or a stand-in."""

    async def limits(self, sandbox_id: str, generation: int) -> LimitFacts: ...


class GuestLimitReader:
    """The node's word, and where only the guest's kernel knows, that of its agent: told as the guest's."""

    def __init__(self, reader: LimitReader, agent: AgentClient) -> None:
        self._reader = reader
        self._agent = agent

    async def limits(self, sandbox_id: str, generation: int) -> LimitFacts:
        async with asyncio.timeout(ASK_S):
            facts = await self._reader.limits(sandbox_id, generation)
        if not facts.guest_knows:
            return facts
        try:
            async with asyncio.timeout(GUEST_ASK_S):
                told = await self._agent.limits()
        except (CpuosError, TimeoutError) as problem:  # an agent of an earlier release, or one that is gone
            log.info("limits.unknown", sandbox=sandbox_id, why=str(problem) or "its agent did not say in time")
            return facts.model_copy(update={"tmp_bytes": 0})  # it may be a disk that is full
        values = {SandboxLimit.DISK: facts.disk_bytes, SandboxLimit.PROCESSES: facts.processes}
        full = []
        for place in told.full:
            limit = SandboxLimit(place.limit)
            value = values.get(limit, place.value)
            full.append(FullPlace(limit=limit, value=value, path=place.path, seen_by=LimitSource.GUEST))
        return facts.model_copy(update={"full": [*facts.full, *full]})


class ReachedLimits:
    """Of one command. What the node says stays: a second later there may be room again."""

    def __init__(self, recorded: RecordedCommand, reader: LimitReader | None) -> None:
        self._recorded = recorded
        self._reader = reader
        self._facts: LimitFacts | None = None
        """The last that the node said."""
        self._seen: list[FullPlace] = []
        """What was full as the program complained."""
        self._words: set[SandboxLimit] = set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")

    def took_output(self, piece: memoryview | bytes) -> None:
        """Of stderr, or of a terminal: where it speaks of a limit, ask at once whether it is one of the sandbox's."""
        text = bytes(piece[-LOOKED_AT:])
        found = {limit for limit, words in _WORDS.items() if words.search(text)}
        if not found:
            return
        self._words |= found
        now = asyncio.get_running_loop().time()
        idle = self._asking is None or self._asking.done()
        if self._reader is not None and idle and now - self._asked_at >= ASK_AGAIN_S and found & set(_WORTH_ASKING):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())

    @property
    def worth_a_look(self) -> bool:
        """Also of a command that succeeded."""
        return bool(self._words)

    async def look(self, *, ask: bool) -> None:
        """Before the end is told: let the node say what is used up. `ask`: also where it was not asked yet."""
        if self._reader is None or not (ask or self._words):
            return
        try:
            async with asyncio.timeout(ASK_S + GUEST_ASK_S):
                if self._asking is not None:
                    await asyncio.shield(self._asking)
                if ask and self._facts is None:
                    await self._ask()
        except TimeoutError:
            log.info("limits.unknown", command=self._recorded.id, why="the node did not say in time")

    def told(
        self, status: CommandStatus, *, exit_code: int | None, out_of_memory: bool, met: str | None = None
    ) -> ReachedLimit | None:
        """The limit that says most about this end; None when it met none, as far as can be known. `met`: by the count
        of the guest's own kernel."""
        facts = self._facts
        if out_of_memory:
            value = facts.memory_bytes if facts is not None else None
            source = LimitSource.GUEST if met == SandboxLimit.MEMORY else LimitSource.HOST
            return _reached(SandboxLimit.MEMORY, value, source=source)
        if self._seen:
            first = self._seen[0]
            return _reached(first.limit, first.value, path=first.path, source=first.seen_by)
        if met == SandboxLimit.PROCESSES:
            value = facts.processes if facts is not None else None
            return _reached(SandboxLimit.PROCESSES, value, source=LimitSource.GUEST)
        failed = status in _HOLDS or (status is CommandStatus.EXITED and exit_code != 0)
        if failed and facts is not None and facts.full:
            first = facts.full[0]
            return _reached(first.limit, first.value, path=first.path, source=first.seen_by, coincides=True)
        if failed and self._words:
            return self._by_words(facts)
        if status is CommandStatus.TIMED_OUT:
            return _reached(SandboxLimit.TIMEOUT, self._recorded.record.timeout_s)
        if (dropped := sum(stream.dropped for stream in self._recorded.streams.values())) and status.ended:
            return _reached(SandboxLimit.OUTPUT, None, dropped=dropped)
        return None

    def _by_words(self, facts: LimitFacts | None) -> ReachedLimit:
        limit = min(self._words, key=list(_WORDS).index)
        value: float | None = None
        if limit is SandboxLimit.OPEN_FILES:
            value = OPEN_FILES
        elif limit is SandboxLimit.PROCESSES and facts is not None:
            value = facts.processes
        elif limit is SandboxLimit.DISK and facts is not None and facts.tmp_bytes:
            limit, value = SandboxLimit.TMP, facts.tmp_bytes  # neither file system on disk was full
        return _reached(limit, value, source=LimitSource.OUTPUT)

    async def _ask(self) -> None:
        assert self._reader is not None
        command = self._recorded.record.command
        try:
            self._facts = await self._reader.limits(command.sandbox, command.generation)
        except (CpuosError, TimeoutError) as problem:
            log.info("limits.unknown", command=command.id, why=str(problem) or "the node did not say in time")
            return
        if self._words:
            spoken = {SandboxLimit.INODES, *self._words} if SandboxLimit.DISK in self._words else self._words
            self._seen = [place for place in self._facts.full if place.limit in spoken] or self._seen


async def name_limit(error: LimitReached, reader: LimitReader | None, *, sandbox: str, generation: int) -> LimitReached:
    """The agent's refusal to start a program, with the limit that stood in its way where the node sees one."""
    if reader is None or error.details.get("agent_code") != "limit_reached":
        return error
    try:
        async with asyncio.timeout(ASK_S + GUEST_ASK_S):
            facts = await reader.limits(sandbox, generation)
    except (CpuosError, TimeoutError):
        return error
    if not facts.full:
        return error
    first = facts.full[0]
    reached = _reached(first.limit, first.value, path=first.path)
    details: dict[str, Any] = error.details | {"limit": first.limit.value, "value": first.value}
    return LimitReached(error.what, reached.reason, details=details, hint="cpuos kill SANDBOX, or end what runs in it")


def session_over(session_s: float) -> ReachedLimit:
    """Of commands that ran as their sandbox's session ended."""
    return _reached(SandboxLimit.SESSION, session_s)


def _reached(
    limit: SandboxLimit,
    value: float | None,
    *,
    path: str | None = None,
    source: LimitSource = LimitSource.HOST,
    coincides: bool = False,
    dropped: int = 0,
) -> ReachedLimit:
    reason = explain(limit, value, path=path, dropped=dropped)
    if coincides:
        reason = f"As the command failed: {reason}"
    elif source is LimitSource.OUTPUT:
        reason = f"By what the program wrote: {reason}"
    return ReachedLimit(limit=limit, value=value, path=path, seen_by=source, reason=reason)


# What happened and what would help, for a person or a model.
_REASONS = {
    SandboxLimit.MEMORY: (
        "The sandbox's memory{value} was used up, and its largest process was killed. Work on smaller pieces, or use a "
        "sandbox with more memory."
    ),
    SandboxLimit.DISK: "{path} is full{value}. Remove files there, or use a sandbox with a larger disk.",
    SandboxLimit.INODES: (
        "{path} has no room for another file{value}. Remove files, or keep many small ones in an archive."
    ),
    SandboxLimit.TMP: (
        "A file system was full. /workspace and / have room, so look at /tmp and /dev/shm, which lie in memory{value}: "
        "write below /workspace instead, for instance with TMPDIR=/workspace/tmp."
    ),
    SandboxLimit.PROCESSES: (
        "The sandbox has as many processes as it may have{value}. End some, start fewer at once, or use a sandbox with "
        "a higher max_processes."
    ),
    SandboxLimit.OPEN_FILES: (
        "A process has as many files open as it may have{value}. Close files before opening more; ulimit -n shows and "
        "sets its own limit."
    ),
    SandboxLimit.OUTPUT: (
        "It wrote more than is recorded: {dropped} bytes of the middle are not kept. Write large output to a file."
    ),
    SandboxLimit.TIMEOUT: "It ran over its timeout{value}. Give it more time, or run it as a job.",
    SandboxLimit.SESSION: (
        "The sandbox's session{value} was over. Use a sandbox with a longer timeout, or extend it in time."
    ),
}
_IN_BYTES = {SandboxLimit.MEMORY, SandboxLimit.DISK, SandboxLimit.TMP}
_UNITS = {
    SandboxLimit.INODES: " files",
    SandboxLimit.PROCESSES: ", threads included",
    SandboxLimit.TIMEOUT: " s",
    SandboxLimit.SESSION: " s",
}


def explain(limit: SandboxLimit, value: float | None, *, path: str | None = None, dropped: int = 0) -> str:
    """One or two sentences."""
    told = ""
    if value is not None:
        told = f" ({_bytes(value) if limit in _IN_BYTES else f'{value:.10g}'}{_UNITS.get(limit, '')})"
    return _REASONS[limit].format(value=told, path=path or "A file system", dropped=dropped)


def _bytes(value: float) -> str:
    return f"{value / _GIB:g} GiB" if value % _GIB == 0 else f"{value / (1 << 20):.0f} MiB"
