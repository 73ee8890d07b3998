"""ps, logs, kill: commands inside a sandbox. `kill` without a command ends sandboxes themselves."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.output import JsonOption, Output, ago, current_output
from cpuos.cli.results import describe_result
from cpuos.cli.sandboxes import connected
from cpuos.cli.streams import GuestWriter, print_output
from cpuos.errors import Conflict, CpuosError, InvalidRequest, NotFound, OutputLost

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
        if not (follow or job.info.stdout_bytes or job.info.stderr_bytes):
            output.progress(f"cpuos: nothing was printed by {job.id}: {shlex.join(job.info.argv)}")
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
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More sandboxes, by id or name; or a command of it.", metavar="[SANDBOX...|COMMAND]"),
    ] = None,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Signal for the command's whole tree.")] = "KILL",
    as_json: JsonOption = False,
) -> None:
    """End sandboxes, or one command in one.

    A second word that is the id or name of a sandbox is a sandbox, else it is a command of the first one, by its id or
    the start of it. A command ends with all its children. Prints the id of what was ended.
    """
    output = current_output(ctx)
    with contextlib.ExitStack() as opened:
        box = opened.enter_context(connected(sandbox))
        others = {word: opened.enter_context(other) for word in more or () if (other := _sandbox_called(word))}
        job = _command_meant(box, more or [], others=set(others))
        if job is not None:
            job.kill(signal)
            shown: list[Any] = [job.refresh()]
            if not output.json:
                output.line(job.id)
        else:
            with output.working(f"ending {' '.join([sandbox, *others])}"):
                shown = _end_all(output, {found.id: found for found in (box, *others.values())})
    if output.json:
        output.data(shown[0] if not more or job is not None else {"sandboxes": shown})


def _end_all(output: Output, boxes: dict[str, Sandbox]) -> list[Any]:
    """One that cannot be ended keeps no other; the first reason is the error."""
    failed: list[CpuosError] = []
    for box in boxes.values():
        try:
            box.kill()
        except CpuosError as error:
            failed.append(error)
            continue
        if not output.json:
            output.line(box.id)
    if failed:
        raise failed[0]
    return [box.info for box in boxes.values()]


def _sandbox_called(word: str) -> contextlib.AbstractContextManager[Sandbox] | None:
    """Of that very id or name: the start of an id could be meant for a command."""
    try:
        with connected(word) as box:
            return connected(box.id) if word in (box.id, box.info.name) else None
    except (NotFound, Conflict, InvalidRequest):
        return None


def _command_meant(box: Sandbox, words: list[str], *, others: set[str]) -> Job | None:
    """The command that the one second word names; None where all of them are sandboxes."""
    if len(words) == 1:
        jobs = [job for job in box.commands.list() if job.id.startswith(words[0])]
        if jobs and others:
            raise Conflict(
                f"cannot tell what to end: {words[0]!r}",
                f"it is a sandbox, and the start of a command's id in {box.id}",
                code="name_ambiguous",
                hint=f"cpuos ps --all {box.id}",
            )
        if not jobs and not others:
            raise NotFound(
                f"cannot find {words[0]!r}",
                f"it is neither the id or name of a sandbox nor a command of {box.id}; nothing was ended",
                code="command_not_found",
                hint=f"cpuos ps --all {box.id}",
            )
        return None if others else find_job(box, words[0])
    if unknown := [word for word in words if word not in others]:
        raise NotFound(
            f"cannot find sandbox: {unknown[0]!r}",
            "several words are sandboxes, by id or name; nothing was ended",
            code="sandbox_not_found",
            hint="cpuos ls",
        )
    return None


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
