"""template ls."""

from __future__ import annotations

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.hints import as_root
from cpuos.cli.output import JsonOption, current_output

__all__ = ["list_templates", "register"]


def register(app: typer.Typer) -> None:
    group = command_group("Prepared images that sandboxes start from.")
    group.command("ls")(list_templates)
    app.add_typer(group, name="template")


def list_templates(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the templates that sandboxes can start from."""
    from cpuos import Client

    output = current_output(ctx)
    with Client() as client:
        templates = client.templates()
    if output.json:
        output.data({"templates": templates})
        return
    rows = [(template["name"], f"{template['size_bytes'] >> 20} MiB", template["digest"]) for template in templates]
    output.table(
        ("NAME", "SIZE", "DIGEST"), rows, empty=f"no template is installed; make them with: {as_root('cpuos setup')}"
    )
