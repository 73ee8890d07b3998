"""cp: files and folders between this machine and a sandbox, with the rules of `docker cp`."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, current_output
from cpuos.cli.sandboxes import connected, no_sandbox
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Sandbox
    from cpuos.client._tree import Skipped

__all__ = ["copy", "register", "split_place"]

_LIST_DEPTH = 64
"""The most that a sandbox lists at once."""


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
    if source.startswith(":") or target.startswith(":"):
        raise no_sandbox("cpuos cp")
    from_place, to_place = split_place(source), split_place(target)
    if (from_place is None) == (to_place is None):
        raise InvalidRequest(
            f"cannot copy: {source} to {target}",
            "exactly one of the two is SANDBOX:PATH",
            hint=_which_way(source, target),
        )
    if to_place is not None:
        reference, path = to_place
        with output.working(f"copying to {reference}"), connected(reference) as sandbox:
            done = _upload(sandbox, source, path=path, user=user)
    else:
        reference, path = from_place
        with output.working(f"copying from {reference}"), connected(reference) as sandbox:
            done = _download(sandbox, path, target=target, user=user)
    place, left_out = done
    for skipped in left_out:
        output.progress(f"left out: {skipped.path}: {skipped.reason}")
    if output.json:
        output.data({"from": source, "to": place, "left_out": [dataclasses.asdict(skipped) for skipped in left_out]})


def _which_way(source: str, target: str) -> str:
    """The line with a sandbox in it; of two sandboxes the way is over this machine."""
    if split_place(source) is None:
        looks_like_one = re.fullmatch("[a-z0-9][a-z0-9-]*", target) and not os.path.lexists(target)
        return shlex.join(["cpuos", "cp", source, f"{target}:" if looks_like_one else f"SANDBOX:{target}"])
    return shlex.join(["cpuos", "cp", source, "."])


def split_place(text: str) -> tuple[str, str] | None:
    """Sandbox and path of "SANDBOX:PATH"; None for a local path, also one such as ./a:b or /a:b."""
    reference, separator, path = text.partition(":")
    if not separator or not reference or "/" in reference or reference.startswith("."):
        return None
    return reference, path or "/workspace"


def _upload(sandbox: Sandbox, source: str, *, path: str, user: str | None) -> tuple[str, list[Skipped]]:
    """Where it went, and what was left out."""
    if source == "-":
        sandbox.files.write(path, sys.stdin.buffer, **_as(user))
        return path, []
    if not os.path.lexists(source):
        parent = os.path.dirname(source) or "."
        why = "there is no such file or folder" if os.path.isdir(parent) else f"there is no folder {parent}"
        place = shlex.quote(parent if os.path.isdir(parent) else ".")
        raise InvalidRequest(f"cannot read file: {source}", why, hint=f"ls -l {place}")
    contents_only = source.endswith("/.") or source == "."
    name = os.path.basename(os.path.abspath(source))
    if not contents_only and (path.endswith("/") or _is_folder(sandbox, path)):
        path = f"{path.rstrip('/')}/{name}"
    return path, list(sandbox.files.upload(source, path, **_as(user)).skipped)


def _download(sandbox: Sandbox, path: str, *, target: str, user: str | None) -> tuple[str, list[Skipped]]:
    """Where it went, and what was left out."""
    if target == "-":
        for piece in sandbox.files.open_read(path, **_as(user)):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return target, []
    contents_only = path.endswith("/.")
    if not contents_only and (target.endswith("/") or os.path.isdir(target)):
        # The name is the user's own words, not the sandbox's.
        target = os.path.join(target, os.path.basename(path.rstrip("/")) or "root")
    _check_parent(target)
    report = sandbox.files.download(path, target, **_as(user))
    return target, [*report.skipped, *(_special_files(sandbox, path, user=user) if os.path.isdir(target) else ())]


def _check_parent(target: str) -> None:
    """As cp does: a missing folder is more often a typing error than a wish."""
    parent = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(parent):
        raise InvalidRequest(
            f"cannot write {target}", f"there is no folder {parent}", hint=f"mkdir -p {shlex.quote(parent)}"
        )


def _special_files(sandbox: Sandbox, path: str, *, user: str | None) -> list[Skipped]:
    """FIFOs, sockets and devices below a folder: the sandbox leaves them out of what it sends."""
    from cpuos.client._tree import Skipped
    from cpuos.errors import CpuosError

    try:
        entries = sandbox.files.list(path, depth=_LIST_DEPTH, **_as(user))
    except CpuosError as error:
        return [
            Skipped(path=path, reason=f"FIFOs and sockets, which could not be looked for: {error.why or error.what}")
        ]
    reason = "neither file, folder nor symbolic link"
    return [Skipped(path=entry.path, reason=reason) for entry in entries if entry.kind == "other"]


def _is_folder(sandbox: Sandbox, path: str) -> bool:
    from cpuos.errors import FileProblem

    try:
        return sandbox.files.stat(path).kind == "directory"
    except FileProblem:
        return False


def _as(user: str | None) -> dict[str, str]:
    return {"user": user} if user else {}
