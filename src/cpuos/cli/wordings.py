"""Errors come from the SDK and the API, whose hints are calls; here is what the command line says instead."""

from __future__ import annotations

import re

__all__ = ["OPTIONS", "as_commands"]

# A call of the SDK or a sentence about one, as errors have it; what one types. Its groups are numbered.
_COMMANDS: tuple[tuple[str, str], ...] = (
    (r"sbx\.files\.list\(.*\) shows what it holds", "cpuos exec SANDBOX ls -la PATH"),
    (r"sbx\.files\.stat\(.*\) tells what it is", "cpuos exec SANDBOX stat PATH"),
    (r"sbx\.files\.remove\(PATH, recursive=True\)", "cpuos exec SANDBOX rm -r PATH"),
    (r"write to another path, or remove it: sbx\.files\.remove\(PATH\)", "cpuos exec SANDBOX rm PATH"),
    (r"pass large data by sbx\.files\.write or .*", "cpuos cp FILE SANDBOX:PATH"),
    (r"pass data by a file or stdin", "cpuos cp FILE SANDBOX:PATH"),
    (r"copy its content to a file with sbx\.exec", "cpuos exec SANDBOX cp PATH FILE"),
    (r"list its folders one by one, or sbx\.exec.*", "cpuos exec SANDBOX find PATH"),
    (r"sbx\.files\.url\(PATH\) makes a new link", "cpuos cp SANDBOX:PATH FILE"),
    (r"sbx\.commands\.get\(id\)\.wait\(\)", "cpuos ps --all SANDBOX"),
    (r"job\.output\(.*\)", "cpuos logs SANDBOX COMMAND"),
    (r"download\(…, max_size=.*\)", "cpuos exec SANDBOX du -sh PATH"),
    (r"download\(…, portable_names=False\)", "cpuos exec SANDBOX mv PATH OTHER"),
    (r"sbx\.spawn\(…, stdin=PIPE\)", "cpuos exec -i SANDBOX -- PROGRAM"),
    (r'start it with "stdin": "open"', "cpuos exec -i SANDBOX -- PROGRAM"),
    (r'the same call with user="root", or .*', "cpuos exec --user root SANDBOX -- PROGRAM"),
    (r"without check=True the result is returned, .*", "cpuos logs SANDBOX COMMAND"),
    (r"create from it with warm=False: .*", "cpuos snapshots ls"),
    (r"Network\((\w+)=\['([^']*)'\]\)", r"cpuos create --\1 '\2'"),
    (r"env=\{.*\}", "cpuos exec --env MODE=test SANDBOX -- env"),
    (r"labels=\{.*\}", "cpuos create --label team=data"),
    (r"files=\{.*\}", "cpuos template build --copy app:/opt/app"),
    (r"network=Network\(.*\)", "cpuos create --allow '*.example.com'"),
    (r"help\(cpuos\..*\)|(?:GET|POST) /v1/.*", ""),
)
_PATTERNS = [(re.compile(pattern), command) for pattern, command in _COMMANDS]

OPTIONS: dict[str, tuple[str, str]] = {
    "name": ("--name", "build-1"),
    "template": ("--template", "python"),
    "runtime": ("--runtime", "auto"),
    "min_isolation": ("--min-isolation", "gvisor"),
    "cpu": ("--cpu", "2"),
    "memory": ("--memory", "2GiB"),
    "memory_mib": ("--memory", "2GiB"),
    "disk": ("--disk", "8GiB"),
    "disk_mib": ("--disk", "8GiB"),
    "max_processes": ("--max-processes", "512"),
    "timeout": ("--timeout", "15m"),
    "timeout_s": ("--timeout", "15m"),
    "idle_timeout": ("--idle-timeout", "10m"),
    "idle_timeout_s": ("--idle-timeout", "10m"),
    "expires": ("--expires", "10m"),
    "expires_s": ("--expires", "10m"),
    "count": ("--count", "8"),
    "ready": ("--ready", "port:8000"),
    "labels": ("--label", "team=data"),
    "env": ("--env", "MODE=test"),
    "cwd": ("--cwd", "/workspace"),
    "user": ("--user", "root"),
    "allow": ("--allow", "*.example.com"),
    "deny": ("--deny", "*.example.com"),
    "limit": ("--limit", "100"),
    "verdict": ("--refused", ""),
    "action": ("--action", "command.start"),
}
"""Field of a request: the option that it comes from, and a value that is one."""


def as_commands(hint: str) -> str:
    """The hint with the command in place of the call; one that names no call stays as it is."""
    for pattern, command in _PATTERNS:
        if found := pattern.fullmatch(hint):
            return found.expand(command)
    return hint
