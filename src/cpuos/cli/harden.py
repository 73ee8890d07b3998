"""harden check: whether this host holds what is let loose on it."""

from __future__ import annotations

import dataclasses

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.hints import runnable
from cpuos.cli.machine import require_server_parts
from cpuos.cli.output import JsonOption, current_output

__all__ = ["check", "register"]


def register(app: typer.Typer) -> None:
    group = command_group("Whether this host holds what is let loose on it.")
    group.command("check")(check)
    app.add_typer(group, name="harden")


def check(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Tell how well this host keeps sandboxes apart, and what to do about it.

    Looks at processor, kernel, memory, control groups, limits, file modes and what the jail of a machine needs. Changes
    nothing, and runs nothing. Exits with 1 where something is to be mended before the host is shared by programs that
    nobody trusts; a warning, or what cannot be told from here, is no failure.
    """
    require_server_parts()
    from cpuos.settings import load_settings
    from cpuos.setup.hardening import FindingState, check_hardening, finding_lines, places_of
    from cpuos.setup.host_view import HostView

    output, settings = current_output(ctx), load_settings()
    found = check_hardening(HostView(), places=places_of(settings), programs=settings.vmm_programs)
    found = [dataclasses.replace(finding, fix=runnable(finding.fix)) for finding in found]
    if output.json:
        output.data({"findings": [dataclasses.asdict(finding) for finding in found]})
    else:
        for line in finding_lines(found):
            output.line(line)
    if any(finding.state is FindingState.FAIL for finding in found):
        raise typer.Exit(1)
