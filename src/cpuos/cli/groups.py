"""A word that holds commands: `cpuos profile run`, `cpuos key create`."""

from __future__ import annotations

import typer

__all__ = ["command_group"]


def command_group(text: str) -> typer.Typer:
    """A group that shows its help when it stands alone."""
    group = typer.Typer(help=text, invoke_without_command=True)
    group.callback()(_show_help)
    return group


def _show_help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
