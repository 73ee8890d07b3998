"""What the reconciler decides, as a table of facts and records."""
# ruff: noqa: E501 - one row a case

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.server.decide import (
    Action,
    Expire,
    FailCreate,
    FinishCreate,
    FinishMove,
    FinishStop,
    Lose,
    Record,
    Remove,
    World,
    decide,
)
from cpuos.types.node import SandboxFacts
from cpuos.types.sandbox import LIVE_STATES, Isolation, SandboxState

S = SandboxState
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BEFORE, AFTER = NOW - timedelta(seconds=60), NOW + timedelta(seconds=60)
LISTED = NOW - timedelta(seconds=1)


def record(state: SandboxState, **changes: Any) -> Record:
    values = {"changed_at": BEFORE, "deadline_at": None, "expires_at": AFTER, "timeout_s": 900.0, "busy": False}
    return Record(id="a", state=state, **{"generation": 2, **values, **changes})


def facts(
    *, alive: bool = True, generation: int = 2, reason: str = "out of memory", paused: bool = False
) -> SandboxFacts:
    return SandboxFacts(
        id="a",
        generation=generation,
        alive=alive,
        exit_reason="" if alive else reason,
        paused=paused,
        runtime="gvisor",
        isolation=Isolation.GVISOR,
        isolation_detail="",
        template="python",
        template_digest="",
    )


def world(one: Record | None, *told: SandboxFacts, listed: bool, unowned_for_s: float = 0) -> World:
    return World(
        now=NOW,
        records={one.id: one} if one else {},
        facts=told,
        listed_at=LISTED if listed else None,
        unowned_since={"a": NOW - timedelta(seconds=unowned_for_s)},
        unowned_grace=timedelta(seconds=30),
    )


