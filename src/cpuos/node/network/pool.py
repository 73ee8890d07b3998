"""Slots that are ready before they are asked for, and the helper process that makes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from cpuos.node.network.maker import SlotRecipe
from cpuos.node.network.plan import BlockPlan
from cpuos.node.network.slot import release_slot

__all__ = ["SlotNumbers", "SlotPool"]

T = TypeVar("T")
log = structlog.get_logger("cpuos.node.network")

PAUSE_S = 0.3
"""A slot that was taken is replaced a little later: its sandbox is just starting, and wants the processors."""
ANSWER_S = 30.0
BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
_PACKET_BYTES = 4096


class SlotNumbers:
    """Free numbers in turn: one that was given back comes last, for connections of its slot may still be remembered."""

    def __init__(self, folder: Path, block: BlockPlan) -> None:
        self._folder = folder
        self._slots = block.slots
        self._next = random.randrange(self._slots)

    def next(self) -> int:
        for _ in range(self._slots):
            number, self._next = self._next, (self._next + 1) % self._slots
            if not (self._folder / str(number)).exists():
                return number
        raise OSError("every slot of the network block is in use")


class SlotPool(Generic[T]):
    """Keeps `size` slots; `prepare` turns a made one into what `take` gives, `discard` gives such a one up."""

    def __init__(
        self,
        recipe: Callable[[], SlotRecipe],
        *,
        size: int,
        numbers: SlotNumbers,
        prepare: Callable[[int], Awaitable[T]],
        discard: Callable[[T], Awaitable[None]],
    ) -> None:
        self._recipe = recipe
        self._size = size
        self._numbers = numbers
        self._prepare, self._discard = prepare, discard
        self._ready: deque[T] = deque()
        self._wanted = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._quiet_until = 0.0
        self.on_the_spot = 0
        """How many takes found it empty."""
        self.restarts = -1

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def maker_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        if self._size and self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="cpuos-slot-pool")

    async def close(self) -> None:
        """End the helper and give the slots up."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self.drain()

    async def drain(self) -> None:
        """Give up those that are ready; new ones are made in their place."""
        while self._ready:
            await self._discard(self._ready.popleft())
        self._wanted.set()

    async def take(self) -> T:
        """A ready one; when there is none, one that is made now."""
        self._quiet_until = asyncio.get_running_loop().time() + PAUSE_S
        self._wanted.set()
        if self._ready:
            return self._ready.popleft()
        self.on_the_spot += 1
        number = self._numbers.next()
        recipe = self._recipe()
        await asyncio.to_thread(recipe.make, number)
        return await self._prepared(number, recipe)

    async def _keep(self) -> None:
        """A helper, and the next one when it dies."""
        backoff = BACKOFF_S
        while True:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    line = await self._start_maker(stack)
                    while True:
                        await self._fill(line)
                        backoff = BACKOFF_S
                        self._wanted.clear()
                        await self._until_wanted(line)
            except Exception as error:
                log.warning("slot maker ended", why=f"{type(error).__name__}: {error}", restart_in_s=backoff)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF_S)

    async def _until_wanted(self, line: socket.socket) -> None:
        """Raises when the helper ends meanwhile: unasked, it says nothing."""
        loop = asyncio.get_running_loop()
        ended = asyncio.create_task(loop.sock_recv(line, _PACKET_BYTES))
        wanted = asyncio.create_task(self._wanted.wait())
        try:
            await asyncio.wait({ended, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise OSError("it ended")
        finally:
            for task in (ended, wanted):
                task.cancel()
            await asyncio.gather(ended, wanted, return_exceptions=True)

    async def _fill(self, line: socket.socket) -> None:
        while len(self._ready) < self._size:
            # Until the last take is long enough ago.
            while (pause := self._quiet_until - asyncio.get_running_loop().time()) > 0 and self._ready:  # noqa: ASYNC110
                await asyncio.sleep(pause)
            recipe, number = self._recipe(), self._numbers.next()
            folder = recipe.folder / str(number)
            try:
                await self._ask(line, number, recipe)
            except BaseException:
                # Whatever the helper had made of it belongs to nobody.
                await self._stop_maker()
                await asyncio.shield(asyncio.to_thread(release_slot, folder))
                raise
            if recipe != self._recipe():
                await asyncio.to_thread(release_slot, folder)
                continue
            self._ready.append(await self._prepared(number, recipe))

    async def _prepared(self, number: int, recipe: SlotRecipe) -> T:
        try:
            return await self._prepare(number)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(release_slot, recipe.folder / str(number)))
            raise

    async def _ask(self, line: socket.socket, number: int, recipe: SlotRecipe) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_sendall(line, json.dumps({"make": number, "recipe": recipe.to_json()}).encode())
            packet = await loop.sock_recv(line, _PACKET_BYTES)
        if not packet:
            raise OSError("it ended")
        answer = json.loads(packet)
        if answer.get("made") != number:
            raise OSError(str(answer.get("why", "it answered something else")))

    async def _start_maker(self, stack: contextlib.AsyncExitStack) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        ours.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-m", "cpuos.node.network.maker", str(theirs.fileno()), str(os.getpid())),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                cwd="/",
                env={"LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
            )
        stack.push_async_callback(self._stop_maker)
        self.restarts += 1
        return ours

    async def _stop_maker(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
