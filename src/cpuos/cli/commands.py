"""exec, ps, logs, kill: commands inside a sandbox. `kill` without a command ends the sandbox itself."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from cpuos.cli.output import JsonOption, Output, ago, current_output
from cpuos.cli.sandboxes import parse_pairs
from cpuos.cli.terminal import Keep, SafeStream
from cpuos.errors import CpuosError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from cpuos import Result, Sandbox
    from cpuos.types.command import Command

__all__ = ["GuestWriter", "exit_code_of", "find_command", "register"]

TIMED_OUT = 124
OURS = 125
NOT_EXECUTABLE = 126
MISSING = 127


class CommandLine(TyperCommand):
    """Options may stand before or after SANDBOX; from the first other word on, everything belongs to the command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        valued = {name for option in self.params for name in option.opts if not getattr(option, "is_flag", False)}
        options: list[str] = []
        words: list[str] = []
        rest = list(args)
        # With --template the throw-away sandbox has no name, and the first word is the command's.
        wanted = (
            0 if any(word == "--template" or word.startswith("--template=") for word in _before_dashes(rest)) else 1
        )
        while rest and len(words) <= wanted:
            word = rest[0]
            if word == "--" or (len(words) == wanted and not word.startswith("-")):
                break
            rest.pop(0)
            if word.startswith("-") and word != "-":
                options.append(word)
                if word in valued and rest:
                    options.append(rest.pop(0))
            else:
                words.append(word)
        if rest[:1] == ["--"]:
            rest.pop(0)
        return super().parse_args(ctx, [*options, "--", *words, *rest])


def _before_dashes(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def register(app: typer.Typer) -> None:
    app.command("exec", cls=CommandLine)(execute)
    app.command("ps")(list_commands)
    app.command("logs")(show_output)
    app.command("kill")(kill)


def execute(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            help="SANDBOX, then one shell string, or a program and its arguments.", metavar="SANDBOX COMMAND..."
        ),
    ],
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

    One word is a shell string; several are a program and its arguments, passed as they are.
    Exit codes: the command's own; 124 it ran over --timeout; 125 cpuOS failed; 126 not executable; 127 no such program;
    128+N ended by signal N.
    """
    from cpuos import Sandbox

    output = current_output(ctx)
    options = {"cwd": cwd, "env": parse_pairs(env, option="--env"), "user": user, "timeout": timeout}
    options = {key: value for key, value in options.items() if value}
    if template is None and len(words) < 2:
        raise InvalidRequest(
            "cannot run: no command is given", "it follows the sandbox", hint="cpuos exec SANDBOX -- python3 --version"
        )
    if template is not None:
        with output.working(f"creating a sandbox from {template}"):
            sandbox = Sandbox.create(template)
        with sandbox:
            code = _run(output, sandbox, words, options, interactive=interactive, pty=pty)
    else:
        code = _run(output, Sandbox.connect(words[0]), words[1:], options, interactive=interactive, pty=pty)
    if code:
        raise typer.Exit(code)


def _run(
    output: Output, sandbox: Sandbox, words: list[str], options: dict[str, Any], *, interactive: bool, pty: bool
) -> int:
    command: str | list[str] = words[0] if len(words) == 1 else words
    try:
        if pty and not output.json:
            from cpuos.cli.shells import run_terminal

            return run_terminal(sandbox, command, options)
        if interactive:
            options["stdin"] = sys.stdin.buffer
        if output.json:
            result = sandbox.exec(command, **options)
            output.data(describe_result(result))
        else:
            result = _run_streaming(sandbox, command, options)
    except CpuosError as error:
        code = _exit_code_of_error(error)
        if code == OURS:
            raise
        output.error(error)
        return code
    if result.status != "exited":
        output.progress(
            f"cpuos: the command ended as {result.status}" + (f": {result.reason}" if result.reason else "")
        )
    return exit_code_of(result.status, exit_code=result.exit_code, signal=result.signal)


def _run_streaming(sandbox: Sandbox, command: str | list[str], options: dict[str, Any]) -> Result:
    stdout, stderr = GuestWriter(sys.stdout), GuestWriter(sys.stderr)
    try:
        return sandbox.exec(command, on_stdout=stdout.write_text, on_stderr=stderr.write_text, **options)
    finally:
        stdout.close()
        stderr.close()


class GuestWriter:
    """Output of a command on one of our streams: its bytes as they are into a pipe or file, made safe on a terminal."""

    def __init__(self, stream: IO[str], *, keep: Keep = Keep.COLOURS) -> None:
        self._stream = stream
        self._safe = SafeStream(keep) if stream.isatty() else None

    def write(self, data: bytes) -> None:
        if self._safe is None:
            self._stream.flush()
            self._stream.buffer.write(data)
            self._stream.buffer.flush()
        else:
            self._stream.write(self._safe.feed(data))
            self._stream.flush()

    def close(self) -> None:
        if self._safe is not None:
            self._stream.write(self._safe.close())
            self._stream.flush()


def exit_code_of(status: str, *, exit_code: int | None, signal: int | None) -> int:
    """The exit code that tells a shell how the command ended."""
    match status:
        case "exited":
            return exit_code if exit_code is not None else OURS
        case "timed_out":
            return TIMED_OUT
        case "signalled" | "killed" | "oom_killed" | "limited":
            return 128 + (signal or 9)
    return OURS


def _exit_code_of_error(error: CpuosError) -> int:
    """A program that cannot be started is the command's failure, as in a shell."""
    reason = error.details.get("agent_code") or error.details.get("reason")
    return {"program_not_found": MISSING, "program_not_executable": NOT_EXECUTABLE}.get(str(reason), OURS)


