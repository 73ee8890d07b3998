"""The state table as a whole."""

from __future__ import annotations

import pytest

from cpuos.server.states import TRANSITIONAL_STATES, TRANSITIONS, Verb, next_state, sources, unusable
from cpuos.types.sandbox import LIVE_STATES, SandboxState

S = SandboxState


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(SandboxState)


@pytest.mark.parametrize("state", sorted(LIVE_STATES - {S.STOPPING}))
def test_every_live_state_can_be_stopped(state: SandboxState) -> None:
    assert next_state(state, Verb.STOP) is S.STOPPING


@pytest.mark.parametrize("state", sorted(set(SandboxState) - LIVE_STATES))
def test_ended_states_stay_ended(state: SandboxState) -> None:
    assert set(TRANSITIONS[state]) <= {Verb.RECREATE}


@pytest.mark.parametrize("state", sorted(LIVE_STATES))
def test_every_live_state_can_end(state: SandboxState) -> None:
    reached, todo = set(), {state}
    while todo:
        reached |= todo
        todo = {after for before in todo for after in TRANSITIONS[before].values()} - reached
    assert S.STOPPED in reached


def test_only_create_fails_and_only_what_ran_is_lost() -> None:
    assert sources(Verb.FAIL) == {S.CREATING}
    assert S.CREATING not in sources(Verb.LOSE)
    assert (sources(Verb.RECREATE), sources(Verb.GIVE_UP)) == ({S.LOST}, {S.CREATING})
    assert S.STOPPING not in sources(Verb.LOSE)


def test_transitional_states_are_live_and_have_a_way_on() -> None:
    assert TRANSITIONAL_STATES <= LIVE_STATES
    assert all(TRANSITIONS[state] for state in TRANSITIONAL_STATES)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.CREATING, "wrong_state"),
        (S.PAUSED, "wrong_state"),
        (S.FAILED, "wrong_state"),
        (S.STOPPING, "sandbox_stopped"),
        (S.STOPPED, "sandbox_stopped"),
        (S.LOST, "sandbox_lost"),
    ],
)
def test_each_unusable_state_has_its_code(state: SandboxState, code: str) -> None:
    error = unusable("abc", state, reason="because", action="reach sandbox")
    assert error.code == code
    assert error.what == f"cannot reach sandbox: sandbox abc is {state.value}"
    assert error.why == "because"
