"""Numbered calls over a channel, in both directions.

node → worker   {"n": 7, "op": "open", …}     {"ack": 7, …}     or {"ack": 7, "error": "why"}
worker → node   {"q": 3, "op": "learn", …}    {"answer": 3, …}  or {"answer": 3, "error": "why"}
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from cpuos.node.network.workers.channel import Breach, Channel, Descriptors, Message

__all__ = ["NODE", "WORKER", "CallFailed", "Calls", "Done", "Operation", "Side"]

_MAX_ERROR = 300
_LAST_NUMBER = 1 << 53

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)


class Done(Message):
    """The answer that says no more than that it was done."""


class CallFailed(Exception):
    """The other side could not do it, or is gone; the text is its word."""


@dataclass(frozen=True)
class Operation(Generic[M]):
    """What one side does when the other asks: `handle` may take descriptors; None answers `Done`."""

    message: type[M]
    handle: Callable[[M, Descriptors], Awaitable[Message | None]]


@dataclass(frozen=True, kw_only=True)
class Side:
    """How one side writes and bears calls."""

    call: str
    reply: str
    their_call: str
    their_reply: str
    max_running: int
    """Calls of the other side handled at once; 1: in the order in which they came."""
    max_waiting: int
    """More than that is a breach."""
    max_descriptors: int
    messages_per_s: int | None
    is_strict: bool
    """Whether a call or answer that nobody expects is a breach; else calls are answered with an error."""


NODE = Side(
    call="n",
    reply="ack",
    their_call="q",
    their_reply="answer",
    max_running=32,
    max_waiting=512,
    max_descriptors=0,
    messages_per_s=4000,
    is_strict=True,
)
WORKER = Side(
    call="q",
    reply="answer",
    their_call="n",
    their_reply="ack",
    max_running=1,
    max_waiting=1 << 16,
    max_descriptors=64,
    messages_per_s=None,
    is_strict=False,
)


class Calls:
    """One end of the channel to a worker. `on_end` is called once, with what went wrong, or None."""

    def __init__(
        self,
        end: socket.socket,
        *,
        side: Side,
        operations: Mapping[str, Operation[Any]],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._side, self._operations, self._on_end = side, dict(operations), on_end
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._waiting: deque[tuple[int, dict[str, Any], Descriptors]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._channel = Channel(
            end,
            on_message=self._take,
            on_end=self._end,
            max_descriptors=side.max_descriptors,
            messages_per_s=side.messages_per_s,
        )

    async def call(
        self,
        message: Message,
        *,
        answer: type[A],
        descriptors: Sequence[int] = (),
        timeout_s: float,
    ) -> A:
        """Ask the other side; the descriptors stay the caller's. Raises CallFailed or TimeoutError."""
        if self._channel.closed:
            raise CallFailed("the channel is closed")
        self._number += 1
        number = self._number
        reply = asyncio.get_running_loop().create_future()
        self._pending[number] = reply
        try:
            body = {self._side.call: number, "op": message.op, **message.model_dump(mode="json")}
            self._channel.send(body, descriptors)
            async with asyncio.timeout(timeout_s):
                fields = await reply
        finally:
            self._pending.pop(number, None)
        if "error" in fields:
            raise CallFailed(_text(fields["error"]))
        try:
            return answer.model_validate(fields)
        except ValidationError:
            problem = Breach(f"the answer to {message.op!r} is not one")
            if self._side.is_strict:
                self.end(problem)
            raise CallFailed(str(problem)) from None

    def end(self, problem: Exception | None = None) -> None:
        """Close, fail what is pending, tell `on_end`; may be repeated."""
        if not self._channel.closed:
            self._channel.close()
            self._end(problem)

    async def close(self) -> None:
        """End without telling, and wait for what was being handled."""
        self._channel.close()
        self._drop()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, problem: Exception | None) -> None:
        self._drop()
        for task in self._running:
            task.cancel()
        self._on_end(problem)

    def _drop(self) -> None:
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(CallFailed("the other side went away"))
                reply.exception()  # whoever waits still gets it; nobody waiting is no fault
        self._pending.clear()
        for _, _, descriptors in self._waiting:
            descriptors.close()
        self._waiting.clear()

    def _take(self, message: dict[str, Any], descriptors: Descriptors) -> None:
        try:
            if self._side.their_reply in message:
                self._take_reply(message)
            else:
                self._take_call(message, descriptors)
                return
        except Breach as problem:
            descriptors.close()
            self.end(problem)
            return
        descriptors.close()

    def _take_reply(self, message: dict[str, Any]) -> None:
        number = _number(message.pop(self._side.their_reply))
        reply = self._pending.pop(number, None)
        if reply is not None and not reply.done():
            reply.set_result(message)
        elif self._side.is_strict and reply is None and not self._was_asked(number):
            raise Breach(f"an answer to question {number}, which was not asked")

    def _was_asked(self, number: int) -> bool:
        """An answer may come after its caller has given up."""
        return 0 < number <= self._number

    def _take_call(self, message: dict[str, Any], descriptors: Descriptors) -> None:
        number = _number(message.pop(self._side.their_call, None))
        if len(self._waiting) >= self._side.max_waiting:
            raise Breach("too many questions at once")
        op = message.get("op")
        if self._side.is_strict and (not isinstance(op, str) or op not in self._operations):
            raise Breach("an unknown question")
        self._waiting.append((number, message, descriptors))
        self._pump()

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._side.max_running and not self._channel.closed:
            number, message, descriptors = self._waiting.popleft()
            task = asyncio.get_running_loop().create_task(self._answer(number, message, descriptors))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._pump()

    async def _answer(self, number: int, message: dict[str, Any], descriptors: Descriptors) -> None:
        op = message.pop("op", None)
        try:
            operation = self._operations.get(op) if isinstance(op, str) else None
            if operation is None:
                raise CallFailed(f"there is no operation {op!r:.40}")
            given = operation.message.model_validate(message)
            result = await operation.handle(given, descriptors)
            fields = result.model_dump(mode="json") if result is not None else {}
        except ValidationError as problem:
            if self._side.is_strict:
                self.end(Breach(f"a wrong {op!r}: {problem.error_count()} fields"))
                return
            fields = {"error": f"a wrong {op!r}: {problem.errors(include_url=False, include_input=False)}"[:_MAX_ERROR]}
        except Exception as problem:  # the other side hears of it; what ends a process is not caught here
            fields = {"error": (str(problem) or type(problem).__name__)[:_MAX_ERROR]}
        finally:
            descriptors.close()
        try:
            self._channel.send({self._side.reply: number, **fields})
        except Breach as problem:
            self._channel.send({self._side.reply: number, "error": str(problem)})


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LAST_NUMBER:
        raise Breach("a message without a number")
    return value


def _text(value: Any) -> str:
    """For logs: what the other side wrote, cut and printable."""
    shown = value[:_MAX_ERROR] if isinstance(value, str) else "no reason"
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
