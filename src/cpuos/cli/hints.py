"""The `try:` line as this user, on this machine, can paste it."""

from __future__ import annotations

import itertools
import os
import pwd
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cpuos.cli.wordings import OPTIONS, as_commands
from cpuos.errors import CpuosError, Unavailable
from cpuos.key_file import key_file, key_file_below

__all__ = ["ENDING", "as_root", "hint_of", "is_command", "runnable"]

# Commands that need root, at the start of a hint or of one of its parts.
_PRIVILEGED = re.compile(
    r"(?:^|(?<=&& )|(?<=; ))(?:sudo )?(cpuos (?:up|down|setup|uninstall)(?: --[a-z-]+)*)(?![^\s;])"
)
# What other front ends say after the command: "cpuos ls, then cpuos kill SANDBOX", "cpuos status; cpuos up".
_AFTERTHOUGHT = re.compile(r"""^(cpuos (?:[^,;'"]|'[^']*'|"[^"]*")*?)(?:[,;] | tells | shows ).*$""")
_EXAMPLE = re.compile(r"^for example ([a-z_]+)=(\S+)$")
_OF_A_CALL = re.compile(r"^for example |^help\(|^GET |^POST ")
_PROGRAMS = frozenset(
    {
        *("cpuos", "apt-get", "cat", "chmod", "cp", "curl", "df", "env", "export", "free", "groupdel", "losetup", "ls"),
        *("make", "mkdir", "modprobe", "mount", "pip", "ps", "python3", "rm", "ssh", "su", "tail", "umount", "unset"),
        *("findmnt", "nft", "uname", "userdel"),
    }
)
_GROUPS = frozenset({"audit", "harden", "key", "pack", "profile", "snapshots", "template"})
_TEMPLATE = re.compile(r"^cpuos create --template (\S+)$")
ENDING = frozenset({"down", "kill", "prune", "rm", "uninstall"})
"""Verbs that end or delete: never completed by us."""
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def as_root(command: str) -> str:
    """The command for root: as it is for root, with sudo where there is one, else with su."""
    if os.geteuid() == 0:
        return command
    return f"sudo {command}" if shutil.which("sudo") else f"su -c {shlex.quote(command)}"


def runnable(hint: str) -> str:
    """A hint with root's commands as this user gives them."""
    if hint.startswith("sudo "):
        return as_root(hint.removeprefix("sudo "))
    return _PRIVILEGED.sub(lambda match: as_root(match[1]), _AFTERTHOUGHT.sub(r"\1", hint))


