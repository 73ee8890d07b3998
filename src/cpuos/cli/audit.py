"""audit: who did what to which sandbox, with its outcome."""

from __future__ import annotations

from typing import Annotated

import typer

from cpuos.cli.output import JsonOption, current_output

__all__ = ["list_audit", "register"]


def register(app: typer.Typer) -> None:
    app.command("audit")(list_audit)


def list_audit(
    ctx: typer.Context,
    sandbox: Annotated[str | None, typer.Option("--sandbox", "-s", help="Only this sandbox.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, such as command.start.")] = None,
    after: Annotated[int, typer.Option(help="Only entries with a higher id.")] = 0,
    limit: Annotated[int, typer.Option(help="Most entries to show.", min=1, max=1000)] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show who did what, and with what outcome.

    Each action has an intent row, written before it, and an outcome row after it.
    """
    from cpuos import Client

    output = current_output(ctx)
    with Client() as client:
        found = client.audit(sandbox=sandbox, action=action, after=after, limit=limit)
    if output.json:
        output.data(found)
        return
    rows = [
        (
            entry.id,
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.actor,
            entry.action,
            entry.target,
            entry.phase if entry.result is None else entry.result,
            " ".join(f"{key}={value}" for key, value in entry.detail.items()),
        )
        for entry in found.entries
    ]
    output.table(("ID", "AT (UTC)", "ACTOR", "ACTION", "TARGET", "RESULT", "DETAIL"), rows, empty="no entry")
