"""shell, and the terminal side of `exec -t`: the user's keys to a pty in the sandbox, its screen back."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.results import describe_end, exit_code_of
from cpuos.cli.sandboxes import connected
from cpuos.cli.streams import passed_stdin
from cpuos.cli.terminal import Keep, SafeStream, raw_mode, terminal_size
from cpuos.errors import CpuosError, InvalidRequest

if TYPE_CHECKING:
    from cpuos import Result, Sandbox
    from cpuos.client._sync.pty import Pty

__all__ = ["open_shell", "register", "run_terminal"]


def register(app: typer.Typer) -> None:
    app.command("shell")(open_shell)


def open_shell(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id, unique prefix or name.", metavar="SANDBOX")],
    command: Annotated[str, typer.Option(help="Program to run.")] = "bash -l",
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Folder to start in (default /workspace).")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User to run as (default user).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Open a terminal in a sandbox.

    It ends with its program (Ctrl-D in a shell) and exits as that did.
    """
    if as_json:
        raise InvalidRequest(
            "cannot open a terminal with --json",
            "a terminal's bytes are no JSON",
            hint=f"cpuos exec --json {sandbox} -- bash -lc 'echo hello'",
        )
    output = current_output(ctx)
    options = {key: value for key, value in {"cwd": cwd, "user": user}.items() if value is not None}
    with connected(sandbox) as box:
        code = run_terminal(output, box, command, options)
    if code:
        raise typer.Exit(code)


def run_terminal(output: Output, sandbox: Sandbox, command: str | list[str], options: dict[str, Any]) -> int:
    """Join the user's terminal and a pty in the sandbox until the program ends; the exit code to leave with.

    An end that the program did not choose is told on a line of its own, below the screen it left.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "cannot open a terminal: stdin and stdout are not both a terminal",
            "keys and screen need one",
            hint=f"cpuos exec -i {sandbox.id} -- bash",
        )
    columns, rows = terminal_size()
    environment = {"TERM": os.environ.get("TERM", "xterm-256color"), **options.pop("env", {})}
    with sandbox.pty(command, cols=columns, rows=rows, env=environment, **options) as session:
        try:
            _join(session)
            result = session.wait()
        except CpuosError:
            output.progress("")
            raise
    if told := _reason_of(sandbox, result):
        output.progress("")
        output.progress(f"cpuos: {told}")
    return exit_code_of(result.status, exit_code=result.exit_code, signal=result.signal)


def _join(session: Pty) -> None:
    safe = SafeStream(Keep.SCREEN)
    with raw_mode(sys.stdin.buffer), passed_stdin(session.send, resize=session.resize):
        try:
            for data in session:
                _show(safe.feed(data))
        finally:
            _show(safe.close())


def _reason_of(sandbox: Sandbox, result: Result) -> str:
    """How the program ended; where it was killed with its sandbox, what became of that."""
    told = describe_end(result, memory_mib=sandbox.info.memory_mib)
    if result.status == "killed":
        with contextlib.suppress(CpuosError):
            info = sandbox.refresh()
            if info.reason and info.reason not in told:
                told = f"{told}; sandbox {info.id} is {info.state}: {info.reason}"
    return told


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
