"""The `cpuos` command: one file a group of commands, built on the public SDK."""

from __future__ import annotations

__all__ = ["run"]


def run() -> int:
    """Entry point of the `cpuos` script. Ctrl-C while the modules load gives no traceback either."""
    try:
        from cpuos.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130
