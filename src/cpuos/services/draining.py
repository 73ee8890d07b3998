"""`python -m cpuos.services.draining`: the machine stops, and each sandbox that runs is paused before (systemd)."""

from __future__ import annotations

import sys

from cpuos.errors import CpuosError
from cpuos.services.control import pause_sandboxes
from cpuos.settings import load_settings

__all__ = ["main"]


def main() -> int:
    try:
        paused, left = pause_sandboxes(load_settings())
    except CpuosError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(paused)} sandboxes paused")
    for sandbox_id, why in left.items():
        print(f"not paused: {sandbox_id}: {why}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
