"""cp: files and folders between this machine and a sandbox, with the rules of `docker cp`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Sandbox, TransferReport

__all__ = ["copy", "register", "split_place"]


def register(app: typer.Typer) -> None:
    app.command("cp")(copy)


def copy(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="PATH, SANDBOX:PATH, or - for stdin.")],
    target: Annotated[str, typer.Argument(help="PATH, SANDBOX:PATH, or - for stdout.")],
    user: Annotated[str | None, typer.Option("--user", "-u", help="As this user of the sandbox.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a file or folder in or out.

    A target that is a folder, or ends with "/", takes the source under its own name. SOURCE ending with "/." copies
    what is in the folder. A local path with a colon is written ./a:b. Links are not followed.
    """
    output = current_output(ctx)
    from_place, to_place = split_place(source), split_place(target)
    if (from_place is None) == (to_place is None):
        raise InvalidRequest(
            f"cannot copy: {source} to {target}",
            "exactly one of the two is SANDBOX:PATH",
            hint="cpuos cp data.csv SANDBOX:/workspace/",
        )
    if to_place is not None:
        reference, path = to_place
        with output.working(f"copying to {reference}"), connected(reference) as sandbox:
            done = _upload(output, sandbox, source, path=path, user=user)
    else:
        reference, path = from_place
        with output.working(f"copying from {reference}"), connected(reference) as sandbox:
            done = _download(output, sandbox, path, target=target, user=user)
    if output.json:
        output.data({"from": source, "to": done})


def split_place(text: str) -> tuple[str, str] | None:
    """Sandbox and path of "SANDBOX:PATH"; None for a local path, also one such as ./a:b or /a:b."""
    reference, separator, path = text.partition(":")
    if not separator or not reference or "/" in reference or reference.startswith("."):
        return None
    return reference, path or "/workspace"


def _upload(output: Output, sandbox: Sandbox, source: str, *, path: str, user: str | None) -> str:
    if source == "-":
        sandbox.files.write(path, sys.stdin.buffer, **_as(user))
        return path
    if not os.path.lexists(source):
        raise InvalidRequest(f"cannot read file: {source}", "there is no such file or folder", hint=f"ls -l {source}")
    contents_only = source.endswith("/.") or source == "."
    name = os.path.basename(os.path.abspath(source))
    if not contents_only and (path.endswith("/") or _is_folder(sandbox, path)):
        path = f"{path.rstrip('/')}/{name}"
    _tell(output, sandbox.files.upload(source, path, **_as(user)))
    return path


def _download(output: Output, sandbox: Sandbox, path: str, *, target: str, user: str | None) -> str:
    if target == "-":
        for piece in sandbox.files.open_read(path, **_as(user)):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return target
    contents_only = path.endswith("/.")
    if not contents_only and (target.endswith("/") or os.path.isdir(target)):
        # The name is the user's own words, not the sandbox's.
        target = os.path.join(target, os.path.basename(path.rstrip("/")) or "root")
    _tell(output, sandbox.files.download(path, target, **_as(user)))
    return target


def _tell(output: Output, report: TransferReport) -> None:
    for skipped in report.skipped:
        output.progress(f"left out: {skipped.path}: {skipped.reason}")


def _is_folder(sandbox: Sandbox, path: str) -> bool:
    from cpuos.errors import FileProblem

    try:
        return sandbox.files.stat(path).kind == "directory"
    except FileProblem:
        return False


def _as(user: str | None) -> dict[str, str]:
    return {"user": user} if user else {}
