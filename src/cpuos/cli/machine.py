"""up, down, status, doctor, setup, uninstall: cpuOS on this machine, done by `cpuos.setup` and `cpuos.services`."""

from __future__ import annotations

from typing import Annotated

import typer

from cpuos.cli.output import JsonOption

__all__ = ["doctor", "down", "register", "setup", "status", "uninstall", "up"]


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("doctor")(doctor)
    app.command("setup")(setup)
    app.command("uninstall")(uninstall)


def up(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Start cpuOS here and return when it is ready; sets the machine up first where something is missing."""
    raise NotImplementedError


def down(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Stop cpuOS here; sandboxes end with it."""
    raise NotImplementedError


def status(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show which parts of cpuOS run here."""
    raise NotImplementedError


def doctor(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Tell what this machine has, what is missing, and the one command that mends it."""
    raise NotImplementedError


def setup(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Install and build what cpuOS needs, without starting it."""
    raise NotImplementedError


def uninstall(
    ctx: typer.Context,
    purge: Annotated[bool, typer.Option("--purge", help="Also sandboxes' data, templates, caches and users.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove cpuOS from this machine."""
    raise NotImplementedError
