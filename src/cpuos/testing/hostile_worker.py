"""A network worker that does what it is told, good or bad: `Worker("test", module=MODULE)`, then `Act(how=…)`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from cpuos.node.network.workers.base import NodeLine, run_worker
from cpuos.node.network.workers.calls import CallFailed, Done, Operation
from cpuos.node.network.workers.channel import MAX_MESSAGE_BYTES, Descriptors, Message
from cpuos.node.network.workers.messages import Start

__all__ = ["MODULE", "Act", "Asked", "Hold", "HostileWorker", "Report"]

MODULE = "cpuos.testing.hostile_worker"
STATUS = Path("/proc/self/status")


class Act(Message):
    op: ClassVar[str] = "act"
    how: str
    count: int = 1


class Hold(Message):
    """Keep the descriptors."""

    op: ClassVar[str] = "hold"


class Asked(Message):
    """A question to the node."""

    op: ClassVar[str] = "asked"
    text: str


class Report(Message):
    """What the worker sees of itself."""

    values: dict[str, Any]


class HostileWorker:
    def __init__(self, node: NodeLine) -> None:
        self._node = node
        self._held: list[int] = []
        self._asking: set[asyncio.Task[Any]] = set()

    def operations(self) -> list[Operation[Any]]:
        return [Operation(Start, self._start), Operation(Act, self._act), Operation(Hold, self._hold)]

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()

    async def _start(self, message: Start, descriptors: Descriptors) -> None:
        self._started = len(descriptors)

    async def _hold(self, message: Hold, descriptors: Descriptors) -> Report:
        while descriptors:
            self._held.append(descriptors.take())
        return Report(values={"held": len(self._held)})

    async def _act(self, message: Act, descriptors: Descriptors) -> Message | None:
        return await getattr(self, f"_do_{message.how}")(message.count)

    async def _do_report(self, count: int) -> Report:
        status = _status()
        try:
            os.kill(os.fork(), signal.SIGKILL)
            forked = True
        except OSError:
            forked = False
        return Report(
            values={
                "uid": os.getresuid(),
                "capabilities": status["CapPrm"].strip(),
                "no_new_privs": status["NoNewPrivs"].strip(),
                "forked": forked,
                "descriptors": _descriptors(),
                "environment": sorted(os.environ),
                "started": self._started,
            }
        )

    async def _do_fail(self, count: int) -> None:
        raise ValueError("as it was told\x1b[31m" + "x" * 5000)

    async def _do_exit(self, count: int) -> None:
        sys.stderr.write("going\n")
        os._exit(3)

    async def _do_hang(self, count: int) -> None:
        time.sleep(600)  # noqa: ASYNC251

    async def _do_never_answer(self, count: int) -> None:
        await asyncio.sleep(600)

    async def _do_close_channel(self, count: int) -> None:
        os.close(int(sys.argv[1]))
        time.sleep(600)  # noqa: ASYNC251

    async def _do_ask(self, count: int) -> Report:
        questions = [self._node.ask(Asked(text=str(number)), answer=Done) for number in range(count)]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        return Report(values={"failed": [str(a) for a in answers if isinstance(a, CallFailed)]})

    async def _do_burst(self, count: int) -> None:
        end = self._channel()
        end.setblocking(True)
        for number in range(count):
            end.send(b'.{"q":%d,"op":"asked","text":"one of many"}' % number)

    async def _do_garbage(self, count: int) -> None:
        self._channel().send(b".{not json")

    async def _do_not_a_packet(self, count: int) -> None:
        self._channel().send(b"hello")

    async def _do_list(self, count: int) -> None:
        self._channel().send(b".[1,2]")

    async def _do_deep(self, count: int) -> None:
        self._channel().send(b"." + b"[" * 50_000)

    async def _do_big_number(self, count: int) -> None:
        self._channel().send(b'.{"ack":' + b"9" * 50_000 + b"}")

    async def _do_endless_message(self, count: int) -> None:
        end = self._channel()
        end.setblocking(True)
        for _ in range(MAX_MESSAGE_BYTES // 50_000 + 2):
            end.send(b"+" + b" " * 50_000)

    async def _do_long_packet(self, count: int) -> None:
        self._channel().send(b"." + b" " * 100_000)

    async def _do_unknown_answer(self, count: int) -> None:
        self._channel().send(b'.{"ack":123456}')

    async def _do_unknown_question(self, count: int) -> None:
        self._channel().send(b'.{"q":1,"op":"root please"}')

    async def _do_wrong_question(self, count: int) -> None:
        self._channel().send(b'.{"q":1,"op":"asked","text":7,"more":{}}')

    async def _do_wrong_answer(self, count: int) -> Report:
        return Report(values={})

    async def _do_descriptors(self, count: int) -> None:
        socket.send_fds(self._channel(), [b'.{"ack":0}'], [0, 1, 2])

    async def _do_flood(self, count: int) -> None:
        end = self._channel()
        end.setblocking(True)
        while True:
            end.send(b'.{"q":1,"op":"asked","text":"slow"}')

    async def _do_shout(self, count: int) -> None:
        while True:
            sys.stderr.write("x" * 4000 + "\x1b[31m\n")

    async def _do_eat_memory(self, count: int) -> Report:
        try:
            eaten = len(bytearray(count << 20))
        except MemoryError:
            eaten = 0
        return Report(values={"eaten": eaten})

    def _channel(self) -> socket.socket:
        return socket.socket(fileno=os.dup(int(sys.argv[1])))


def _status() -> dict[str, str]:
    return dict(line.split(":", 1) for line in STATUS.read_text().splitlines())


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


if __name__ == "__main__":
    run_worker(HostileWorker)
