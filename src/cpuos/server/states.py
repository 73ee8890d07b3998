"""The one state table: in which state which verb leads to which state."""

from __future__ import annotations

from enum import StrEnum

from cpuos.errors import Conflict, CpuosError, SandboxGone
from cpuos.types.sandbox import SandboxState

__all__ = ["REACHABLE_STATES", "TRANSITIONAL_STATES", "TRANSITIONS", "Verb", "next_state", "sources", "unusable"]


class Verb(StrEnum):
    STARTED = "started"
    """The sandbox runs and its agent has answered."""
    FAIL = "fail"
    """It never ran; all that was made of it is undone."""
    STOP = "stop"
    """Kill was asked, or its time ended."""
    STOPPED = "stopped"
    """Nothing is left of it on the node."""
    LOSE = "lose"
    """It died without being asked to."""
    PAUSE = "pause"
    PAUSED = "paused"
    """Only files are left of it on the node."""
    UNPAUSE = "unpause"
    """It was not paused, or was only held for a snapshot: it runs on."""
    RESUME = "resume"
    RESUMED = "resumed"
    """Its processes go on and its agent has answered."""
    REPAUSE = "repause"
    """It could not be resumed, and is as it was."""
    RECREATE = "recreate"
    """Same id, next generation, from what was saved."""
    GIVE_UP = "give_up"
    """It could not be made anew: it is lost as it was."""


S = SandboxState
TRANSITIONS: dict[SandboxState, dict[Verb, SandboxState]] = {
    S.CREATING: {Verb.STARTED: S.RUNNING, Verb.FAIL: S.FAILED, Verb.STOP: S.STOPPING, Verb.GIVE_UP: S.LOST},
    S.RUNNING: {Verb.STOP: S.STOPPING, Verb.LOSE: S.LOST, Verb.PAUSE: S.PAUSING},
    S.PAUSING: {
        Verb.PAUSED: S.PAUSED,
        Verb.UNPAUSE: S.RUNNING,
        Verb.STOP: S.STOPPING,
        Verb.LOSE: S.LOST,
    },
    S.PAUSED: {Verb.RESUME: S.RESUMING, Verb.STOP: S.STOPPING, Verb.LOSE: S.LOST},
    S.RESUMING: {
        Verb.RESUMED: S.RUNNING,
        Verb.REPAUSE: S.PAUSED,
        Verb.STOP: S.STOPPING,
        Verb.LOSE: S.LOST,
    },
    S.STOPPING: {Verb.STOPPED: S.STOPPED},
    S.STOPPED: {},
    S.FAILED: {},
    S.LOST: {Verb.RECREATE: S.CREATING},
}

TRANSITIONAL_STATES = frozenset({S.CREATING, S.PAUSING, S.RESUMING, S.STOPPING})
"""States that some work must end; the reconciler sees to it that they do."""

REACHABLE_STATES = frozenset({S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING})
"""Calls have a way in: the gateway lets them wait until a paused one runs again."""


def next_state(state: SandboxState, verb: Verb) -> SandboxState | None:
    """Where the verb leads from here; None when it is not allowed here."""
    return TRANSITIONS[state].get(verb)


def sources(verb: Verb) -> frozenset[SandboxState]:
    """The states that allow the verb."""
    return frozenset(state for state, verbs in TRANSITIONS.items() if verb in verbs)


def unusable(ref: str, state: SandboxState, *, reason: str, action: str) -> CpuosError:
    """Why an action that needs a running sandbox cannot be done in this state."""
    what = f"cannot {action}: sandbox {ref} is {state.value}"
    if state is SandboxState.LOST:
        return SandboxGone(what, reason, code="sandbox_lost", hint=f"cpuos recreate {ref}")
    if state in (SandboxState.STOPPING, SandboxState.STOPPED):
        return SandboxGone(what, reason, code="sandbox_stopped", hint="cpuos create")
    return Conflict(what, reason, hint=f"cpuos ls --all --json | grep {ref}", details={"state": state.value})
