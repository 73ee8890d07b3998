"""How a machine's own script tries things, as root, by the Python that set-up has installed: one JSON line a check.

A check that fails does not end the others. Nothing of the test suite is used, only what set-up installs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = "/opt/cpuos"
"""Where the source lies."""
CPUOS = "/var/lib/cpuos/venv/current/bin/cpuos"
FIRST_KEY = Path("/run/cpuos/server/first-key.json")
ENDPOINTS = (Path("/run/cpuos/server/endpoint.json"), Path("/run/cpuos/gateway/endpoint.json"))
UNITS = ("cpuos-node", "cpuos-gateway", "cpuos-server", "cpuos-sandboxes")
READY_S = 300.0


class Skipped(Exception):
    """There is nothing to try; says why."""


def run(*words: str, check: bool = True, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def cpuos(*words: str, check: bool = True) -> str:
    return run(CPUOS, *words, check=check).stdout


def until(condition: Callable[[], object], *, within_s: float = READY_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.5)


def units_are_active() -> bool:
    return run("systemctl", "is-active", *UNITS, check=False).stdout.split() == ["active"] * len(UNITS)


def answers() -> bool:
    return units_are_active() and all(path.exists() for path in ENDPOINTS) and bool(cpuos("ls", "--json", check=False))


def come_up() -> None:
    """The units, as the machine's start has started them; what follows speaks with the first key."""
    until(FIRST_KEY.exists)
    os.environ["CPUOS_API_KEY"] = json.loads(FIRST_KEY.read_text())["api_key"]
    until(answers)


def stop() -> None:
    """What the stop of the machine does. A stop of the target alone returns before its units have stopped."""
    run("systemctl", "stop", "cpuos.target", *UNITS)


def main(functions: Mapping[str, object]) -> None:
    for name, check in functions.items():
        if not name.startswith("test_") or not callable(check):
            continue
        since, why = time.monotonic(), ""
        try:
            check()
        except Skipped as reason:
            why = f"skipped: {reason}"
        except Exception:
            why = traceback.format_exc()[-3000:]
            with contextlib.suppress(Exception):
                why += run("journalctl", "-u", "cpuos-*", "--no-pager", "-n", "25", "-o", "cat").stdout[-5000:]
        print("check " + json.dumps({"name": name, "why": why, "s": round(time.monotonic() - since, 1)}), flush=True)
    print("checks done", flush=True)
