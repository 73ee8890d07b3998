"""audit: who did what to which sandbox, with its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest
from cpuos.json_lines import last_lines

if TYPE_CHECKING:
    from cpuos import Client
    from cpuos.live import Work
    from cpuos.types.audit import AuditEntry

__all__ = ["export_audit", "list_audit", "register"]


PAGE = 1000
_BEGIN = b'{"id":'


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True)
    group.callback()(list_audit)
    group.command("export")(export_audit)
    app.add_typer(group, name="audit")


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
    if ctx.invoked_subcommand is not None:
        return
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


def export_audit(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="File of JSON lines to add to, or - for stdout.", metavar="FILE")],
    after: Annotated[int | None, typer.Option(help="Only those that follow this id.", min=0)] = None,
    as_json: JsonOption = False,
) -> None:
    """Write all entries, a line of JSON each, oldest first.

    The same again on the same file adds what has come since. With the setting audit_retention_s old entries leave the
    database: what was exported before, or lies in the server's own files, is all there is of them then.
    """
    from cpuos import Client

    output = current_output(ctx)
    to_stdout = str(file) == "-"
    if to_stdout and output.json:
        raise InvalidRequest(
            "cannot export to stdout: --json", "stdout is one document then", hint="cpuos audit export -"
        )
    with contextlib.ExitStack() as stack:
        target: BinaryIO = sys.stdout.buffer if to_stdout else stack.enter_context(_opened(file))
        if not to_stdout:
            last_id = _last_id(target, file)
            after = last_id if after is None else after
        work = stack.enter_context(output.working(f"exporting the audit to {file}"))
        client = stack.enter_context(Client())
        count, last_id = _export(client, target, after or 0, work)
    if output.json:
        output.data({"file": str(file), "entries": count, "last": last_id})
    else:
        output.progress(f"{count} entries, the last is {last_id}" if count else "no entry has come since")


def _export(client: Client, target: BinaryIO, after: int, work: Work) -> tuple[int, int]:
    """How many, and the id of the last."""
    count, position = 0, after
    while True:
        page = client.audit(after=position, limit=PAGE)
        target.writelines(entry.model_dump_json().encode() + b"\n" for entry in page.entries)
        target.flush()
        count += len(page.entries)
        work.say(f"{count} entries")
        if page.entries:
            position = page.entries[-1].id
        if page.next_after is None or not page.entries:
            return count, position


def _opened(file: Path) -> BinaryIO:
    """To read and to add to; only its owner may read what is made anew."""
    try:
        return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidRequest(f"cannot write to {file}", why, hint=f"ls -ld {shlex.quote(str(file.parent))}") from error


def _last_id(target: BinaryIO, file: Path) -> int:
    """Of the last entry in the file, which is then ready to be added to. A file of something else stays."""
    lines, end = last_lines(target)
    target.seek(end)
    begun = target.read(len(_BEGIN))
    try:
        last_id = int(json.loads(lines[0])["id"]) if lines else 0
        if not _BEGIN.startswith(begun):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        why = "its last line is no entry of an audit, so it is not added to"
        other = shlex.quote(str(file.with_name(f"{file.name}-2")))
        raise InvalidRequest(f"cannot export to {file}", why, hint=f"cpuos audit export {other}") from error
    target.truncate(end)
    target.seek(end)
    return last_id


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
