"""The node's side of a worker: it is started, spoken to, watched, and started again when it dies or misbehaves.

    dns = Worker("dns", start=make_start, questions=[Operation(Learn, network.learn)], on_restart=network.reopen_dns)
    async with dns:
        await dns.request(Open(…), descriptors=[udp.fileno(), tcp.fileno()])

While a worker is down every request fails with `Unavailable`. `on_restart` lets the owner replay to the next one what
holds then; requests of others may come between. It is started from the thread of the event loop and dies with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from cpuos.errors import PlatformError, Unavailable
from cpuos.node.network.workers.calls import NODE, CallFailed, Calls, Done, Operation
from cpuos.node.network.workers.channel import Message, channel_pair
from cpuos.node.network.workers.lockdown import Confinement, confinement_of, is_locked_down
from cpuos.node.network.workers.messages import Ping, Start

__all__ = ["StartCall", "Timing", "Worker"]

log = structlog.get_logger("cpuos.node.network")

A = TypeVar("A", bound=Message)

_MODULES = "cpuos.node.network.workers"
_LOG_BYTES = 2000
_LOG_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StartCall:
    """The first call to a new process. The descriptors stay the owner's and are sent again to the next one."""

    message: Start = field(default_factory=Start)
    descriptors: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How patient the node is; seconds."""

    start_s: float = 20.0
    request_s: float = 10.0
    """An answer that takes longer means that the worker hangs: it is killed."""
    ping_every_s: float = 5.0
    """How often it is asked for a sign of life, within `request_s`."""
    end_s: float = 1.0
    """How long one may take to end by itself."""
    first_backoff_s: float = 0.1
    last_backoff_s: float = 10.0
    healthy_s: float = 30.0
    """After living so long the next restart is at once again."""


class Worker:
    """One worker process, and the next one when it ends."""

    def __init__(
        self,
        name: str,
        *,
        start: Callable[[], StartCall] = StartCall,
        questions: Sequence[Operation[Any]] = (),
        on_restart: Callable[[Worker], Awaitable[None]] | None = None,
        memory_mib: int = 768,
        descriptors: int = 8192,
        module: str | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._module = module or f"{_MODULES}.{name}"
        self._make_start, self._on_restart = start, on_restart
        self._questions = {question.message.op: question for question in questions}
        self._memory_mib, self._descriptors = memory_mib, descriptors
        self._timing = timing or Timing()
        self._process: Process | None = None
        self._calls: Calls | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._problem = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """Of the process that serves now."""
        return self._process.pid if self._process is not None and self._ready.is_set() else None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def start(self) -> None:
        """Start and keep it; raises PlatformError when the first process does not come up."""
        if self._keeper is not None:
            return
        self._problem = ""
        ended = await self._spawn()
        self._keeper = asyncio.create_task(self._keep(ended), name=f"cpuos-worker-{self.name}")

    async def close(self) -> None:
        """End it for good; it may write down what it still holds."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._stop(patience_s=self._timing.end_s)

    async def wait_ready(self) -> None:
        """Until a process serves, `on_restart` done."""
        await self._ready.wait()

    async def request(
        self,
        message: Message,
        *,
        answer: type[A] = Done,  # type: ignore[assignment]
        descriptors: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> A:
        """Ask the worker. Raises Unavailable while there is none, PlatformError when it says no."""
        calls = self._calls
        if calls is None:
            raise self._gone(message)
        limit = self._timing.request_s if timeout_s is None else timeout_s
        try:
            return await calls.call(message, answer=answer, descriptors=descriptors, timeout_s=limit)
        except TimeoutError:
            calls.end(TimeoutError(f"no answer to {message.op!r} in {limit:g} s"))
            raise self._gone(message) from None
        except CallFailed as problem:
            if self._calls is not calls:
                raise self._gone(message) from problem
            raise PlatformError(self._what(message), str(problem)) from problem

    def _what(self, message: Message) -> str:
        return f"cannot have {message.op!r} done by the {self.name} worker"

    def _gone(self, message: Message) -> Unavailable:
        return Unavailable(
            self._what(message),
            self._problem or "it is being started",
            code="node_unavailable",
            hint="the node starts it again by itself; repeat the call",
        )

    async def _keep(self, ended: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        backoff, born = self._timing.first_backoff_s, loop.time()
        while True:
            await self._watch(ended)
            await self._stop()
            if loop.time() - born >= self._timing.healthy_s:
                backoff = self._timing.first_backoff_s
            log.warning("worker ended", worker=self.name, why=self._problem, restart_in_s=backoff)
            while True:
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, self._timing.last_backoff_s)
                self.restarts += 1
                try:
                    born = loop.time()
                    ended = await self._spawn(again=True)
                    break
                except PlatformError as problem:
                    log.error("worker does not start", worker=self.name, why=problem.why, restart_in_s=backoff)

    async def _watch(self, ended: asyncio.Event) -> None:
        """Until the process is to be replaced."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.ping_every_s):
                    await ended.wait()
            if ended.is_set():
                return
            with contextlib.suppress(PlatformError):
                await self.request(Ping())

    async def _spawn(self, *, again: bool = False) -> asyncio.Event:
        """A process that has given up its rights and has been told to start; the event is set at its end."""
        confinement = confinement_of(memory_mib=self._memory_mib, descriptors=self._descriptors)
        ended = asyncio.Event()
        ours, theirs = channel_pair()
        try:
            with theirs:
                self._process = await self._run(theirs.fileno(), confinement)
        except OSError as problem:
            ours.close()
            raise PlatformError(f"cannot start the {self.name} worker", str(problem)) from problem
        self._calls = calls = Calls(
            ours, side=NODE, operations=self._questions, on_end=lambda problem: self._ended(problem, ended)
        )
        process = self._process
        try:
            # It reads its first message only once its rights are gone.
            await self.request(Ping(), timeout_s=self._timing.start_s)
            if not is_locked_down(process.pid, confinement):
                raise PlatformError(f"cannot use the {self.name} worker", "it did not give up its rights")
            call = self._make_start()
            await self.request(call.message, descriptors=call.descriptors)
            if again and self._on_restart is not None:
                await self._on_restart(self)
            if self._calls is not calls:
                raise self._gone(Ping())
        except BaseException as problem:
            await self._stop()
            if isinstance(problem, Exception) and not isinstance(problem, PlatformError):
                raise PlatformError(f"cannot start the {self.name} worker", repr(problem)) from problem
            raise
        self._ready.set()
        return ended

    async def _run(self, descriptor: int, confinement: Confinement) -> Process:
        self._voice = _Voice(self.name)
        try:
            return await asyncio.create_subprocess_exec(
                *self._command(descriptor, confinement),
                pass_fds=(descriptor,),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=self._voice.mouth,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError:
            self._voice.close()
            raise
        finally:
            os.close(self._voice.mouth)

    def _command(self, descriptor: int, confinement: Confinement) -> list[str]:
        return [sys.executable, "-I", "-m", self._module, str(descriptor), json.dumps(confinement.fields())]

    def _ended(self, problem: Exception | None, ended: asyncio.Event) -> None:
        """The channel is closed: the process is gone, or is to go."""
        self._problem = f"it broke off: {problem}" if problem is not None else "it ended"
        self._ready.clear()
        self._calls = None
        ended.set()

    async def _stop(self, *, patience_s: float = 0.0) -> None:
        """The closed channel tells a worker to end; one that has not is killed."""
        self._ready.clear()
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close()
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._voice.close()


class _Voice:
    """What a worker writes to stderr goes to the log, a bounded piece a second: a flood makes the worker wait."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._ear, self.mouth = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ear, False)
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """With the last words."""
        self._loop.remove_reader(self._ear)
        if self._pause is not None:
            self._pause.cancel()
        self._log()
        os.close(self._ear)

    def _listen(self) -> None:
        self._loop.add_reader(self._ear, self._hear)

    def _hear(self) -> None:
        self._loop.remove_reader(self._ear)
        if self._log():
            self._pause = self._loop.call_later(_LOG_PAUSE_S, self._listen)

    def _log(self) -> bool:
        """Whether there may be more."""
        try:
            text = os.read(self._ear, _LOG_BYTES)
        except BlockingIOError:
            return True
        shown = "".join(letter if letter.isprintable() else " " for letter in text.decode(errors="replace")).strip()
        if shown:
            log.warning("worker says", worker=self._worker, text=shown)
        return bool(text)
