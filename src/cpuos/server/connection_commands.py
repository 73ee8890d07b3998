"""Which command a connection belongs to: the one that ran at that moment, where it was the only one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.db.models import AuditRow
from cpuos.types.audit import AuditPhase
from cpuos.types.network import Connection

__all__ = ["Run", "only_runs", "with_commands"]

Run = tuple[str, datetime, datetime | None]
"""A command, when it began, and when it had ended; None: it runs, or nobody knows."""

_starts = AuditRow.__table__.alias("starts")
_ends = AuditRow.__table__.alias("ends")
_RUNS = select(_starts.c.target, _starts.c.at, _ends.c.at).join_from(
    _starts,
    _ends,
    and_(_ends.c.intent_id == _starts.c.id, _ends.c.phase == AuditPhase.OUTCOME.value),
    isouter=True,
)


async def with_commands(
    connection: AsyncConnection, workspace: str, *, sandbox: str, connections: Sequence[Connection]
) -> list[Connection]:
    """The connections with their commands. Read off the audit, which tells of a command from before its start to
    after its end: what the guest says of its processes counts for nothing."""
    if not connections:
        return []
    moments = [one.at for one in connections]
    statement = _RUNS.where(
        _starts.c.workspace == workspace,
        _starts.c.sandbox == sandbox,
        _starts.c.action == "command.start",
        _starts.c.phase == AuditPhase.INTENT.value,
        _starts.c.at <= max(moments),
        or_(_ends.c.at.is_(None), _ends.c.at >= min(moments)),
    )
    runs = [(target, began, ended) for target, began, ended in (await connection.execute(statement)).all()]
    commands = only_runs(runs, moments)
    return [
        one if one.command is not None or command is None else one.model_copy(update={"command": command})
        for one, command in zip(connections, commands, strict=True)
    ]


def only_runs(runs: Iterable[Run], moments: Iterable[datetime]) -> list[str | None]:
    """For each moment the command that ran then; None where none or several did."""
    turns = sorted(
        turn
        for command, began, ended in runs
        for turn in ((began, 0, command), *(() if ended is None else ((ended, 1, command),)))
    )
    running: set[str] = set()
    times: list[datetime] = []
    only: list[str | None] = []
    for at, ends, command in turns:
        (running.discard if ends else running.add)(command)
        times.append(at)
        only.append(next(iter(running)) if len(running) == 1 else None)
    return [only[place - 1] if (place := bisect_right(times, moment)) else None for moment in moments]
