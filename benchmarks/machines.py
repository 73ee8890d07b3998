"""MicroVMs, apart from the others since each cold boot takes seconds where it is emulated.

`python -m benchmarks.machines [ROUNDS]`: restore against cold boot, in turns, and the pages of its own that an idle
copy has against those of an idle cold one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

from cpuos import Sandbox
from cpuos.runtimes.microvm.memory import HELD_AS
from cpuos.testing.instance import Instance

__all__ = ["main"]

_SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "256MiB", "timeout": "30m"}
_IDLE_S = 3.0


def main(rounds: int) -> dict[str, float]:
    """Medians, and their ratios."""
    cold, warm, shares = [], [], []
    with Instance(runtime="microvm", max_sandboxes=4, allow_emulated=True) as instance:
        client = instance.client()
        with Sandbox.create(client=client, **_SHAPE) as origin:
            origin.exec(["true"], check=True)
            snapshot = origin.snapshot()
        for _ in range(rounds):
            since = time.perf_counter()
            with Sandbox.create(client=client, **_SHAPE) as booted:
                booted.exec(["true"], check=True)
                cold.append(time.perf_counter() - since)
                time.sleep(_IDLE_S)
                of_cold = _own_bytes(instance, booted.id)
            since = time.perf_counter()
            with Sandbox.create(client=client, snapshot=snapshot) as copy:
                copy.exec(["true"], check=True)
                warm.append(time.perf_counter() - since)
                time.sleep(_IDLE_S)
                shares.append(_own_bytes(instance, copy.id) / of_cold)
        snapshot.delete()
    told = {"cold_s": statistics.median(cold), "restored_s": statistics.median(warm)}
    return told | {"faster": told["cold_s"] / told["restored_s"], "own_memory": statistics.median(shares)}


def _own_bytes(instance: Instance, sandbox_id: str) -> int:
    """What the mapping of its guest's memory holds that no other has."""
    record = json.loads((instance.settings.node_state_dir / "journal" / f"{sandbox_id}.json").read_text())
    process = record["process"]["pid"]
    inode = os.stat(f"/proc/{process}/fd/{HELD_AS}").st_ino
    found, inside = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = words[4] == str(inode) and words[3] != "00:00"
        elif inside and words[0] == "Private_Dirty:":
            found += int(words[1]) << 10
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3), indent=1))
