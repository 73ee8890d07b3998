"""Steps done together: all of them end, all of them are undone, and a cancelled verb waits for them."""

from __future__ import annotations

import asyncio

import pytest

from cpuos.node.steps import Step, Together, UndoFailed, run_steps
from cpuos.testing.faults import Faults
from cpuos.testing.node import InjectedFault


class Log:
    """What was done, and steps that note it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, name: str, *, gate: asyncio.Event | None = None, fails: bool = False) -> Step:
        async def do() -> None:
            if gate is not None:
                await gate.wait()
            if fails:
                raise OSError(name)
            self.lines.append(f"did {name}")

        async def undo() -> None:
            self.lines.append(f"undid {name}")

        return Step(name=name, do=do, undo=undo)


async def test_they_wait_for_each_other_only_at_their_end():
    log, gate = Log(), asyncio.Event()

    async def opens() -> None:
        log.lines.append("did opens")
        gate.set()

    both = Together(steps=[log.step("waits", gate=gate), Step(name="opens", do=opens)])
    await asyncio.wait_for(run_steps("v", [both, log.step("last")], checkpoint=Faults()), 20)
    assert log.lines == ["did opens", "did waits", "did last"]


async def test_one_that_fails_waits_for_the_others_and_all_are_undone_newest_first():
    log, gate = Log(), asyncio.Event()
    steps = [log.step("first"), Together(steps=[log.step("slow", gate=gate), log.step("bad", fails=True)])]
    running = asyncio.create_task(run_steps("v", steps, checkpoint=Faults()))
    while "did first" not in log.lines:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done(), "a step may have threads at work on the host"
    gate.set()
    with pytest.raises(OSError, match="bad"):
        await running
    assert log.lines == ["did first", "did slow", "undid bad", "undid slow", "undid first"]


@pytest.mark.parametrize("point", ["v.one.before", "v.one.after", "v.two.before", "v.two.after"])
async def test_a_fault_at_each_point_undoes_both(point):
    log = Log()
    with pytest.raises(InjectedFault):
        await run_steps("v", [Together(steps=[log.step("one"), log.step("two")])], checkpoint=Faults(point))
    assert log.lines[-2:] == ["undid two", "undid one"]


async def test_an_undo_that_fails_does_not_stop_the_others():
    log = Log()
    steps = [Together(steps=[log.step("one"), log.step("two")]), log.step("bad", fails=True)]
    with pytest.raises(UndoFailed) as caught:
        await run_steps("v", steps, checkpoint=Faults("v.two.undo"))
    assert caught.value.steps == ["two"]
    assert log.lines[-2:] == ["undid bad", "undid one"]


async def test_a_cancelled_verb_lets_them_end_and_undoes_them():
    log, gate = Log(), asyncio.Event()
    both = Together(steps=[log.step("slow", gate=gate), log.step("quick")])
    running = asyncio.create_task(run_steps("v", [both, log.step("never")], checkpoint=Faults()))
    while "did quick" not in log.lines:  # noqa: ASYNC110
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log.lines == ["did quick", "did slow", "undid quick", "undid slow"]


async def test_an_undo_that_is_cancelled_comes_to_its_end():
    log, begun, gate = Log(), asyncio.Event(), asyncio.Event()

    async def undo() -> None:
        begun.set()
        await gate.wait()
        log.lines.append("undid slow")

    async def do() -> None:
        log.lines.append("did slow")

    steps = [log.step("first"), Step(name="slow", do=do, undo=undo), log.step("last", fails=True)]
    verb = asyncio.create_task(run_steps("verb", steps, checkpoint=lambda point: None))
    await begun.wait()
    verb.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await verb
    assert log.lines == ["did first", "did slow", "undid last", "undid slow", "undid first"]