A2: dict[str, Any] = {"id": "a", "generation": 2}
GONE = "the node has it no more"
TABLE: list[tuple[str, World, list[Action]]] = [
    ("running and alive", world(record(S.RUNNING), facts(), listed=True), []),
    ("running and dead", world(record(S.RUNNING), facts(alive=False), listed=False), [Lose(**A2, reason="out of memory")]),
    ("running, not told of", world(record(S.RUNNING), listed=False), []),
    ("running, not in the list", world(record(S.RUNNING), listed=True), [Lose(**A2, reason=GONE)]),
    ("running since after the list", world(record(S.RUNNING, changed_at=NOW), listed=True), []),
    ("running, node has an older one", world(record(S.RUNNING), facts(generation=1), listed=True), [Lose(**A2, reason=GONE), Remove(id="a", generation=1)]),
    ("running, older one died", world(record(S.RUNNING), facts(alive=False, generation=1), listed=False), []),
    ("running, time over", world(record(S.RUNNING, expires_at=NOW), listed=False), [Expire(**A2, reason="its time of 15m ended")]),
    ("dead and time over", world(record(S.RUNNING, expires_at=NOW), facts(alive=False), listed=False), [Lose(**A2, reason="out of memory")]),
    ("paused, time over", world(record(S.PAUSED, expires_at=NOW, timeout_s=5400), listed=False), [Expire(**A2, reason="its time of 1h30m ended")]),
    ("paused, paused there", world(record(S.PAUSED, expires_at=None), facts(paused=True), listed=True), []),
    ("paused, gone", world(record(S.PAUSED, expires_at=None), listed=True), [Lose(**A2, reason=GONE)]),
    ("paused since after the list", world(record(S.PAUSED, expires_at=None, changed_at=NOW), listed=True), []),
    ("paused, its resume came late", world(record(S.PAUSED, expires_at=None), facts(), listed=True), [FinishMove(**A2)]),
    ("paused, being resumed", world(record(S.PAUSED, expires_at=None, busy=True), facts(alive=False), listed=True), []),
    ("running, paused there", world(record(S.RUNNING), facts(paused=True), listed=True), [FinishMove(**A2)]),
    ("running, being paused, paused there", world(record(S.RUNNING, busy=True), facts(paused=True), listed=True), []),
    ("pausing, at work", world(record(S.PAUSING, busy=True), facts(alive=False), listed=True), []),
    ("pausing, left, not told of", world(record(S.PAUSING), listed=False), [FinishMove(**A2)]),
    ("pausing, left, runs", world(record(S.PAUSING), facts(), listed=True), [FinishMove(**A2)]),
    ("pausing, left, paused", world(record(S.PAUSING, expires_at=NOW), facts(paused=True), listed=True), [FinishMove(**A2)]),
    ("pausing, left, dead", world(record(S.PAUSING), facts(alive=False), listed=False), [Lose(**A2, reason="out of memory")]),
    ("pausing, left, gone", world(record(S.PAUSING), listed=True), [Lose(**A2, reason=GONE)]),
    ("pausing, left for long after its time", world(record(S.PAUSING, expires_at=BEFORE), listed=False), [Expire(**A2, reason="its time of 15m ended")]),
    ("resuming, at work", world(record(S.RESUMING, expires_at=None, busy=True), facts(paused=True), listed=True), []),
    ("resuming, left", world(record(S.RESUMING, expires_at=None), facts(paused=True), listed=True), [FinishMove(**A2)]),
    ("resuming, left, dead", world(record(S.RESUMING, expires_at=None), facts(alive=False), listed=False), [Lose(**A2, reason="out of memory")]),
    ("stopping", world(record(S.STOPPING), listed=False), [FinishStop(**A2)]),
    ("stopping, at work", world(record(S.STOPPING, busy=True), facts(), listed=True), []),
    ("creating, at work", world(record(S.CREATING, busy=True), listed=True), []),
    ("creating, at work, dead", world(record(S.CREATING, busy=True), facts(alive=False), listed=False), [Lose(**A2, reason="out of memory")]),
    ("creating, at work, late", world(record(S.CREATING, busy=True, deadline_at=NOW), facts(), listed=False), [Lose(**A2, reason="it was not ready in time")]),
    ("creating, left, on the node", world(record(S.CREATING), facts(), listed=True), [FinishCreate(**A2)]),
    ("creating, left, dead", world(record(S.CREATING), facts(alive=False), listed=False), [FailCreate(**A2, reason="it died while it started: out of memory")]),
    ("creating, left, not made", world(record(S.CREATING), listed=True), [FailCreate(**A2, reason="the server was restarted before the node had made it")]),
    ("creating, left, node silent", world(record(S.CREATING), listed=False), []),
    ("creating, left, node silent, late", world(record(S.CREATING, deadline_at=NOW), listed=False), [FailCreate(**A2, reason="the server was restarted before the node had made it")]),
    ("stopped, still on the node", world(record(S.STOPPED), facts(), listed=True), [Remove(**A2)]),
    ("stopped, told of", world(record(S.STOPPED), facts(), listed=False), []),
    ("failed, dead on the node", world(record(S.FAILED), facts(alive=False), listed=True), [Remove(**A2)]),
    ("lost, being tidied", world(record(S.LOST, busy=True), facts(alive=False), listed=True), []),
    ("unknown, just seen", world(None, facts(), listed=True, unowned_for_s=1), []),
    ("unknown, for long", world(None, facts(), listed=True, unowned_for_s=30), [Remove(**A2)]),
    ("unknown, only told of", world(None, facts(), listed=False, unowned_for_s=99), []),
]  # fmt: skip


@pytest.mark.parametrize(("state", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_decision(state: World, wanted: list[Action]) -> None:
    assert decide(state) == wanted


@given(
    state=st.sampled_from(SandboxState),
    told=st.none() | st.builds(facts, alive=st.booleans(), generation=st.integers(1, 3)),
    listed=st.booleans(),
    busy=st.booleans(),
    expires_at=st.sampled_from([BEFORE, AFTER]),
    deadline_at=st.sampled_from([None, BEFORE, AFTER]),
)
def test_any_decision_keeps_what_is_well(
    state: SandboxState,
    told: SandboxFacts | None,
    listed: bool,
    busy: bool,
    expires_at: datetime,
    deadline_at: datetime | None,
) -> None:
    one = record(state, busy=busy, expires_at=expires_at, deadline_at=deadline_at)
    actions = decide(world(one, *([told] if told else []), listed=listed))
    well = told is not None and told.alive and told.generation == 2 and expires_at > NOW and state in LIVE_STATES
    for action in actions:
        assert action.generation == (told.generation if isinstance(action, Remove) and told else 2)
        if isinstance(action, Remove):
            assert state not in LIVE_STATES or (told is not None and told.generation < 2)
        if well and state is S.RUNNING:
            pytest.fail(f"{action} for a running sandbox that is alive")
    assert len([action for action in actions if not isinstance(action, Remove)]) <= 1
