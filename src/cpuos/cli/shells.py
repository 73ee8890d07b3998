"""shell, and the terminal side of `exec -t`: the user's keys to a pty in the sandbox, its screen back."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.output import JsonOption
from cpuos.cli.results import exit_code_of
from cpuos.cli.sandboxes import connected
from cpuos.cli.streams import passed_stdin
from cpuos.cli.terminal import Keep, SafeStream, raw_mode, terminal_size
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Sandbox

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
    options = {key: value for key, value in {"cwd": cwd, "user": user}.items() if value}
    with connected(sandbox) as box:
        code = run_terminal(box, command, options)
    if code:
        raise typer.Exit(code)


def run_terminal(sandbox: Sandbox, command: str | list[str], options: dict[str, Any]) -> int:
    """Join the user's terminal and a pty in the sandbox until the program ends; the exit code to leave with."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "cannot open a terminal: stdin and stdout are not both a terminal",
            "keys and screen need one",
            hint=f"cpuos exec -i {sandbox.id} -- bash",
        )
    columns, rows = terminal_size()
    environment = {"TERM": os.environ.get("TERM", "xterm-256color"), **options.pop("env", {})}
    with sandbox.pty(command, cols=columns, rows=rows, env=environment, **options) as session:
        safe = SafeStream(Keep.SCREEN)
        with raw_mode(sys.stdin.buffer), passed_stdin(session.send, resize=session.resize):
            try:
                for data in session:
                    _show(safe.feed(data))
            finally:
                _show(safe.close())
        result = session.wait()
    return exit_code_of(result.status, exit_code=result.exit_code, signal=result.signal)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
