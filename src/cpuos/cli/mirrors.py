"""mirrors: which exceptions sandboxes need for the package mirrors of this machine."""

from __future__ import annotations

import typer

from cpuos.cli.machine import require_server_parts
from cpuos.cli.output import JsonOption, current_output

__all__ = ["mirrors", "register"]


def register(app: typer.Typer) -> None:
    app.command("mirrors")(mirrors)


def mirrors(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show this machine's package mirrors, and the setting that lets sandboxes reach those that are always blocked.

    Asks apt and pip how they are set, and the resolver for the addresses. What is printed is a line for `config.toml`,
    with the exceptions that are set already; nothing is changed.
    """
    require_server_parts()
    from cpuos.settings import load_settings
    from cpuos.setup.mirrors import exceptions_setting, find_mirrors

    output = current_output(ctx)
    present = load_settings().network_exceptions
    with output.working("asking apt and pip"):
        found = find_mirrors()
    if output.json:
        listed = [
            {
                "used_by": one.used_by,
                "name": one.name,
                "port": one.port,
                "address": None if one.address is None else str(one.address),
                "blocked": one.blocked,
                "exception": one.exception,
            }
            for one in found
        ]
        output.data({"mirrors": listed})
        return
    for one in found:
        if one.address is None:
            state = "not resolved now"
        else:
            state = f"{one.address}, " + (f"blocked: {one.blocked}" if one.blocked else "reached as any other")
            if one.blocked and one.exception is None:
                state += ", where no mirror should lie: no exception is proposed"
        output.progress(f"{one.used_by}  {one.name}:{one.port}  {state}")
    if setting := exceptions_setting(found, present=present):
        output.line(setting)
    else:
        blocked = any(one.blocked for one in found)
        told = "no exception is proposed" if blocked else "no exception is needed"
        output.progress(told if found else "neither apt nor pip names a mirror")
