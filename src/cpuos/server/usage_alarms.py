"""Alarms of sandboxes: what they use is looked at now and then. When it is over a rule, and when it is not any more,
that is told, and the rule's action is taken.

The rules of installation, workspace and sandbox hold each by itself, so that none can loosen another. An alarm that
goes on is on record with its sandbox; the windows are this process's own, and one that has just begun knows nothing of
before: it is late by a window at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Row, String, cast, select, update

from cpuos.errors import CpuosError
from cpuos.scheduler.base import Scheduler
from cpuos.server.alarm_actions import AlarmActions
from cpuos.server.audit import SYSTEM, Audit
from cpuos.server.clock import Clock
from cpuos.server.connections import ConnectionIngest
from cpuos.server.db.database import Database
from cpuos.server.db.models import SandboxRow, Workspace
from cpuos.server.db.sandboxes import find_sandboxes, live_rows, row_of
from cpuos.server.episodes import Episode, Seen
from cpuos.server.tasks import Tasks
from cpuos.server.windows import Window
from cpuos.types.alarms import AlarmAction, AlarmMeasure, AlarmOrigin, AlarmRule, WorkspaceAlarms
from cpuos.types.audit import AuditResult
from cpuos.types.node import SandboxUsage
from cpuos.types.sandbox import SandboxState

__all__ = ["UsageAlarms"]

_log = structlog.get_logger("cpuos.server.alarms")
_rows = SandboxRow.__table__
_workspaces = Workspace.__table__
# Until its pause is done its programs may run: an agent that answers nobody would hold it there.
_RUNS = frozenset({SandboxState.RUNNING.value, SandboxState.PAUSING.value})
_ACTIVE = select(_rows.c.id).where(cast(_rows.c.active_alarms, String) != "[]")


@dataclass(kw_only=True)
class _Watched:
    """One sandbox, as this process saw it."""

    generation: int
    is_new: bool
    """No look has been taken at it, since it was made."""
    windows: dict[tuple[AlarmMeasure, float], Window] = field(default_factory=dict)
    totals: dict[AlarmMeasure, float] = field(default_factory=dict)


class UsageAlarms:
    def __init__(
        self,
        *,
        database: Database,
        scheduler: Scheduler,
        connections: ConnectionIngest,
        actions: AlarmActions,
        audit: Audit,
        tasks: Tasks,
        clock: Clock,
        installation: Sequence[AlarmRule],
        node: str = "",
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._connections = connections
        self._actions = actions
        self._audit = audit
        self._tasks = tasks
        self._clock = clock
        self._installation = list(installation)
        self._node = node
        self._watched: dict[str, _Watched] = {}
        self._alarmed: set[str] | None = None
        """Sandboxes with an alarm that goes on, as far as this process knows; None: not looked up yet."""

    # --- the rules of a workspace ---

    async def get(self, workspace: str) -> WorkspaceAlarms:
        rules = (await self._workspace_rules([workspace]))[workspace]
        return WorkspaceAlarms(rules=rules, installation=self._installation)

    async def update(self, workspace: str, rules: Sequence[AlarmRule]) -> None:
        """They hold from the next look on, for all sandboxes that are there too."""
        kept = [rule.model_dump(mode="json") for rule in rules]
        async with self._database.write() as connection:
            await connection.execute(update(_workspaces).where(_workspaces.c.id == workspace).values(alarms=kept))

    async def _workspace_rules(self, workspaces: Collection[str]) -> dict[str, list[AlarmRule]]:
        statement = select(_workspaces.c.id, _workspaces.c.alarms).where(_workspaces.c.id.in_(workspaces))
        async with self._database.read() as connection:
            found = (await connection.execute(statement)).all()
        return {row.id: _rules_of(row.alarms) for row in found}

    # --- a look ---

    async def look(self) -> None:
        """A step of the reconciler."""
        async with self._database.read() as connection:
            rows = {row.id: row for row in await live_rows(connection)}
            if self._alarmed is None:
                self._alarmed = set((await connection.execute(_ACTIVE)).scalars().all())
            self._alarmed |= {row.id for row in rows.values() if row.active_alarms}
            ended = await find_sandboxes(connection, list(self._alarmed - rows.keys()))
        self._forget(rows.keys())
        for row in ended:
            await self._end(row, _episodes(row), why=f"the sandbox is {row.state}")
        usage = await self._usage(rows)
        workspaces = await self._workspace_rules({row.workspace for row in rows.values()})
        for row in rows.values():
            rules = self._rules(row, workspaces.get(row.workspace, []))
            await self._look_at(row, rules, usage.get(row.id))

    async def _usage(self, rows: dict[str, Row[Any]]) -> dict[str, SandboxUsage]:
        if all(row.state not in _RUNS for row in rows.values()):
            return {}
        return {used.id: used for used in await self._scheduler.client(self._node).usage()}

    def _rules(self, row: Row[Any], workspace: Sequence[AlarmRule]) -> dict[tuple[AlarmOrigin, str], AlarmRule]:
        layers: list[tuple[AlarmOrigin, Sequence[AlarmRule]]] = [
            ("installation", self._installation),
            ("workspace", workspace),
            ("sandbox", _rules_of(row.alarms)),
        ]
        return {(origin, rule.text): rule for origin, rules in layers for rule in rules}

    async def _look_at(
        self, row: Row[Any], rules: dict[tuple[AlarmOrigin, str], AlarmRule], used: SandboxUsage | None
    ) -> None:
        """`used`: what its node has counted, where it runs there."""
        episodes = {episode.key: episode for episode in _episodes(row)}
        stale = [one for one in episodes.values() if one.generation != row.generation]
        gone = [one for key, one in episodes.items() if key not in rules and one not in stale]
        await self._end(row, stale, why="the sandbox was made anew")
        await self._end(row, gone, why="the rule does not hold any more")
        going_on = {key: one for key, one in episodes.items() if one not in stale and one not in gone}
        if row.state == SandboxState.PAUSED.value and any(_pauses(one) for one in going_on.values()):
            # An earlier process paused it for this and was ended before it could say so.
            await self._over(row, why="the sandbox was paused")
        if row.state not in _RUNS or used is None or used.generation != row.generation:
            return
        seen = self._see(row, rules, used)
        for key, one in seen.items():
            if one.is_over and key not in going_on:
                going_on[key] = begins = self._episode(row, key[0], rules[key], one)
                await self._begin(row, begins)
            elif key in going_on and one.is_whole and not one.is_over and self._is_old(going_on[key]):
                await self._end(row, [going_on.pop(key)], why="it is below the limit again")
        self._act(row, [one for one in going_on.values() if one.rule.action is not AlarmAction.AUDIT])

    def _see(
        self, row: Row[Any], rules: dict[tuple[AlarmOrigin, str], AlarmRule], used: SandboxUsage
    ) -> dict[tuple[AlarmOrigin, str], Seen]:
        watched = self._watch(row)
        before = watched.totals
        watched.totals = {
            AlarmMeasure.CPU: used.cpu_seconds,
            AlarmMeasure.SENT: float(used.sent_bytes),
            AlarmMeasure.CONNECTIONS: float(self._connections.opened[row.id]),
        }
        needed = {(rule.measure, rule.window_s) for rule in rules.values()}
        watched.windows = {key: watched.windows.get(key) or Window(key[1]) for key in needed}
        if watched.is_new:
            watched.is_new = False
            self._add_beginnings(row, watched, used, opened_before=before.get(AlarmMeasure.CONNECTIONS, 0))
        within = {key: window.add(used.ran_s, watched.totals[key[0]]) for key, window in watched.windows.items()}
        return {
            key: Seen(
                used=within[rule.measure, rule.window_s],
                limit=rule.limit * (row.cpu * rule.window_s if rule.measure is AlarmMeasure.CPU else 1),
                total=watched.totals[rule.measure],
                is_whole=watched.windows[rule.measure, rule.window_s].is_whole,
            )
            for key, rule in rules.items()
        }

    def _watch(self, row: Row[Any]) -> _Watched:
        known = self._watched.get(row.id)
        if known is None:
            known = self._watched[row.id] = _Watched(generation=row.generation, is_new=row.resumed_from is None)
        elif known.generation != row.generation:
            # Its connections go on being counted; all else begins at nothing.
            totals = {measure: used for measure, used in known.totals.items() if measure is AlarmMeasure.CONNECTIONS}
            known = self._watched[row.id] = _Watched(generation=row.generation, is_new=True, totals=totals)
        return known

    def _add_beginnings(self, row: Row[Any], watched: _Watched, used: SandboxUsage, *, opened_before: float) -> None:
        """What it has used before the first look counts, in each window that reaches back to its beginning."""
        age_s = min(used.ran_s, max(0.0, (self._clock() - row.created_at).total_seconds()))
        for (measure, length_s), window in watched.windows.items():
            if age_s <= length_s:
                window.add(used.ran_s - age_s, opened_before if measure is AlarmMeasure.CONNECTIONS else 0.0)

    def _episode(self, row: Row[Any], origin: AlarmOrigin, rule: AlarmRule, seen: Seen) -> Episode:
        return Episode(
            origin=origin,
            rule=rule,
            since=self._clock(),
            generation=row.generation,
            used=seen.used,
            total=seen.total,
        )

    def _is_old(self, episode: Episode) -> bool:
        """What goes up and down around its limit is told once a window."""
        return (self._clock() - episode.since).total_seconds() >= episode.rule.window_s

    def _act(self, row: Row[Any], episodes: list[Episode]) -> None:
        """What kills comes before what pauses."""
        chosen = sorted(episodes, key=lambda one: one.rule.action is not AlarmAction.KILL)
        if chosen:
            self._tasks.share(row.id, "alarm", self._take_action(row, chosen[0]))

    async def _take_action(self, row: Row[Any], episode: Episode) -> None:
        try:
            await self._actions.take(row, episode)
        except CpuosError as error:
            _log.warning("action of an alarm put off", sandbox=row.id, rule=episode.rule.text, error=str(error))
            return
        await self._over(row, why=f"the sandbox was {'killed' if _kills(episode) else 'paused'}")

    # --- the record ---

    async def _begin(self, row: Row[Any], episode: Episode) -> None:
        async with self._database.write() as connection:
            current = await row_of(connection, row.id)
            if current is None or (current.state, current.generation) != (row.state, row.generation):
                return
            known = _episodes(current)
            if any(one.key == episode.key for one in known):
                return  # another server has said so
            await self._set(connection, row, [*known, episode])
            detail = episode.told_at_begin(cpu=row.cpu)
            await self._note(connection, row, "alarm.begin", result=AuditResult.ERROR, detail=detail)
        assert self._alarmed is not None
        self._alarmed.add(row.id)
        _log.warning("alarm", sandbox=row.id, **detail)

    async def _over(self, row: Row[Any], *, why: str) -> None:
        """An alarm has ended its running: all of its alarms end, and it begins anew when it is resumed."""
        async with self._database.read() as connection:
            current = await row_of(connection, row.id)
        await self._end(row, _episodes(current) if current is not None else [], why=why)
        if (watched := self._watched.get(row.id)) is not None:
            watched.windows.clear()

    async def _end(self, row: Row[Any], episodes: Sequence[Episode], *, why: str) -> None:
        if not episodes:
            return
        watched = self._watched.get(row.id)
        keys = {episode.key for episode in episodes}
        async with self._database.write() as connection:
            current = await row_of(connection, row.id)
            known = _episodes(current) if current is not None else []
            left = [one for one in known if one.key not in keys]
            await self._set(connection, row, left)
            for episode in known:
                if episode.key not in keys:
                    continue
                same = watched is not None and watched.generation == episode.generation
                total = watched.totals.get(episode.rule.measure) if watched is not None and same else None
                detail = episode.told_at_end(why=why, now=self._clock(), total=total)
                await self._note(connection, row, "alarm.end", result=AuditResult.OK, detail=detail)
                _log.info("alarm over", sandbox=row.id, **detail)
        if self._alarmed is not None and not left:
            self._alarmed.discard(row.id)
            self._actions.forget(row.id)

    async def _set(self, connection: Any, row: Row[Any], episodes: Sequence[Episode]) -> None:
        kept = [one.kept() for one in episodes]
        await connection.execute(update(_rows).where(_rows.c.id == row.id).values(active_alarms=kept))

    async def _note(
        self, connection: Any, row: Row[Any], action: str, *, result: AuditResult, detail: dict[str, Any]
    ) -> None:
        await self._audit.note(
            connection,
            workspace=row.workspace,
            actor=SYSTEM,
            action=action,
            target=row.id,
            sandbox=row.id,
            result=result,
            detail=detail,
        )

    def _forget(self, live: Collection[str]) -> None:
        """What is known of sandboxes that have ended, but of those whose last alarm is still to be told."""
        kept = set(live) | (self._alarmed or set())
        for known in (self._watched, self._connections.opened):
            for sandbox_id in [one for one in known if one not in kept]:
                del known[sandbox_id]


def _rules_of(kept: Sequence[dict[str, Any]]) -> list[AlarmRule]:
    return [AlarmRule.model_validate(rule) for rule in kept]


def _episodes(row: Row[Any]) -> list[Episode]:
    return [Episode.model_validate(one) for one in row.active_alarms]


def _kills(episode: Episode) -> bool:
    return episode.rule.action is AlarmAction.KILL


def _pauses(episode: Episode) -> bool:
    return episode.rule.action is AlarmAction.PAUSE