def describe_result(result: Result) -> dict[str, Any]:
    """A result as `--json` shows it: the field names of the SDK."""
    fields = (
        "command_id",
        "status",
        "exit_code",
        "signal",
        "reason",
        "stdout",
        "stderr",
        "duration_s",
        "truncated",
        "stdout_dropped_bytes",
        "stderr_dropped_bytes",
        "output_path",
    )
    return {name: getattr(result, name) for name in fields}


def list_commands(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the commands that run in a sandbox."""
    from cpuos import Sandbox

    output = current_output(ctx)
    found = Sandbox.connect(sandbox).commands.list()
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
    empty = "no command" if everything else "no command runs; ended ones: cpuos ps --all"
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
    """Show the recorded output of a command: its stdout on stdout, its stderr on stderr."""
    from cpuos import Sandbox

    output = current_output(ctx)
    box = Sandbox.connect(sandbox)
    record = find_command(box, command)
    job = box.commands.get(record.id)
    if follow:
        job.wait()
    if output.json:
        texts = {name: bytes(job.output(name)).decode(errors="replace") for name in ("stdout", "stderr")}
        output.data({"command": record, **texts})
        return
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        writer = GuestWriter(stream)
        writer.write(job.output(name))
        writer.close()
        dropped = getattr(record, f"{name}_dropped_bytes")
        if dropped:
            output.progress(f"cpuos: {dropped} bytes from the middle of {name} are no longer held")


def kill(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    command: Annotated[str | None, typer.Argument(help="Command id or unique prefix.")] = None,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Signal for the command's whole tree.")] = "KILL",
    as_json: JsonOption = False,
) -> None:
    """End a sandbox, or only one command in it with all its children; prints the id of what was ended."""
    from cpuos import Sandbox

    output = current_output(ctx)
    box = Sandbox.connect(sandbox)
    if command is None:
        with output.working(f"ending {sandbox}"):
            box.kill()
        shown, identifier = box.info, box.id
    else:
        record = find_command(box, command)
        job = box.commands.get(record.id)
        job.kill(signal)
        shown, identifier = job.refresh(), record.id
    if output.json:
        output.data(shown)
    else:
        output.line(identifier)


def find_command(sandbox: Sandbox, reference: str | None) -> Command:
    """By id or unique prefix; the newest without one."""
    found = sandbox.commands.list()
    if reference is None:
        if found:
            return max(found, key=lambda command: command.started_at)
        raise NotFound(
            f"cannot find a command: {sandbox.id} has run none",
            "it has no record of any",
            code="command_not_found",
            hint=f"cpuos exec {sandbox.id} -- true",
        )
    matches = [command for command in found if command.id.startswith(reference)]
    exact = [command for command in matches if command.id == reference]
    if len(matches) == 1 or exact:
        return (exact or matches)[0]
    raise NotFound(
        f"cannot find command: {reference!r}",
        f"{len(matches)} commands of {sandbox.id} have an id that begins so",
        code="command_not_found" if not matches else "name_ambiguous",
        hint=f"cpuos ps --all {sandbox.id}",
    )
