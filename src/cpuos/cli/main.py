"""Entry point: puts the command groups together, and turns every failure into three lines and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from cpuos.cli import (
    alarms,
    audit,
    certs,
    commands,
    copies,
    exec,
    harden,
    keys,
    machine,
    mirrors,
    networks,
    overview,
    packs,
    ports,
    profiles,
    sandboxes,
    shells,
    snapshots,
    storage,
    templates,
)
from cpuos.cli.hints import ENDING
from cpuos.cli.installation import name_place
from cpuos.cli.output import JsonOption, Output
from cpuos.errors import CpuosError, InvalidRequest, PlatformError
from cpuos.types.near import nearest

__all__ = ["app", "main", "show_overview"]

# As `docker run`: a code that the program inside is unlikely to use says that the failure is ours.
EXEC_FAILURE = 125
USAGE = 2
"""The line, or a value in it, is not taken: nothing was begun."""

# Words of other tools, and the one that does it here.
_UNKNOWN = re.compile(r"No such command '([^']*)'\.?(?: Did you mean (.*)\?)?")
_MEANT = {
    **{"start": "up", "stop": "down --help", "rm": "kill --help", "stop-all": "down --help", "help": "--help"},
    **{"list": "ls", "run": "exec --help", "new": "create", "delete": "kill --help", "copy": "cp --help"},
    **{"ssh": "shell --help", "version": "--version"},
}
_UNKNOWN_OPTION = re.compile(r"No such option: (\S+)")

app = typer.Typer(
    name="cpuos",
    help="Computers for AI agents: isolated, disposable Linux machines.",
    no_args_is_help=False,
    add_completion=True,
    rich_markup_mode=None,  # rich would take longer to load than everything else of `--help`
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for group in (
    sandboxes,
    snapshots,
    storage,
    packs,
    exec,
    commands,
    shells,
    copies,
    networks,
    mirrors,
    ports,
    certs,
    profiles,
    templates,
    alarms,
    audit,
    keys,
    machine,
    harden,
):
    group.register(app)


def _print_version(value: bool) -> None:
    if value:
        print(f"cpuos {version('cpuos')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def show_overview(
    ctx: typer.Context,
    as_json: JsonOption = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Without a command: what runs, and the three likely next commands."""
    if ctx.invoked_subcommand is None:
        overview.show(ctx)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output = Output()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    failure = EXEC_FAILURE if _runs_a_program(arguments) else 1
    try:
        with _interrupted_by_signals() as interrupts:
            _load_plugins()
            code = app(arguments, prog_name="cpuos", standalone_mode=False, obj=output)
            sys.stdout.flush()
        if interrupts and code == 130:
            output.progress(f"cpuos: {output.interrupted}")
        return code if isinstance(code, int) else 0
    except CpuosError as error:
        if os.environ.get("CPUOS_DEBUG") == "1":
            raise
        name_place(error)
        output.error(error, arguments)
        return USAGE if error.code == "invalid_request" else failure
    except TyperException as error:
        # The line could not be read as a whole, so the option may not have been met.
        output.json = output.json or "--json" in arguments
        output.error(_usage_error(error, arguments))
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        output.progress(f"cpuos: {output.interrupted}")
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone (`cpuos ls | head -1`): nobody is there to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure
    except Exception as error:
        if os.environ.get("CPUOS_DEBUG") == "1":
            raise
        output.error(_fault(error, arguments))
        return failure


def _runs_a_program(arguments: Sequence[str]) -> bool:
    """Whether the command exits as a program in a sandbox does, so that our own failures need a code apart."""
    words = [word for word in arguments if not word.startswith("-")]
    return words[:1] in (["exec"], ["shell"]) or words[:2] == ["profile", "run"]


def _load_plugins() -> None:
    """Groups that other packages register: each entry point is a function that takes the app."""
    for point in entry_points(group="cpuos.commands"):
        point.load()(app)


@contextmanager
def _interrupted_by_signals() -> Iterator[list[int]]:
    """A closed terminal or a polite kill cleans up like Ctrl-C does. Gives the signals that came."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        raise KeyboardInterrupt

    try:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, interrupt) for number in numbers}
    except ValueError:  # not in the main thread: an embedding program keeps its own signals
        yield came
        return
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job, nohup
        if before[number] is signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _usage_error(error: TyperException, arguments: Sequence[str]) -> CpuosError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "cpuos"
    message = error.format_message().rstrip(".")
    usage = context.get_usage().split("\n")[0].strip() if context else ""
    hint = f"{path} --help"
    if unknown := _UNKNOWN.match(message):
        meant = (_MEANT.get(unknown[1]) if path == "cpuos" else None) or _guess(unknown[2])
        message = f"no such command {unknown[1]!r}"
        hint = f"{path} {meant}" if meant else hint
    elif (unknown := _UNKNOWN_OPTION.match(message)) and context:
        options = [option for parameter in context.command.params for option in parameter.opts]
        near = nearest(unknown[1], [option for option in options if option.startswith("--")])
        message = f"no such option {unknown[1]}" + (f"; {near} is near" if near else "")
        if near and unknown[1] in arguments and not ENDING.intersection(path.split()):
            hint = shlex.join(["cpuos", *(near if word == unknown[1] else word for word in arguments)])
    what = f"cannot read the command line: {message[:1].lower()}{message[1:]}"
    return InvalidRequest(what, usage[:1].lower() + usage[1:], hint=hint)


def _guess(suggested: str | None) -> str | None:
    """The first command that is near, to read about."""
    near = re.findall(r"'([^']+)'", suggested or "")
    return f"{near[0]} --help" if near else None


def _fault(error: Exception, arguments: Sequence[str]) -> CpuosError:
    text = " ".join(str(error).split())[:500]
    return PlatformError(
        f"cannot finish the command: {type(error).__name__}: {text}",
        "this is a fault of cpuOS, not of your command",
        hint=f"CPUOS_DEBUG=1 {shlex.join(['cpuos', *arguments])}",
    )
