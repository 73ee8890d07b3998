"""audit: who did what to which sandbox, with its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import connected

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
    connections: Annotated[
        str | None, typer.Option("--connections", metavar="SANDBOX", help="What this sandbox connected to, instead.")
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="With --connections: only the refused ones.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show who did what, and with what outcome.

    Each action has an intent row, written before it, and an outcome row after it.
    """
    from cpuos import Client

    output = current_output(ctx)
    if connections is not None:
        _show_connections(output, connections, refused=refused, limit=limit)
        return
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


def _show_connections(output: Output, sandbox: str, *, refused: bool, limit: int) -> None:
    """The newest `limit` connections, in the order in which they were seen."""
    with connected(sandbox) as sbx:
        shown = sbx.audit.connections(verdict="refused" if refused else None)[-limit:]
    if output.json:
        output.data({"connections": shown})
        return
    rows = [
        (
            f"{one.at:%Y-%m-%d %H:%M:%S}",
            one.kind,
            one.name,
            one.address if one.port is None else f"{one.address or ''}:{one.port}",
            f"{one.verdict} x{one.count}" if one.count > 1 else one.verdict,
            one.rule,
            one.bytes_sent,
            one.bytes_received,
            one.command,
        )
        for one in shown
    ]
    headings = ("AT (UTC)", "KIND", "NAME", "ADDRESS", "VERDICT", "RULE", "SENT", "RECEIVED", "COMMAND")
    output.table(headings, rows, empty="no connection")


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
