"""What a tick of the reconciler reads: of many that are known those of which something is due, and no other."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta

from sqlalchemy import update

from control_plane import Server
from cpuos.server.db.models import SandboxRow
from cpuos.server.db.sandboxes import due_rows, live_rows
from cpuos.server.decide import Record, World, decide
from cpuos.types.sandbox import LIVE_STATES, SandboxState

TIMES = [None, timedelta(seconds=-600), timedelta(seconds=-1), timedelta(0), timedelta(seconds=1)]


def actions(rows, now: datetime):
    records = {
        row.id: Record(
            id=row.id,
            generation=row.generation,
            state=SandboxState(row.state),
            changed_at=row.changed_at,
            deadline_at=row.deadline_at,
            expires_at=row.expires_at,
            timeout_s=row.timeout_s,
            busy=busy,
        )
        for row in rows
        for busy in [row.max_processes == 1]
    }
    quiet = {"facts": [], "listed_at": None, "unowned_since": {}, "unowned_grace": timedelta(seconds=30)}
    return {action.id: action for action in decide(World(now=now, records=records, **quiet))}


async def set_rows(server: Server, kinds, now: datetime) -> None:
    database = server.plane.database
    async with database.read() as connection:
        ids = [row.id for row in await live_rows(connection)]
    for sandbox_id, (state, expires, deadline, busy) in zip(ids, kinds, strict=True):
        values = {
            "state": state.value,
            "expires_at": None if expires is None else now + expires,
            "deadline_at": None if deadline is None else now + deadline,
            "max_processes": 1 if busy else 512,
        }
        async with database.write() as connection:
            await connection.execute(update(SandboxRow).where(SandboxRow.id == sandbox_id).values(**values))


async def test_a_tick_decides_by_those_that_are_due_as_by_all(server: Server) -> None:
    await server.plane.reconciler.stop()
    now = server.installation.clock()
    live = sorted(LIVE_STATES)
    cases = list(itertools.product(live, TIMES, [None, *TIMES[1:]], [False, True]))
    made = [await server.created(timeout_s=9000) for _ in range(10)]
    decided = 0
    for start in range(0, len(cases), len(made)):
        await set_rows(server, cases[start : start + len(made)], now)
        async with server.plane.database.read() as connection:
            everything, due = await live_rows(connection), await due_rows(connection, now=now)
        assert actions(due, now) == actions(everything, now)
        decided += len(actions(due, now))
        at_rest = [row for row in due if row.state in ("running", "paused")]
        assert all(row.expires_at is not None and row.expires_at <= now for row in at_rest)
    assert decided > 50
