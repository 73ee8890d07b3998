"""key create: an API key for another user or client."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.hints import as_root
from cpuos.cli.output import JsonOption, current_output
from cpuos.errors import SetupRequired

__all__ = ["create_key", "register"]


def register(app: typer.Typer) -> None:
    group = command_group("API keys of this machine's cpuOS.")
    group.command("create")(create_key)
    app.add_typer(group, name="key")


def create_key(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is, as the audit shows it.", metavar="NAME")],
    as_json: JsonOption = False,
) -> None:
    """Make an API key and print it.

    Only root may. It is shown this once; its user sets it as CPUOS_API_KEY.
    """
    from cpuos.cli.machine import require_server_parts

    require_server_parts()
    from cpuos.services.credentials import make_key
    from cpuos.settings import load_settings

    output = current_output(ctx)
    if os.geteuid() != 0:
        raise SetupRequired(
            "cannot make an API key: not root",
            "keys are in the server's own database",
            code="needs_root",
            hint=as_root(f"cpuos key create {name}"),
        )
    settings = load_settings()
    key = make_key(settings, python=settings.venv_dir / "current" / "bin" / "python", name=name)
    if output.json:
        output.data({"name": name, "api_key": key})
    else:
        output.line(key)
