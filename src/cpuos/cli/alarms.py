"""alarms: what a sandbox, or any of the workspace, may use for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, ago, current_output
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos.types.alarms import AlarmRule

__all__ = ["alarms", "register"]

_HEADINGS = ("RULES OF", "RULE", "SINCE")


def register(app: typer.Typer) -> None:
    app.command("alarms")(alarms)


def alarms(
    ctx: typer.Context,
    sandbox: Annotated[
        str | None, typer.Argument(help="Its id, name, or a unique start of its id.", metavar="SANDBOX")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--set", help="MEASURE=LIMIT/WINDOW[:ACTION], such as cpu=90%/10m:pause; may be repeated."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="The workspace has no rules of its own any more.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the alarms of the workspace or of a sandbox, or replace the workspace's.

    MEASURE is cpu (a share of what the sandbox has), sent (bytes) or connections; ACTION is audit (default), pause or
    kill. Rules of installation, workspace and sandbox hold each by itself. A sandbox gets its own with
    `cpuos create --alarm`.
    """
    output = current_output(ctx)
    if sandbox is not None and (rule or off):
        raise InvalidRequest(
            f"cannot change the alarms of {sandbox}: a sandbox has its own from its creation on",
            "--set and --off are for the whole workspace",
            hint="cpuos create --alarm cpu=90%/10m:pause",
        )
    if rule and off:
        raise InvalidRequest("cannot tell what is meant: --set with --off", hint="cpuos alarms --off")
    if sandbox is None:
        _alarms_of_workspace(output, [] if off else rule)
        return
    with connected(sandbox) as sbx:
        info = sbx.info
    if output.json:
        output.data({"alarms": info.alarms, "active_alarms": info.active_alarms})
        return
    active = {(one.origin, one.rule.text): ago(one.since) for one in info.active_alarms}
    rows = [("sandbox", one.text, active.pop(("sandbox", one.text), "")) for one in info.alarms]
    rows += [(origin, text, since) for (origin, text), since in active.items()]
    output.table(_HEADINGS, rows, empty="no rules of its own, and no alarm; those for all: cpuos alarms")
    output.progress(f"what became of them: cpuos audit --action alarm --sandbox {sbx.id}")


def _alarms_of_workspace(output: Output, rules: list[str] | None) -> None:
    from cpuos import Client

    with Client() as client:
        shown = client.alarms.get() if rules is None else client.alarms.update(rules)
    if output.json:
        output.data(shown)
        return
    rows = [*_rows("installation", shown.installation), *_rows("workspace", shown.rules)]
    output.table(_HEADINGS[:2], rows, empty="no rules; make one with: cpuos alarms --set cpu=90%/10m")


def _rows(origin: str, rules: Iterable[AlarmRule]) -> list[tuple[str, str]]:
    return [(origin, rule.text) for rule in rules]
