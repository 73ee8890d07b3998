"""What room is short of, in words: the same from the scheduler and from a node."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["describe_shortage"]

_UNITS = {"sandboxes": "", "cpu": "", "memory_mib": "MiB", "disk_mib": "MiB", "processes": ""}


def describe_shortage(short: Mapping[str, Mapping[str, float]]) -> str:
    """Of each resource what is asked, free and promised, the limit of promises, and what the machine has, where these
    two differ."""
    return "; ".join(_describe(name, row) for name, row in short.items())


def _describe(name: str, row: Mapping[str, float]) -> str:
    def amount(key: str) -> str:
        unit = _UNITS.get(name, "")
        return f"{row[key]:.0f} {unit}" if unit else f"{row[key]:.10g}"

    text = f"{name.removesuffix('_mib')}: {amount('asked')} asked, {amount('free')} free"
    if "promised" in row:
        text += f" ({amount('promised')} promised, limit {amount('total')}"
        text += f", the machine has {amount('machine')})" if row.get("machine", row["total"]) != row["total"] else ")"
    return text
