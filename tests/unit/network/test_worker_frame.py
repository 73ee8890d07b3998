"""The frame of the network workers: real processes, well-behaved and hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cpuos.errors import PlatformError, Unavailable
from cpuos.node.network.workers.calls import Operation
from cpuos.node.network.workers.lockdown import confinement_of
from cpuos.node.network.workers.messages import Start
from cpuos.node.network.workers.supervisor import StartCall, Timing, Worker
from cpuos.testing.hostile_worker import MODULE, Act, Asked, Hold, Report

QUICK = Timing(request_s=2.0, ping_every_s=0.2, first_backoff_s=0.01, last_backoff_s=0.1)
PATIENT = Timing(first_backoff_s=0.01)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def links() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


async def _answer(asked: Asked, descriptors) -> None:
    if asked.text == "bad":
        raise ValueError("not that one")


def make(*, timing: Timing = PATIENT, **rest) -> Worker:
    rest.setdefault("questions", [Operation(Asked, _answer)])
    return Worker("test", module=MODULE, timing=timing, **rest)


async def report(worker: Worker, how: str = "report", **rest) -> dict:
    return (await worker.request(Act(how=how, **rest), answer=Report)).values


def is_there(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until_restarted(worker: Worker, restarts: int = 1) -> None:
    async with asyncio.timeout(60):
        while worker.restarts < restarts:  # noqa: ASYNC110 - the process is what is waited for
            await asyncio.sleep(0.01)
        await worker.wait_ready()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_a_worker_has_no_rights() -> None:
    with socket.socket() as inherited, open("/etc/passwd") as file:  # noqa: ASYNC230
        for number in (inherited.fileno(), file.fileno()):
            os.set_inheritable(number, True)
        own = links()
        assert "/etc/passwd" in own
        async with make() as worker:
            values = await report(worker)
    confinement = confinement_of(memory_mib=1, descriptors=1)
    assert values["uid"] == [confinement.uid] * 3
    assert confinement.uid != 0
    assert int(values["capabilities"], 16) == 0
    assert values["no_new_privs"] == "1"
    assert values["forked"] is False
    shared = {link for link in own & set(values["descriptors"].values()) if not link.startswith("anon_inode")}
    assert shared <= {"/dev/null"}
    assert set(values["environment"]) <= {"LANG", "LC_CTYPE"}


async def test_memory_ends_at_its_limit() -> None:
    async with make(memory_mib=256) as worker:
        assert await report(worker, "eat_memory", count=1024) == {"eaten": 0}
        assert await report(worker, "eat_memory", count=8) == {"eaten": 8 << 20}


async def test_a_failing_operation_says_why_and_goes_on() -> None:
    async with make() as worker:
        with pytest.raises(PlatformError) as caught:
            await worker.request(Act(how="fail"))
        assert "as it was told?[31mxxx" in caught.value.why
        assert len(caught.value.why) < 400
        await report(worker)
        assert worker.restarts == 0


async def test_an_unknown_operation_is_refused() -> None:
    class Other(Act):
        op = "other"

    async with make() as worker:
        with pytest.raises(PlatformError, match="cannot have 'other' done by the test worker"):
            await worker.request(Other(how="x"))


async def test_start_and_restart_get_the_same_descriptors() -> None:
    read, write = os.pipe()
    replayed = []

    async def replay(worker: Worker) -> None:
        replayed.append((await worker.request(Hold(), answer=Report, descriptors=[write])).values)

    start = lambda: StartCall(message=Start(), descriptors=[read, write])  # noqa: E731
    async with make(start=start, on_restart=replay) as worker:
        assert (await report(worker))["started"] == 2
        assert replayed == []
        first = worker.pid
        os.kill(first, signal.SIGKILL)
        await until_restarted(worker)
        assert worker.pid not in (None, first)
        assert (await report(worker))["started"] == 2
        assert replayed == [{"held": 1}]
    os.close(read)
    os.close(write)


async def test_a_worker_killed_mid_request() -> None:
    async with make() as worker:
        waiting = asyncio.create_task(worker.request(Act(how="never_answer"), timeout_s=30))
        await asyncio.sleep(0.05)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await worker.request(Act(how="report"))
        await until_restarted(worker)
        await report(worker)


@pytest.mark.parametrize("how", ["hang", "never_answer"])
async def test_a_worker_that_does_not_answer_is_replaced(how: str) -> None:
    async with make(timing=QUICK) as worker:
        first = worker.pid
        with pytest.raises(Unavailable):
            await worker.request(Act(how=how), timeout_s=0.2)
        await until_restarted(worker)
        assert not is_there(first)


async def test_a_stopped_worker_is_found_without_a_request() -> None:
    async with make(timing=QUICK) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        await until_restarted(worker)


HOSTILE = [
    "garbage",
    "not_a_packet",
    "list",
    "deep",
    "big_number",
    "endless_message",
    "long_packet",
    "unknown_answer",
    "unknown_question",
    "wrong_question",
    "descriptors",
    "close_channel",
    "exit",
]


@pytest.mark.parametrize("how", HOSTILE)
async def test_a_hostile_worker_is_killed_and_replaced(how: str) -> None:
    async with make() as worker:
        first, before = worker.pid, open_descriptors()
        try:
            await worker.request(Act(how=how))
        except PlatformError:
            pass
        await until_restarted(worker)
        assert not is_there(first)
        await report(worker)
        assert open_descriptors() == before


async def test_a_wrong_answer_is_a_breach() -> None:
    class Narrow(Report):
        must: int

    async with make() as worker:
        with pytest.raises(Unavailable):
            await worker.request(Act(how="wrong_answer"), answer=Narrow)
        await until_restarted(worker)


async def test_questions_are_answered_and_may_fail() -> None:
    async def some(asked: Asked, descriptors) -> None:
        if int(asked.text) % 2:
            raise ValueError(f"not {asked.text}")

    async with make(questions=[Operation(Asked, some)]) as worker:
        assert await report(worker, "ask", count=4) == {"failed": ["not 1", "not 3"]}
        assert worker.restarts == 0


async def test_more_questions_than_allowed_at_once_end_the_worker() -> None:
    never = asyncio.Event()

    async def slow(asked: Asked, descriptors) -> None:
        await never.wait()

    async with make(questions=[Operation(Asked, slow)]) as worker:
        with pytest.raises(Unavailable):
            await worker.request(Act(how="burst", count=1000), timeout_s=20)
        await until_restarted(worker)


async def test_a_flood_leaves_the_node_its_time() -> None:
    """Reading has a rate: the flood waits in the worker, and other work of the loop goes on."""
    answered = 0

    async def count(asked: Asked, descriptors) -> None:
        nonlocal answered
        answered += 1

    async with make(questions=[Operation(Asked, count)]) as worker:
        flood = asyncio.create_task(worker.request(Act(how="flood"), timeout_s=60))
        loop = asyncio.get_running_loop()
        begin, cpu, turns = loop.time(), os.times().user, 0
        async with asyncio.timeout(60):
            while loop.time() - begin < 2 or turns < 100 or answered < 100:
                await asyncio.sleep(0.001)
                turns += 1
        spent = loop.time() - begin
        assert answered <= 4000 * spent + 4000
        assert os.times().user - cpu < 0.95 * spent
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)


async def test_a_shouting_worker_waits() -> None:
    async with make(timing=QUICK) as worker:
        first = worker.pid
        before = os.times().user
        with pytest.raises(Unavailable):
            await worker.request(Act(how="shout"), timeout_s=0.5)
        await until_restarted(worker)
        assert worker.pid != first
        assert os.times().user - before < 5


async def test_descriptors_do_not_leak() -> None:
    async with make() as worker:
        await worker.request(Hold(), answer=Report)
        before, theirs = open_descriptors(), (await report(worker))["descriptors"]
        read, write = os.pipe()
        for _ in range(20):
            await worker.request(Act(how="report"), answer=Report, descriptors=[read, write])  # nobody takes them
            with pytest.raises(PlatformError):
                await worker.request(Act(how="fail"), descriptors=[read] * 30)
        assert (await report(worker))["descriptors"] == theirs
        held = await worker.request(Hold(), answer=Report, descriptors=[read] * 10)
        assert held.values == {"held": 10}
        assert len((await report(worker))["descriptors"]) == len(theirs) + 10
        os.close(read)
        os.close(write)
        assert open_descriptors() == before


async def test_queued_messages_keep_their_descriptors() -> None:
    """More than the socket takes while the worker is busy: all arrive, in order, with what belongs to them."""
    async with make() as worker:
        read, write = os.pipe()
        stopped = worker.pid
        os.kill(stopped, signal.SIGSTOP)
        sent = [asyncio.create_task(worker.request(Hold(), answer=Report, descriptors=[read])) for _ in range(600)]
        await asyncio.sleep(0.05)
        os.close(read)  # the caller's own; copies are on their way
        os.kill(stopped, signal.SIGCONT)
        held = [answer.values["held"] for answer in await asyncio.gather(*sent)]
        assert held == list(range(1, 601))
        os.close(write)


async def test_long_messages_cross_in_pieces() -> None:
    async with make() as worker:
        with pytest.raises(PlatformError) as caught:
            await worker.request(Act(how="x" * 300_000))
        assert "has no attribute '_do_xxxx" in caught.value.why
        with pytest.raises(Exception, match="too large to send"):
            await worker.request(Act(how="x" * 2_000_000))
        await report(worker)


async def test_a_worker_that_never_comes_up() -> None:
    before = open_descriptors()
    worker = Worker("nothing", module="cpuos.testing.no_such_module", timing=QUICK)
    with pytest.raises(PlatformError):
        await worker.start()
    await worker.close()
    assert open_descriptors() == before


async def test_a_worker_that_keeps_its_rights_is_not_used() -> None:
    """A module that answers, but never locks itself down."""
    code = textwrap.dedent(
        """
        import asyncio, socket, sys
        from cpuos.node.network.workers import base
        from cpuos.testing.hostile_worker import HostileWorker
        asyncio.run(base.serve_node(socket.socket(fileno=int(sys.argv[1])), HostileWorker))
        """
    )
    if os.geteuid() != 0:
        pytest.skip("needs root")
    worker = _Unlocked(code)
    with pytest.raises(PlatformError, match="cannot use") as caught:
        await worker.start()
    assert "rights" in caught.value.why
    await worker.close()


class _Unlocked(Worker):
    def __init__(self, code: str) -> None:
        super().__init__("unlocked", module=MODULE, timing=PATIENT)
        self._code = code

    def _command(self, descriptor: int, confinement) -> list[str]:
        return [sys.executable, "-I", "-c", self._code, str(descriptor)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_workers_end_with_the_node() -> None:
    """Killed, not closed: nothing of the node's own code runs."""
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        from cpuos.node.network.workers.supervisor import Worker
        from cpuos.testing.hostile_worker import Act
        async def main():
            async with Worker("test", module={MODULE!r}) as worker:
                print(worker.pid, flush=True)
                await worker.request(Act(how="hang"), timeout_s=600)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        watched = os.pidfd_open(int(node.stdout.readline()))
        node.kill()
        node.wait()
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)
