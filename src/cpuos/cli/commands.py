"""ps, logs, kill: commands inside a sandbox. `kill` without a command ends the sandbox itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, ago, current_output
from cpuos.cli.results import describe_result
from cpuos.cli.sandboxes import connected
from cpuos.cli.streams import GuestWriter, print_output
from cpuos.errors import Conflict, NotFound, OutputLost

if TYPE_CHECKING:
    from cpuos import Job, Sandbox
    from cpuos.types.command import Command

__all__ = ["find_job", "kill", "list_commands", "register", "show_output"]


def register(app: typer.Typer) -> None:
    app.command("ps")(list_commands)
    app.command("logs")(show_output)
    app.command("kill")(kill)


def list_commands(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the commands that run in a sandbox."""
    output = current_output(ctx)
    with connected(sandbox) as box:
        found = [job.info for job in box.commands.list()]
    shown = [command for command in found if everything or not command.status.ended]
    if output.json:
        output.data({"commands": shown})
        return
    rows = [
        (
            command.id,
            _end_of(command),
            ago(command.started_at),
            command.user,
            command.stdout_bytes + command.stderr_bytes,
            " ".join(command.argv),
        )
        for command in shown
    ]
    empty = "no command" if everything else f"no command runs; ended ones: cpuos ps --all {sandbox}"
    output.table(("ID", "STATUS", "AGE", "USER", "OUTPUT BYTES", "COMMAND"), rows, empty=empty)


def _end_of(command: Command) -> str:
    if command.status == "exited":
        return f"exited({command.exit_code})"
    if command.status == "signalled":
        return f"signalled({command.signal})"
    return command.status


def show_output(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    command: Annotated[str | None, typer.Argument(help="Command id or unique prefix; else the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the command ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the recorded output of a command.

    Its stdout comes on stdout, its stderr on stderr; the record lies outside the sandbox.
    """
    output = current_output(ctx)
    with connected(sandbox) as box:
        job = find_job(box, command)
        if output.json:
            result = job.wait() if follow else job.wait(timeout=0.001)
            output.data(describe_result(result))
        elif follow or job.info.status.ended:
            print_output(output, job.follow())
        else:
            _print_so_far(output, job)


def _print_so_far(output: Output, job: Job) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        writer = GuestWriter(stream)
        try:
            writer.write(job.output(name))
        except OutputLost as error:
            # A long output: head and tail are held, and the numbers between them are in the error.
            start, _, end = str(error.details.get("gap", "")).partition("-")
            if not (start.isdigit() and end.isdigit()):
                raise
            writer.write(job.output(name, limit=int(start)))
            output.progress(f"cpuos: {int(end) - int(start)} bytes of {name} are no longer held")
            writer.write(job.output(name, offset=int(end)))
        writer.close()


def kill(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    command: Annotated[str | None, typer.Argument(help="Command id or unique prefix.")] = None,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Signal for the command's whole tree.")] = "KILL",
    as_json: JsonOption = False,
) -> None:
    """End a sandbox, or one command in it.

    A command ends with all its children. Prints the id of what was ended.
    """
    output = current_output(ctx)
    with connected(sandbox) as box:
        if command is None:
            with output.working(f"ending {sandbox}"):
                box.kill()
            shown, identifier = box.info, box.id
        else:
            job = find_job(box, command)
            job.kill(signal)
            shown, identifier = job.refresh(), job.id
    if output.json:
        output.data(shown)
    else:
        output.line(identifier)


def find_job(sandbox: Sandbox, reference: str | None) -> Job:
    """By id or unique prefix; the newest without one."""
    jobs = sandbox.commands.list()
    if reference is None:
        if jobs:
            return max(jobs, key=lambda job: job.info.started_at)
        raise NotFound(
            f"cannot find a command: {sandbox.id} has run none",
            "it has no record of any",
            code="command_not_found",
            hint=f"cpuos exec {sandbox.id} -- true",
        )
    matches = [job for job in jobs if job.id.startswith(reference)]
    if len(matches) == 1:
        return matches[0]
    hint = f"cpuos ps --all {sandbox.id}"
    if matches:
        raise Conflict(
            f"cannot tell which command: {reference!r}",
            f"{len(matches)} commands have an id that begins so",
            code="name_ambiguous",
            hint=hint,
        )
    raise NotFound(
        f"cannot find command: {reference!r}",
        "no command has an id that begins so",
        code="command_not_found",
        hint=hint,
    )
