"""Durations and sizes as people write them, to the numbers that cross the wire."""

from __future__ import annotations

import re

from cpuos.errors import InvalidRequest

__all__ = ["parse_duration_s", "parse_size_bytes", "parse_size_mib"]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B?)?", re.ASCII)
# Plain letters and GB-style units are binary here: "2G", "2GB" and "2GiB" are the same disk.
_BYTES = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_duration_s(value: str | int | float, *, name: str = "duration") -> float:
    """Seconds from a number of seconds or a text such as "90s", "1h30m", "250ms"."""
    if isinstance(value, bool):
        raise _bad(name, value, "a duration is a number of seconds or a text such as '15m'")
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        text = value.strip()
        parts = _DURATION.findall(text)
        if "".join(number + unit for number, unit in parts) == text and parts:
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        else:
            try:
                seconds = float(text)
            except ValueError:
                raise _bad(name, value, "write seconds, or number and unit: 250ms, 90s, 15m, 1h30m, 2d") from None
    if not 0 < seconds < 1e9:
        raise _bad(name, value, "a duration is over 0 and under 1e9 seconds")
    return seconds


def parse_size_mib(value: str | int, *, name: str = "size") -> int:
    """MiB, rounded up, from a number of MiB or a text such as "512MiB", "8GiB", "2G"."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _bad(name, value, "a size is a number of MiB or a text such as '8GiB'")
    if isinstance(value, int):
        mib = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise _bad(name, value, "write MiB, or number and unit: 512MiB, 8GiB, 1T")
        number, unit = match.groups()
        factor = _BYTES[unit[0]] if unit else 1 << 20
        mib = -int(-float(number) * factor // (1 << 20))
    if mib <= 0:
        raise _bad(name, value, "a size is over 0")
    return mib


def parse_size_bytes(value: str | int, *, name: str = "size") -> int:
    """Bytes from a number of bytes or a text such as "64KiB", "1MiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise _bad(name, value, "write bytes, or number and unit: 4096, 64KiB, 1MiB")
    number, unit = match.groups()
    return int(float(number) * (_BYTES[unit[0]] if unit else 1))


def _bad(name: str, value: object, why: str) -> InvalidRequest:
    return InvalidRequest(f"cannot read {name}: {value!r}", why, details={"field": name})
