"""The `try:` line as this user, on this machine, can paste it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from cpuos.errors import CpuosError
from cpuos.key_file import key_file, key_file_below

__all__ = ["as_root", "hint_of", "runnable"]

# Commands that need root, at the start of a hint or of one of its parts.
_PRIVILEGED = re.compile(
    r"(?:^|(?<=&& )|(?<=; ))(?:sudo )?(cpuos (?:up|down|setup|uninstall)(?: --[a-z-]+)*)(?![^\s;])"
)
# What other front ends say after the command: "cpuos ls, then cpuos kill SANDBOX", "cpuos status; cpuos up".
_AFTERTHOUGHT = re.compile(r"^(cpuos [^,;'\"]*?)(?:[,;] | tells | shows ).*$")
_EXAMPLE = re.compile(r"^for example ([a-z_]+)=(\S+)$")


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


def hint_of(error: CpuosError) -> str:
    """What to try after this error, from a shell."""
    match error.code:
        case "key_missing":
            return _way_to_a_key()
        case "key_invalid" if os.environ.get("CPUOS_API_KEY"):
            return "unset CPUOS_API_KEY"
        case "key_invalid":
            return _way_to_a_key()
        case "sandbox_lost" | "sandbox_stopped" if "SANDBOX" in error.hint:
            return "cpuos ls --all"
        case "invalid_request" if error.what.startswith("cannot create sandbox") and _EXAMPLE.match(error.hint):
            return _EXAMPLE.sub(lambda found: f"cpuos create --{found[1].replace('_', '-')} {found[2]}", error.hint)
        case "capacity_exceeded":
            return _what_fits(error)
    return runnable(error.hint)


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
