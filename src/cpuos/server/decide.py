"""What the reconciler has to do: a pure function of records and facts, tested as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cpuos.types.node import SandboxFacts
from cpuos.types.sandbox import LIVE_STATES, SandboxState

__all__ = [
    "Action",
    "Expire",
    "FailCreate",
    "FinishCreate",
    "FinishMove",
    "FinishStop",
    "Lose",
    "Record",
    "Remove",
    "World",
    "decide",
    "session_over",
]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A sandbox as its row has it."""

    id: str
    generation: int
    state: SandboxState
    changed_at: datetime
    deadline_at: datetime | None
    expires_at: datetime | None
    timeout_s: float
    busy: bool
    """Work of this process is at it: only news of its death matters to that."""


@dataclass(frozen=True, kw_only=True)
class World:
    now: datetime
    records: Mapping[str, Record]
    """All live ones, and those of ended ones that are among the facts."""
    facts: Sequence[SandboxFacts]
    listed_at: datetime | None
    """When the node was asked for all its sandboxes; None: `facts` are only some, absence says nothing."""
    unowned_since: Mapping[str, datetime]
    unowned_grace: timedelta
    moving_grace: timedelta = timedelta(seconds=60)
    """So long after its time one may still be between two states, before it is ended all the same."""


@dataclass(frozen=True, kw_only=True)
class Action:
    id: str
    generation: int


@dataclass(frozen=True, kw_only=True)
class Lose(Action):
    reason: str


@dataclass(frozen=True, kw_only=True)
class FailCreate(Action):
    reason: str


class FinishCreate(Action):
    """It runs on the node; its create was left by an earlier process."""


class FinishStop(Action):
    pass


class FinishMove(Action):
    """Its pause or resume was left undecided, or the node has it in another way than its record says."""


@dataclass(frozen=True, kw_only=True)
class Expire(Action):
    reason: str


class Remove(Action):
    """The node has it and no live record owns it."""


def decide(world: World) -> list[Action]:
    """At most one action a sandbox; each is safe to repeat."""
    told = {facts.id: facts for facts in world.facts}
    actions = [_on_record(world, record, told.get(record.id)) for record in world.records.values()]
    actions += [_on_node(world, facts) for facts in world.facts]
    return [action for action in actions if action is not None]


def _on_record(world: World, record: Record, facts: SandboxFacts | None) -> Action | None:
    if record.state not in LIVE_STATES:
        return None
    which = {"id": record.id, "generation": record.generation}
    same = facts is not None and facts.generation == record.generation
    dead = same and not facts.alive
    reason = (facts.exit_reason or "its process ended") if dead else "the node has it no more"
    if record.state is SandboxState.STOPPING:
        return None if record.busy else FinishStop(**which)
    gone = not same and world.listed_at is not None and record.changed_at < world.listed_at
    late = record.deadline_at is not None and record.deadline_at <= world.now
    if record.state is SandboxState.CREATING:
        if record.busy:
            if dead or late:
                return Lose(**which, reason=reason if dead else "it was not ready in time")
            return None
        if same and not dead:
            return FinishCreate(**which)
        if dead:
            return FailCreate(**which, reason=f"it died while it started: {reason}")
        if gone or late:
            return FailCreate(**which, reason="the server was restarted before the node had made it")
        return None
    moving = record.state in (SandboxState.PAUSING, SandboxState.RESUMING)
    if record.busy and (moving or record.state is SandboxState.PAUSED):
        return None  # what works at it looks itself
    if dead or gone:
        return Lose(**which, reason=reason)
    if moving and (record.expires_at is None or world.now < record.expires_at + world.moving_grace):
        return FinishMove(**which)
    if same and not record.busy and facts.paused is (record.state is SandboxState.RUNNING):
        return FinishMove(**which)
    if record.expires_at is not None and record.expires_at <= world.now:
        return Expire(**which, reason=session_over(record.timeout_s))
    return None


def session_over(timeout_s: float) -> str:
    """The reason of one whose session ended."""
    return f"its time of {_duration(timeout_s)} ended"


def _on_node(world: World, facts: SandboxFacts) -> Action | None:
    record = world.records.get(facts.id)
    remove = Remove(id=facts.id, generation=facts.generation)
    if record is None:
        since = world.unowned_since.get(facts.id, world.now)
        return remove if world.listed_at is not None and world.now - since >= world.unowned_grace else None
    if record.busy or facts.generation > record.generation:
        return None
    ended = record.state not in LIVE_STATES
    # What is dead and ended is gone at the node already, or goes with the delete that its end sent.
    return remove if (ended or facts.generation < record.generation) and world.listed_at is not None else None


def _duration(seconds: float) -> str:
    """As a person writes it: 15m, 1h30m, 45s."""
    if seconds < 60 or seconds != int(seconds):
        return f"{seconds:g}s"
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number)
