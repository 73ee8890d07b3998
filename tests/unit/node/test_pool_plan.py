"""How many ready sandboxes of which shape: by what was asked for, what there is room for, and when."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cpuos.node.host import memory_mib
from cpuos.node.journal import Record, Stage
from cpuos.node.pool.keeper import Keeper, Plan, make_plan, room_under
from cpuos.node.pool.pressure import Pressure, read_pressure
from cpuos.node.pool.shape import Shape, shape_of_record
from cpuos.node.pool.wishes import HALF_LIFE_S, REMEMBERED_S, Wishes, share_out
from cpuos.testing.waiting import until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CALM, HIGH = Pressure(is_high=False), Pressure(is_high=True)


def shape(name: str, *, cpu: int = 1) -> Shape:
    return Shape(
        template=name, template_digest="d", runtime="fake", cpu=cpu, memory_mib=256, disk_mib=64, max_processes=64
    )


A, B, C = (shape(name) for name in "abc")


def ready(of: Shape, number: int, *, age_s: float = 0.0) -> Record:
    values = {name: getattr(of, name) for name in ("template", "runtime", "cpu", "memory_mib", "disk_mib")}
    sandbox_id = f"{number:020d}"
    return Record(
        request={**values, "max_processes": 64, "id": sandbox_id, "generation": 1, "hostname": sandbox_id},
        stage=Stage.READY,
        boot_id="boot",
        changed_at=NOW - timedelta(seconds=age_s),
        session_key="00",
        template_digest="d",
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_expected_again_and_fades():
    clock = Clock()
    wishes = Wishes(clock=clock)
    for _ in range(8):
        wishes.note(A)
    counts = []
    for _ in range(5):
        counts.append(wishes.wanted()[A])
        clock.now += HALF_LIFE_S
    assert counts == [8, 4, 2, 1, 1]
    clock.now = REMEMBERED_S + 1
    assert wishes.wanted() == {}


def test_what_was_asked_for_last_comes_first():
    wishes = Wishes(clock=Clock())
    for one in (A, B, A, C):
        wishes.note(one)
    assert list(wishes.wanted()) == [C, A, B]


@pytest.mark.parametrize(
    ("room", "shares"),
    [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (1, 1, 0)), (4, (2, 1, 1)), (7, (5, 1, 1)), (99, (50, 1, 1))],
)
def test_a_large_wish_leaves_something_to_others(room, shares):
    assert tuple(share_out({A: 50, B: 1, C: 1}, room=room).values()) == shares


def test_what_nobody_wants_goes_the_oldest_first():
    old, new = ready(A, 1, age_s=20), ready(A, 2, age_s=10)
    plan = make_plan([old, new, ready(B, 3)], {A: 1}, room=9, is_old=lambda record: False)
    assert {record.id for record in plan.surplus} == {old.id, f"{3:020d}"}
    assert plan.short == []


def test_an_old_one_is_replaced():
    plan = make_plan([ready(A, 1, age_s=20)], {A: 1}, room=9, is_old=lambda record: record.changed_at < NOW)
    assert ([record.id for record in plan.surplus], plan.short) == ([f"{1:020d}"], [A])


def test_the_shape_that_lacks_most_is_filled_first():
    plan = make_plan([ready(B, 1)], {A: 1, B: 2, C: 5}, room=9, is_old=lambda record: False)
    assert plan.short == [C, A, B]
    assert shape_of_record(ready(A, 1)) == A
    assert shape_of_record(ready(A, 1)) != shape("a", cpu=2)


@pytest.mark.parametrize(
    ("pressure", "held", "free", "room"),
    [
        (CALM, 0, 50, 10),
        (CALM, 300, 50, 10),  # 3 ready
        (CALM, 950, 50, 3),  # none more, none less
        (CALM, 1050, 50, 2),  # over the budget by a part of one
        (CALM, 1250, 50, 0),
        (CALM, 300, 2, 2),  # sandboxes take the places
        (HIGH, 300, 50, 0),
    ],
)
def test_room_is_what_budget_and_places_leave(pressure, held, free, room):
    ready_count = 3 if held else 0
    found = room_under(pressure, ready=ready_count, unit_bytes=100, held_bytes=held, budget_bytes=1000, free=free)
    assert found == room


def test_pressure_is_little_memory_or_long_waits(tmp_path: Path):
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)

    def read(*, free_mib: int, stalled: str = "0.00") -> Pressure:
        (proc / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {free_mib << 10} kB\n")
        (proc / "pressure/memory").write_text(f"some avg10={stalled} avg60=0.00 avg300=0.00 total=0\nfull …\n")
        return read_pressure(tmp_path, proc=proc)

    assert not read(free_mib=1 << 20).is_high
    assert "memory are free" in read(free_mib=100).why
    needed = max(512, memory_mib() // 16)
    assert "12.5 %" in read(free_mib=2 * needed - 1, stalled="12.50").why
    # A guest at its own limit waits for memory: that is no reason where the host has plenty.
    assert not read(free_mib=2 * needed, stalled="99.00").is_high
    (proc / "pressure/memory").unlink()
    assert not read_pressure(tmp_path, proc=proc).is_high


class Work:
    """Fills what it is told to, and notes when."""

    def __init__(self) -> None:
        self.short = [A]
        self.filled: list[Shape] = []
        self.changed = asyncio.Event()
        self.error: Exception | None = None

    async def plan(self) -> Plan:
        return Plan(surplus=[], short=self.short)

    async def fill(self, wanted: Shape) -> None:
        self.changed.set()
        if self.error is not None:
            raise self.error
        self.filled.append(wanted)
        self.short = []

    async def discard(self, record: Record) -> None:
        raise AssertionError(record)


async def test_nothing_is_made_while_a_create_goes_on():
    work = Work()
    keeper = Keeper(plan=work.plan, fill=work.fill, discard=work.discard, settle_s=0.0)
    keeper.begin_work()
    keeper.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert work.filled == []
    keeper.end_work()
    await work.changed.wait()
    assert work.filled == [A]
    await keeper.close()


async def test_a_look_waits_for_the_end_of_creates_but_not_for_ever():
    work = Work()
    planned = []

    async def plan():
        planned.append(1)
        return Plan(surplus=[], short=[])

    keeper = Keeper(plan=plan, fill=work.fill, discard=work.discard, settle_s=0.0, round_s=0.2)
    keeper.start()
    await until(lambda: planned)
    keeper.begin_work()
    planned.clear()
    keeper.ask()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not planned
    await until(lambda: planned)  # the create has not ended
    keeper.end_work()
    planned.clear()
    await until(lambda: planned)
    await keeper.close()


async def test_a_fill_that_fails_does_not_end_the_keeper():
    work = Work()
    work.error = OSError("no")
    keeper = Keeper(plan=work.plan, fill=work.fill, discard=work.discard, settle_s=0.0, retry_s=0.0)
    keeper.start()
    await work.changed.wait()
    work.error = None
    while not work.filled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await keeper.close()
