"""The body of a command's start from the arguments of exec and spawn."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cpuos.client._parse import make_request
from cpuos.errors import InvalidRequest
from cpuos.types.command import CommandStart
from cpuos.types.units import parse_duration_s

__all__ = ["encode_start", "new_key"]

PLAIN_CHARACTERS = 4096
_PLAIN = frozenset({"argv", "command", "stdin", "detach"})


def encode_start(
    command: str | Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout: str | float | None = None,
    open_stdin: bool = False,
    detach: bool = False,
    pty: tuple[int, int] | None = None,
) -> bytes:
    """JSON of CommandStart. A text is run by `/bin/bash -c`, a list as it is."""
    values: dict[str, Any] = {"command": command} if isinstance(command, str) else {"argv": _arguments(command)}
    if cwd is not None:
        values["cwd"] = os.fspath(cwd)
    if env is not None and not isinstance(env, Mapping):
        raise InvalidRequest(
            f"cannot run command: env {env!r:.200}", "env is a mapping of names to texts", hint='env={"A": "b"}'
        )
    if env:
        values["env"] = {name: str(value) for name, value in env.items()}
    if user is not None:
        values["user"] = user
    if timeout is not None:
        values["timeout_s"] = parse_duration_s(timeout, name="timeout")
    if open_stdin:
        values["stdin"] = "open"
    if detach:
        values["detach"] = True
    if pty is not None:
        values["pty"] = {"cols": pty[0], "rows": pty[1]}
    return _encode_plain(values) or make_request(CommandStart, values, doing="run command")


def _encode_plain(values: dict[str, Any]) -> bytes | None:
    """Most commands are a few words and nothing else, about which there is nothing to check: a tenth of the time."""
    words = [values["command"]] if "command" in values else values["argv"]
    if not words or not _PLAIN.issuperset(values) or sum(map(len, words)) + len(words) > PLAIN_CHARACTERS:
        return None
    return json.dumps(values, separators=(",", ":")).encode() if all(map(str.isprintable, words)) else None


def new_key() -> str:
    """A key by which a repeated start is known as the same one."""
    return os.urandom(12).hex()


def _arguments(command: Sequence[str]) -> list[str]:
    if isinstance(command, bytes | bytearray) or not isinstance(command, Sequence):
        raise InvalidRequest(
            f"cannot run command: {command!r:.200}", "a command is a text for bash or a list of program and arguments"
        )
    arguments = [os.fspath(argument) if isinstance(argument, os.PathLike) else argument for argument in command]
    for argument in arguments:
        if not isinstance(argument, str):
            raise InvalidRequest(
                f"cannot run command: argument {argument!r:.200}",
                "each argument is text",
            )
    return arguments
