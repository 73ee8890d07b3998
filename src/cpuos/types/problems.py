"""What is wrong with a value in a request, as a sentence: the same for server, gateway and client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpuos.errors import InvalidRequest
from cpuos.types.near import nearest
from cpuos.types.sandbox import Isolation, SandboxState

__all__ = ["invalid_request"]

MAX_TOLD = 5
MAX_SHOWN = 100
MAX_WHY = 500
_DAYS_30 = "is over 0 s and up to 30 days, as a number of seconds"

# Field: what it may be, and an example of the wire and, where it is written otherwise, of Python.
_FIELDS: dict[str, tuple[str, str, str]] = {
    "name": ("a name has lower-case letters, digits and inner hyphens, up to 63", '"build-1"', ""),
    "template": ("a template's name has lower-case letters, digits, dots and hyphens, up to 63", '"python"', ""),
    "runtime": ("a runtime's name has lower-case letters, digits and ._-, up to 63", '"auto"', ""),
    "min_isolation": (f"an isolation is one of {', '.join(Isolation)}", '"gvisor"', ""),
    "cpu": ("cpu is a whole number from 1 to 64", "2", ""),
    "memory_mib": ("memory is 128 MiB to 1 TiB, as a whole number of MiB", "2048", 'memory="2GiB"'),
    "disk_mib": ("disk is 64 MiB to 4 TiB, as a whole number of MiB", "8192", 'disk="8GiB"'),
    "max_processes": ("max_processes is a whole number from 16 to 32768", "512", ""),
    "timeout_s": (f"a timeout {_DAYS_30}", "900", 'timeout="15m"'),
    "labels": (
        "labels are up to 64 names with a text each; a name has up to 63 letters, digits and ._/-, a text up to 256",
        '{"team": "data"}',
        'labels={"team": "data"}',
    ),
    "task": ("a task is a text of up to 128 characters", '"nightly"', ""),
    "argv": ("argv is a list of at least one text: the program and its arguments", '["ls", "-l"]', '["ls", "-l"]'),
    "command": ("a command is a text for bash", '"ls -l"', '"ls -l"'),
    "cwd": ("cwd is a folder's path as text", '"/workspace"', ""),
    "env": ("env has a text for each name; a name has no = and no zero byte", '{"A": "b"}', 'env={"A": "b"}'),
    "user": ("a user's name has lower-case letters, digits and _.-, up to 32, a letter first", '"root"', ""),
    "stdin": ("stdin is none or open", '"open"', ""),
    "pty": ("a pty has cols and rows", '{"cols": 80, "rows": 24}', ""),
    "cols": ("cols is a whole number from 1 to 1000", "80", ""),
    "rows": ("rows is a whole number from 1 to 1000", "24", ""),
    "detach": ("detach is true or false", "true", ""),
    "signal": ("a signal is a name or a number", '"KILL"', ""),
    "path": ("a path is a text of 1 to 4096 characters without a zero byte", '"report.csv"', ""),
    "expires_s": ("a link lives over 0 s and up to 7 days, as a number of seconds", "600", 'expires="10m"'),
    "state": (f"a state is one of live, all, {', '.join(SandboxState)}", "?state=running", ""),
    "label": ("a label is key:value, up to 64 of them", "?label=team:data", ""),
    "limit": ("a limit is a whole number from 1 to 1000", "?limit=100", ""),
    "after": ("after is the whole number that the page before told as next_after", "?after=0", ""),
    "allow": (
        "allow is a list of names and addresses",
        '["*.example.com"]',
        'network=Network(allow=["*.example.com"])',
    ),
    "deny": ("deny is a list of names and addresses", '["*.example.com"]', 'network=Network(deny=["*.example.com"])'),
    "port": ("a port is a whole number from 1 to 65535", "3000", ""),
    "host": ("host is localhost, or left out", '"localhost"', ""),
    "verdict": ("a verdict is allowed or refused", "?verdict=refused", ""),
    "action": ("an action is a text of up to 63 characters", "?action=command.start", ""),
    "sandbox": ("a sandbox is told by its id, its name or the start of its id, up to 63 characters", "cpuos ls", ""),
    "ref": ("a sandbox is told by its id, its name or the start of its id, up to 63 characters", "cpuos ls", ""),
}


def invalid_request(
    problems: Sequence[Mapping[str, Any]], *, what: str = "cannot read the request", python: bool = False
) -> InvalidRequest:
    """Pydantic's problems as one error; their `loc` is the path within the request, without "body" or "query".

    `python`: the reader wrote a call of the SDK, and no JSON.
    """
    told = [_tell(problem) for problem in problems[:MAX_TOLD]]
    field, shown, why, known = told[0]
    if len(told) > 1:
        why = "; ".join(f"{name}: {text}" for name, _, text, _ in told)
    return InvalidRequest(
        f"{what}: {field}{shown}" if field else f"{what}{shown}",
        why,
        hint=_hint(problems[0], known, python=python),
        details={"field": field, "fields": [{"field": name, "problem": text} for name, _, text, _ in told]},
    )


def _tell(problem: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Field, its value as shown, the sentence, and the field of the table that it is or lies in."""
    path = [_cut(str(part)) for part in problem["loc"]]
    kind, given = str(problem["type"]), problem.get("input")
    if kind == "json_invalid":
        return "", ": its body is not JSON", _json_problem(problem), ""
    known = next((part for part in reversed(path) if part in _FIELDS), "")
    field = ".".join(path)
    shown = "" if kind == "missing" or not field else f" = {_short(given)}"
    if kind == "missing":
        return field, shown, "it is missing" if field else "the body is missing", known
    if kind == "extra_forbidden":
        near = nearest(path[-1], _FIELDS)
        return field, shown, f"there is no such field{f'; {near} is near' if near else ''}", near
    if not field and kind in ("model_type", "model_attributes_type", "dict_type"):
        return "", ": its body is no JSON object", _body_problem(given), ""
    if kind == "value_error" or not known:
        return field, shown, _plain(str(problem["msg"])), known
    return field, shown, _FIELDS[known][0], known


def _hint(problem: Mapping[str, Any], known: str, *, python: bool) -> str:
    if known:
        _, wire, call = _FIELDS[known]
        if python:
            return f"for example {call or f'{known}={wire}'}"
        return f"for example {wire if wire.startswith(('?', 'cpuos')) else f'{chr(34)}{known}{chr(34)}: {wire}'}"
    if not problem["loc"] or problem["type"] == "json_invalid":
        given = problem.get("input")
        if isinstance(given, str | bytes) and problem["type"] != "json_invalid":
            return "send Content-Type: application/json"
        return """curl -H 'Content-Type: application/json' -d '{"name": "value"}'"""
    return "help(cpuos.Sandbox)" if python else "GET /v1/openapi.json lists every field"


def _body_problem(given: object) -> str:
    if isinstance(given, str | bytes):
        return "the call does not say that its body is JSON"
    return f"it is {_short(given)}"


def _json_problem(problem: Mapping[str, Any]) -> str:
    reason = str(problem.get("ctx", {}).get("error", "")) or str(problem["msg"])
    place = problem["loc"][-1:]
    where = f" at position {place[0]}" if place and isinstance(place[0], int) else ""
    return f"it cannot be read{where}: {reason[:1].lower()}{reason[1:]}"


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")[:MAX_WHY]
    return message[:1].lower() + message[1:]


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
