"""Ctrl-C and cancellation leave no command and no sandbox behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cpuos import AsyncSandbox, Sandbox
from cpuos.testing.waiting import until
from unit.client.fake_api import SANDBOX_ID, FakeApi, Fault, Program

CREATE = "/v1/sandboxes"
COMMANDS = r"/v1/sandboxes/\w+/commands"


@contextmanager
def interrupt_when(happened: Any) -> Iterator[None]:
    """KeyboardInterrupt in the main thread, a moment after `happened()` became true."""

    def handle(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def watch() -> None:
        while not happened() and not stop.wait(0.005):
            pass
        if not stop.wait(0.05):
            os.kill(os.getpid(), signal.SIGUSR1)

    stop = threading.Event()
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


async def cancel_when(happened: Any, running: Any) -> None:
    task = asyncio.ensure_future(running)
    await until(happened)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def statuses(api: FakeApi) -> list[str]:
    return [record["status"] for record in api.commands.values()]


@pytest.mark.parametrize("stdin", [None, b"x" * 600_000])
def test_an_interrupted_exec_kills_its_command(api: FakeApi, stdin: bytes | None) -> None:
    api.program = lambda start: Program([("stdout", b"a\n")], hold=True)
    with Sandbox.create() as sbx, interrupt_when(lambda: api.commands), pytest.raises(KeyboardInterrupt):
        sbx.exec("sleep 100", stdin=stdin)
    assert statuses(api) == ["killed"]
    assert api.killed == [SANDBOX_ID]


def test_an_exec_interrupted_before_its_first_answer_is_found_and_killed(api: FakeApi) -> None:
    api.program = lambda start: Program(hold=True)
    api.faults = [Fault("POST", COMMANDS, delay_s=60)]
    with Sandbox.create() as sbx:
        with interrupt_when(lambda: api.calls("POST", COMMANDS)), pytest.raises(KeyboardInterrupt):
            sbx.exec("sleep 100")
        assert statuses(api) == ["killed"]


def test_an_interrupted_create_kills_what_was_made(api: FakeApi) -> None:
    api.faults = [Fault("POST", CREATE, delay_s=60)]
    with interrupt_when(lambda: api.calls("POST", CREATE)), pytest.raises(KeyboardInterrupt), Sandbox.create():
        pass
    keys = {seen.headers["idempotency-key"] for seen in api.calls("POST", CREATE)}
    assert len(keys) == 1
    assert api.killed == [SANDBOX_ID]


@pytest.mark.parametrize("stdin", [None, b"x" * 600_000])
async def test_a_cancelled_exec_kills_its_command(api: FakeApi, stdin: bytes | None) -> None:
    api.program = lambda start: Program([("stdout", b"a\n")], hold=True)
    async with await AsyncSandbox.create() as sbx:
        await cancel_when(lambda: api.commands, sbx.exec("sleep 100", stdin=stdin))
        assert statuses(api) == ["killed"]


async def test_an_exec_cancelled_before_its_first_answer_is_found_and_killed(api: FakeApi) -> None:
    api.program = lambda start: Program(hold=True)
    api.faults = [Fault("POST", COMMANDS, delay_s=60)]
    async with await AsyncSandbox.create() as sbx:
        await cancel_when(lambda: api.calls("POST", COMMANDS), sbx.exec("sleep 100"))
        assert statuses(api) == ["killed"]


async def test_a_spawn_cancelled_before_its_answer_is_found_and_killed(api: FakeApi) -> None:
    api.program = lambda start: Program(hold=True)
    api.faults = [Fault("POST", COMMANDS, delay_s=60)]
    async with await AsyncSandbox.create() as sbx:
        await cancel_when(lambda: api.calls("POST", COMMANDS), sbx.spawn("sleep 100"))
        assert statuses(api) == ["killed"]


async def test_a_cancelled_create_kills_what_was_made(api: FakeApi) -> None:
    async def create() -> None:
        async with await AsyncSandbox.create():
            pass

    api.faults = [Fault("POST", CREATE, delay_s=60)]
    await cancel_when(lambda: api.calls("POST", CREATE), create())
    assert api.killed == [SANDBOX_ID]


async def test_a_block_that_is_cancelled_kills_its_sandbox(api: FakeApi) -> None:
    async def work() -> None:
        async with await AsyncSandbox.create():
            await asyncio.sleep(100)

    await cancel_when(lambda: api.created, work())
    assert api.killed == [SANDBOX_ID]


async def test_a_timeout_of_the_callers_own(api: FakeApi) -> None:
    api.program = lambda start: Program(hold=True)
    async with await AsyncSandbox.create() as sbx:
        timeout = asyncio.timeout(None)

        async def run() -> None:
            async with timeout:
                await sbx.exec("sleep 100")

        running = asyncio.create_task(run())
        await until(lambda: api.commands)
        timeout.reschedule(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await running
        assert statuses(api) == ["killed"]


async def test_two_hundred_commands_in_one_loop(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", start["command"].encode())])
    async with await AsyncSandbox.create() as sbx:
        results = await asyncio.gather(*[sbx.exec(str(number)) for number in range(200)])
    assert [result.stdout for result in results] == [str(number) for number in range(200)]


def test_many_threads_share_one_sandbox(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", start["command"].encode())])
    found: dict[int, str] = {}
    with Sandbox.create() as sbx:

        def work(number: int) -> None:
            for _ in range(10):
                found[number] = sbx.exec(str(number)).stdout
            sbx.files.write(str(number), b"x")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: str(number) for number in range(20)}
    assert len(api.files) == 20
