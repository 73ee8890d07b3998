"""What another daemon of this host has answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cpuos.errors import CpuosError, error_from_body, is_error_body

__all__ = ["read_answer"]


def read_answer(status: int, body: bytes, *, away: Callable[[str], CpuosError]) -> Any:
    """The value of an answer; None of one without a body. Raises the error that it carries, and that of `away`, with
    the reason, where the daemon itself has said nothing."""
    if status == 204:
        return None
    try:
        decoded = json.loads(body)
    except ValueError:
        decoded = None
    if status >= 500 and not is_error_body(decoded):
        raise away("it stopped while it worked on the call")
    if status >= 400 or decoded is None:
        raise error_from_body(decoded, status=status)
    return decoded
