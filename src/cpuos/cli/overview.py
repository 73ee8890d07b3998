"""`cpuos` alone: what runs here, and the three likely next commands."""

from __future__ import annotations

import typer

from cpuos.cli.output import current_output
from cpuos.errors import AuthenticationError, CpuosError, Unavailable

__all__ = ["show"]

_FIRST_STEPS = (
    ("cpuos doctor", "what this machine has and lacks"),
    ("sudo cpuos up", "start cpuOS (sets the machine up where needed)"),
    ("cpuos --help", "every command"),
)
_EMPTY_STEPS = (
    ("cpuos create", "make a sandbox and print its id"),
    ("cpuos exec --template python -- python3 --version", "run one command in a throw-away sandbox"),
    ("cpuos profile ls", "kinds of work that give evidence"),
)


def show(ctx: typer.Context) -> None:
    """One line of state and three of next steps; never fails, since it is where people look when something does."""
    from cpuos import Client, Sandbox

    output = current_output(ctx)
    running, problem, live = True, "", []
    try:
        with Client() as client:
            live = Sandbox.list(client=client)
    except (Unavailable, AuthenticationError) as error:
        running, problem = False, error.why or error.what
    except CpuosError as error:
        problem = error.what
    if not running:
        steps = _FIRST_STEPS
    elif live:
        reference = live[0].name or live[0].id
        steps = (
            (f"cpuos shell {reference}", "a terminal in the newest sandbox"),
            ("cpuos ls", "all sandboxes"),
            (f"cpuos kill {reference}", "end the newest sandbox"),
        )
    else:
        steps = _EMPTY_STEPS
    if output.json:
        next_commands = [{"command": command, "does": does} for command, does in steps]
        output.data({"running": running, "problem": problem, "sandboxes": live, "next": next_commands})
        return
    count = f"{len(live)} sandbox{'' if len(live) == 1 else 'es'} alive"
    output.line(f"cpuOS is running, {count}" if running else f"cpuOS is not reachable: {problem}")
    if running and problem:
        output.line(problem)
    width = max(len(command) for command, _ in steps)
    for command, does in steps:
        output.line(f"  {command:<{width}}  {does}")
