"""Signals that a client may send, by name or number."""

from __future__ import annotations

import signal

from cpuos.errors import InvalidRequest

__all__ = ["signal_number"]

_ALLOWED = ("HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "ALRM", "TERM", "CONT", "STOP", "TSTP", "WINCH")
_NUMBERS = {name: int(getattr(signal, f"SIG{name}")) for name in _ALLOWED}


def signal_number(value: str | int) -> int:
    """The number of "KILL", "SIGTERM", 15 …"""
    if isinstance(value, int):
        if value in _NUMBERS.values():
            return value
    elif (name := value.upper().removeprefix("SIG")) in _NUMBERS:
        return _NUMBERS[name]
    raise InvalidRequest(f"cannot send signal {value!r}", f"it is one of {', '.join(_ALLOWED)}")
