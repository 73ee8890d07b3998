"""exec: one command in a sandbox, its streams joined to ours, its end as our exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.results import describe_end, describe_refusals, describe_result, exit_code_of
from cpuos.cli.sandboxes import connected, no_sandbox, parse_pairs
from cpuos.cli.streams import passed_stdin, print_output
from cpuos.errors import CpuosError, InvalidRequest

if TYPE_CHECKING:
    from cpuos import Result, Sandbox
    from cpuos.types.command import Command

__all__ = ["CommandLine", "execute", "register"]

AS_ARGUMENTS = "cpuos.cli.exec.arguments"
_REFERENCE = re.compile(r"[A-Za-z0-9-]+")


def register(app: typer.Typer) -> None:
    app.command("exec", cls=CommandLine)(execute)


def execute(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    command: Annotated[list[str] | None, typer.Argument(help="A shell string, or a program and its arguments.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Run in a throw-away sandbox of this template; then no SANDBOX is given.")
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Folder to run in (default /workspace).")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE; may be repeated.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User to run as (default user).")] = None,
    timeout: Annotated[str | None, typer.Option(help="Then the command and its children are killed.")] = None,
    interactive: Annotated[bool, typer.Option("--stdin", "-i", help="Pass stdin on.")] = False,
    pty: Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal; implies -i.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a command in a sandbox and exit as it did.

    One word is a line for bash; several words, or any after "--", are a program and its arguments, passed as they are.
    Exit codes: the command's own; 2 the line is not taken; 124 it ran over --timeout; 125 cpuOS failed;
    126 not executable; 127 no such program; 128+N ended by signal N.
    """
    from cpuos import Sandbox

    output = current_output(ctx)
    output.interrupted = "interrupted; the command was ended, "
    output.interrupted += f"sandbox {sandbox} runs on" if template is None else "and its sandbox with it"
    options = {"cwd": cwd, "env": parse_pairs(env, option="--env"), "user": user, "timeout": timeout}
    options = {key: value for key, value in options.items() if value is not None and value != {}}
    words = [*(command or [])] if template is None else [sandbox, *(command or [])]
    if template is None and (not sandbox or (not words and not _REFERENCE.fullmatch(sandbox))):
        raise no_sandbox("cpuos exec")
    if not words:
        raise InvalidRequest(
            "cannot run: no command is given",
            "it follows the sandbox",
            hint=f"cpuos exec {sandbox} -- python3 --version",
        )
    for word in words:
        _check_text(word)
    line_or_words = words[0] if len(words) == 1 and AS_ARGUMENTS not in ctx.meta else words
    if template is None:
        with connected(sandbox) as box:
            code = _run(output, box, line_or_words, options=options, interactive=interactive, pty=pty)
    else:
        with output.working(f"creating a sandbox from {template}"):
            box = Sandbox.create(template)
        with box:
            code = _run(output, box, line_or_words, options=options, interactive=interactive, pty=pty)
    if code:
        raise typer.Exit(code)


def _run(
    output: Output,
    sandbox: Sandbox,
    command: str | list[str],
    *,
    options: dict[str, Any],
    interactive: bool,
    pty: bool,
) -> int:
    if pty and not output.json:
        from cpuos.cli.shells import run_terminal

        return run_terminal(output, sandbox, command, options)
    if output.json:
        stdin = {"stdin": sys.stdin.buffer} if interactive else {}
        ended: Result | Command = sandbox.exec(command, **options, **stdin)
        output.data(describe_result(ended))
    else:
        ended = _run_streaming(output, sandbox, command, options=options, interactive=interactive)
    if told := describe_end(ended, memory_mib=sandbox.info.memory_mib):
        output.progress(f"cpuos: {told}")
    for refusal in describe_refusals(ended):
        output.progress(f"cpuos: {refusal}")
    return exit_code_of(ended.status, exit_code=ended.exit_code, signal=ended.signal)


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"cannot run: argument {os.fsencode(word)!r} is not UTF-8",
            "arguments cross the API as text",
            hint="cpuos exec SANDBOX 'ls caf?'",
        ) from None


def _run_streaming(
    output: Output, sandbox: Sandbox, command: str | list[str], *, options: dict[str, Any], interactive: bool
) -> Command:
    from cpuos.client import PIPE

    # Interrupted meanwhile, spawn itself ends what it started.
    job = sandbox.spawn(command, **options, **({"stdin": PIPE} if interactive else {}))
    try:
        passing = passed_stdin(job.write_stdin, end=job.close_stdin) if interactive else contextlib.nullcontext()
        with passing:
            print_output(output, job.follow())
    except BaseException as error:
        # Ctrl-C, or the reader of our stdout has gone: nobody waits for the command any more.
        if not isinstance(error, CpuosError):
            with contextlib.suppress(CpuosError):
                job.kill()
        raise
    return job.info


class CommandLine(TyperCommand):
    """Options may stand before or after SANDBOX; from the first other word on, everything belongs to the command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        valued = {name for option in self.params for name in option.opts if not getattr(option, "is_flag", False)}
        options: list[str] = []
        words: list[str] = []
        rest = list(args)
        wanted = 1
        while rest:
            word = rest[0]
            if word == "--" or (len(words) >= wanted and not word.startswith("-")):
                break
            rest.pop(0)
            if not word.startswith("-") or word == "-":
                words.append(word)
                continue
            options.append(word)
            if word in valued and rest:
                options.append(rest.pop(0))
            if word.split("=")[0] == "--template":
                wanted = 0  # the throw-away sandbox has no name: the first word is the command's
        if rest[:1] == ["--"]:
            if len(words) < wanted:
                raise no_sandbox("cpuos exec")
            rest.pop(0)
            ctx.meta[AS_ARGUMENTS] = True
        return super().parse_args(ctx, [*options, "--", *words, *rest])