def is_command(text: str) -> bool:
    """Whether a shell can take it: it begins with a program, after assignments or sudo."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return False
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] == "sudo"):
        words.pop(0)
    return bool(words) and words[0] in _PROGRAMS


def hint_of(error: CpuosError, arguments: Sequence[str] = ()) -> str:
    """What to try after this error, from a shell, where `cpuos` was run with these arguments: always a command."""
    hint = _hint_by_code(error, list(arguments))
    if is_command(hint):
        return hint
    parts = [part for part in re.split(r"; |, or |, then |: (?=cpuos )", hint) if part.startswith("cpuos ")]
    if parts and is_command(parts[0]):
        return runnable(parts[0])
    comment = "" if _OF_A_CALL.match(hint) and _option_of(error) else hint.replace("\n", " ")
    if (option := _option_of(error)) and not comment:
        comment = shlex.join([word for word in option if word])
    return f"{_command_of(error, arguments)}  # {comment}" if comment else _command_of(error, arguments)


def _command_of(error: CpuosError, arguments: Sequence[str]) -> str:
    """Where to look on, when the error names no command of its own."""
    if isinstance(error, Unavailable):
        return "cpuos status"
    verbs = list(itertools.takewhile(re.compile(r"[a-z]+").fullmatch, arguments))
    depth = 2 if verbs[:1] and verbs[0] in _GROUPS else 1
    return " ".join(["cpuos", *verbs[:depth], "--help"])


def _hint_by_code(error: CpuosError, arguments: list[str]) -> str:
    hint = as_commands(error.lines()[2])
    if near := _with_near(error, arguments):
        return near
    match error.code:
        case "key_missing":
            return _way_to_a_key()
        case "key_invalid" if os.environ.get("CPUOS_API_KEY"):
            return "unset CPUOS_API_KEY"
        case "key_invalid":
            return _way_to_a_key()
        case "sandbox_lost" | "sandbox_stopped" if "SANDBOX" in hint:
            return "cpuos ls --all"
        case "template_not_found" if "--template" in arguments and (found := _TEMPLATE.match(hint)):
            return _with_value(arguments, "--template", found[1])
        case "invalid_request" if is_command(error.hint):
            return runnable(hint)  # it knows better than its field alone
        case "invalid_request" if (option := _option_of(error)) and option[0] in arguments:
            return _with_value(arguments, *option)
        case "invalid_request" if arguments[:1] in ([], ["create"]) and _is_of_create(error) and option and option[1]:
            return shlex.join(["cpuos", "create", *option])
        case "invalid_request" if _is_of_create(error) and _EXAMPLE.match(hint):
            return _EXAMPLE.sub(lambda found: f"cpuos create --{found[1].replace('_', '-')} {found[2]}", hint)
        case "capacity_exceeded":
            return _what_fits(error)
    return runnable(hint)


def _is_of_create(error: CpuosError) -> bool:
    return error.what.startswith("cannot create sandbox")


def _option_of(error: CpuosError) -> tuple[str, str] | None:
    """The option whose value was not one, and a value that is; none where that is not told, or no example is known."""
    field = str(error.details.get("field", "")).removeprefix("--").replace("-", "_")
    return next((OPTIONS[part] for part in field.split(".") if part in OPTIONS), None)


def _with_near(error: CpuosError, arguments: Sequence[str]) -> str:
    """The line that was given, with the name that was probably meant; empty where nothing is near. Never one that ends
    or removes something: that is for its user to write."""
    given, near = error.details.get("given"), error.details.get("near")
    if given not in arguments or not near or ENDING.intersection(arguments[:2]):
        return ""
    place = list(arguments).index(given)
    return shlex.join(["cpuos", *arguments[:place], near, *arguments[place + 1 :]])


def _with_value(arguments: Sequence[str], option: str, value: str) -> str:
    """The line that was given, with another value after this option."""
    place = arguments.index(option) + 1
    return shlex.join(["cpuos", *arguments[:place], value, *arguments[place + 1 :]])


def _way_to_a_key() -> str:
    """`up` writes one where this user's client looks. Where it cannot know that place, or is not the server that is
    asked, root makes one by name."""
    if url := os.environ.get("CPUOS_API_URL"):
        host = urlsplit(url).hostname or ""
        make = as_root("cpuos key create my-key")
        return f"export CPUOS_API_KEY=$({make if _is_local(host) else f'ssh {shlex.quote(host)} {shlex.quote(make)}'})"
    if os.geteuid() == 0 or (shutil.which("sudo") and _is_at_home()):
        return as_root("cpuos up")
    return f"export CPUOS_API_KEY=$({as_root('cpuos key create my-key')})"


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_at_home() -> bool:
    """Whether sudo tells root's program where this user's client looks."""
    try:
        return key_file() == key_file_below(Path(pwd.getpwuid(os.geteuid()).pw_dir))
    except KeyError:
        return False


def _what_fits(error: CpuosError) -> str:
    """A smaller sandbox where the one that was asked for would never fit; else what takes the room."""
    short = error.details.get("short")
    options = []
    for name, row in (short if isinstance(short, dict) else {}).items():
        option = {"cpu": "--cpu", "memory_mib": "--memory", "disk_mib": "--disk"}.get(name)
        if option and row["asked"] > row["total"]:
            if row["free"] < 1:
                return "cpuos ls"
            options += [option, f"{row['free']:.0f}" if name == "cpu" else f"{int(row['free'])}MiB"]
    return " ".join(["cpuos create", *options]) if options else "cpuos ls"
