"""`cpuos` alone: what runs here, and the three likely next commands."""

from __future__ import annotations

import contextlib

import typer

from cpuos.cli.hints import as_root, hint_of
from cpuos.cli.output import current_output
from cpuos.cli.results import describe_capacity
from cpuos.errors import AuthenticationError, CpuosError, Forbidden, Unavailable

__all__ = ["show"]

_EMPTY_STEPS = (
    ("cpuos create", "make a sandbox and print its id"),
    ("cpuos exec --template python -- python3 --version", "run one command in a throw-away sandbox"),
    ("cpuos profile ls", "kinds of work that give evidence"),
)


def show(ctx: typer.Context) -> None:
    """One line of state and three of next steps; never fails, since it is where people look when something does."""
    from cpuos import Client, Sandbox

    output = current_output(ctx)
    state, problem, live, capacity = "cpuOS is running", "", [], None
    alarms: list[str] = []
    running: bool | None = True
    steps = _EMPTY_STEPS
    try:
        with Client() as client:
            state = f"cpuOS is running at {client.config.api_url}"
            live = Sandbox.list(client=client)
            with contextlib.suppress(Forbidden):
                capacity = client.get_json("/v1/capacity")
            alarms = client.get_json("/v1/health").get("alarms", [])
    except AuthenticationError as error:
        # Whether it runs is not known: without a key nobody was asked.
        running, problem, state = None, error.what, f"{error.what}: {error.why}"
        steps = _steps_to(hint_of(error), "get a key for this user")
    except Unavailable as error:
        running, problem = False, error.why or error.what
        state = f"cpuOS is not reachable: {problem}"
        steps = _steps_to(as_root("cpuos up"), "start cpuOS (sets the machine up where needed)")
    except CpuosError as error:
        problem = error.what
    if live:
        reference = live[0].name or live[0].id
        steps = (
            (f"cpuos shell {reference}", "a terminal in the newest sandbox"),
            ("cpuos ls", "all sandboxes"),
            (f"cpuos kill {reference}", "end the newest sandbox"),
        )
    if output.json:
        next_commands = [{"command": command, "does": does} for command, does in steps]
        output.data(
            {
                "running": running,
                "problem": problem,
                "sandboxes": live,
                "capacity": capacity,
                "alarms": alarms,
                "next": next_commands,
            }
        )
        return
    count = f"{len(live)} sandbox{'' if len(live) == 1 else 'es'} alive"
    paused = sum(info.state == "paused" for info in live)
    count += f", {paused} of them paused" if paused else ""
    output.line(f"{state}, {count}" if running else state)
    if capacity is not None:
        output.line(describe_capacity(capacity))
    for alarm in alarms:
        output.line(alarm)
    if running and problem:
        output.line(problem)
    width = max(len(command) for command, _ in steps)
    for command, does in steps:
        output.line(f"  {command:<{width}}  {does}")


def _steps_to(command: str, does: str) -> tuple[tuple[str, str], ...]:
    return (
        (command, does),
        ("cpuos doctor", "what this machine has and lacks"),
        ("cpuos --help", "every command"),
    )
