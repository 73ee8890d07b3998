"""`python -m benchmarks.run [FIGURE …]`: measure, print a table, write JSON; 1 when a figure misses its goal."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.figures import FIGURES, Figure
from benchmarks.results import Measured
from benchmarks.stage import Stage
from cpuos import __version__
from cpuos.runtimes.gvisor.version import RUNSC_VERSION

__all__ = ["main"]

DEFAULT_JSON = Path("build/bench.json")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    names = [figure.name for figure in FIGURES]
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"all of them, or some of: {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help=f"where the numbers go ({DEFAULT_JSON})")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each transfer; others take a multiple (5)")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.figures) - set(names))
    if unknown:
        parser.error(f"there is no figure {unknown[0]!r}; there are {', '.join(names)}")
    if os.geteuid() != 0:
        parser.error("it starts real sandboxes and needs root: sudo make bench")
    stage = Stage(rounds=chosen.rounds)
    measured: dict[str, Measured] = {}
    try:
        for figure in FIGURES:
            if not chosen.figures or figure.name in chosen.figures:
                print(f"measuring {figure.name} …", file=sys.stderr, flush=True)
                measured[figure.name] = figure.measure(stage)
    finally:
        stage.close()
        if measured:  # what was measured is shown, though a later one failed
            _write(chosen.json, measured)
            print(_table(measured))
    return 0 if all(figure.is_met(measured[figure.name].value) for figure in FIGURES if figure.name in measured) else 1


def _write(path: Path, measured: dict[str, Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {figure.name: _entry(figure, measured[figure.name]) for figure in FIGURES if figure.name in measured}
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "runsc": RUNSC_VERSION,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "figures": figures,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _entry(figure: Figure, measured: Measured) -> dict[str, Any]:
    return {
        "value": round(measured.value, 3),
        "unit": figure.unit,
        "spread": [round(value, 3) for value in measured.spread],
        "goal": figure.goal,
        "met": figure.is_met(measured.value),
        **measured.detail,
    }


def _table(measured: dict[str, Measured]) -> str:
    rows = [("figure", "value", "spread", "goal", "verdict", "detail")]
    for figure in FIGURES:
        if figure.name in measured:
            found = measured[figure.name]
            low, high = found.spread
            rows.append(
                (
                    figure.name,
                    f"{found.value:.3g} {figure.unit}",
                    f"{low:.3g} – {high:.3g}",
                    figure.goal,
                    "met" if figure.is_met(found.value) else "MISSED",
                    _words(found.detail),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
    )


def _words(detail: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {'/'.join(f'{part:g}' for part in value.values()) if isinstance(value, dict) else value}"
        for name, value in detail.items()
    )


if __name__ == "__main__":
    sys.exit(main())
