"""audit: who did what to which sandbox, with its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, current_output

if TYPE_CHECKING:
    from cpuos import Client
    from cpuos.types.audit import AuditEntry

__all__ = ["list_audit", "register"]


def register(app: typer.Typer) -> None:
    app.command("audit")(list_audit)


def list_audit(
    ctx: typer.Context,
    sandbox: Annotated[str | None, typer.Option("--sandbox", "-s", help="Only this sandbox.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, such as command.start.")] = None,
    after: Annotated[int | None, typer.Option(help="Those that follow this id, instead of the newest.", min=0)] = None,
    limit: Annotated[int, typer.Option(help="Most entries to show.", min=1, max=1000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show who did what, and with what outcome.

    Each action has an intent row, written before it, and an outcome row after it.
    """
    from cpuos import Client

    output = current_output(ctx)
    with Client() as client:
        entries = _read_entries(client, sandbox=sandbox, action=action, after=after, limit=limit)
    if output.json:
        output.data({"entries": entries})
        return
    rows = [
        (
            entry.id,
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.actor,
            entry.action,
            entry.target,
            entry.phase if entry.result is None else entry.result,
            " ".join(f"{key}={value}" for key, value in entry.detail.items() if value not in (None, "", [])),
        )
        for entry in entries
    ]
    output.table(("ID", "AT (UTC)", "ACTOR", "ACTION", "TARGET", "RESULT", "DETAIL"), rows, empty="no entry")


def _read_entries(
    client: Client, *, sandbox: str | None, action: str | None, after: int | None, limit: int
) -> Sequence[AuditEntry]:
    """One page after an id; without one the last page, which the API reaches from the front."""
    if after is not None:
        return client.audit(sandbox=sandbox, action=action, after=after, limit=limit).entries
    newest: deque[AuditEntry] = deque(maxlen=limit)
    position: int | None = 0
    while position is not None:
        page = client.audit(sandbox=sandbox, action=action, after=position, limit=1000)
        newest.extend(page.entries)
        position = page.next_after if page.entries else None
    return list(newest)
