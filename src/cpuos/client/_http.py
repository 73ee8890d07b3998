"""What a call needs to know about HTTP, without doing any: queries, errors in answers, when to try again, tickets."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from cpuos.errors import CpuosError, PlatformError, Unavailable, error_from_body

__all__ = [
    "BRIEF",
    "CONNECT_TIMEOUT_S",
    "PATIENT",
    "Answer",
    "Once",
    "Patience",
    "Retry",
    "Ticket",
    "TransportFailure",
    "answer_error",
    "encode_query",
    "needs_httpx",
    "proxy_of",
    "unreachable",
    "websocket_options",
]

CONNECT_TIMEOUT_S = 5.0
PAUSED_S = 2.0

QueryValue = str | bytes | int | float | bool | list[str] | None
# Answers that say "not now": the part behind is restarting. 429 is an answer about limits, so it is never repeated.
_PASSING_CODES = frozenset({"server_unavailable", "gateway_unavailable", "idempotency_in_progress"})


_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class TransportFailure(Exception):
    """The connection failed. `sent` False: the request certainly did not reach the other side."""

    def __init__(self, reason: str, *, sent: bool, stale: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent
        self.stale = stale
        """An idle connection that the other side was closing: a new one need not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole HTTP answer. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Once:
    """A body that can be sent one time only."""

    chunks: Any


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for this URL. Calls to this machine never go through one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if (
        host in ("localhost", "::1")
        or host.startswith("127.")
        or not any(name.lower().endswith("_proxy") for name in os.environ)
    ):
        return None
    from urllib.request import getproxies, proxy_bypass

    return None if proxy_bypass(host) else getproxies().get(parts.scheme)


def needs_httpx(url: str) -> bool:
    """True for what is more than HTTP over plain TCP."""
    return url.startswith("https:") or proxy_of(url) is not None


def websocket_options(url: str) -> dict[str, Any]:
    """A terminal's WebSocket: no compression, messages as large as a frame."""
    return {
        "compression": None,
        "max_size": 2 << 20,
        "open_timeout": CONNECT_TIMEOUT_S,
        "close_timeout": 2.0,
        "proxy": proxy_of(url.replace("ws", "http", 1)),
    }


def encode_query(values: Mapping[str, QueryValue]) -> str:
    """Query text with "?" of the values that are not None; a list repeats its name.

    Text is encoded as file names are, so any path passes.
    """
    parts = []
    for name, value in values.items():
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool):
                item = "true" if item else "false"
            elif not isinstance(item, str | bytes):
                item = str(item)
            parts.append(f"{name}={quote(os.fsencode(item), safe='/')}")
    return "?" + "&".join(parts) if parts else ""


def answer_error(status: int, body: bytes) -> CpuosError:
    """The error that an answer carries; what is not an error body of ours becomes an error that says so."""
    import json

    try:
        parsed = json.loads(body)
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        return PlatformError(f"cannot read the answer: HTTP {status} without an error body", text, code="internal")
    return error_from_body(parsed, status=status)


def unreachable(code: str, *, url: str, reason: str, sent: bool) -> Unavailable:
    """The three lines for a part that cannot be reached, or was lost before it answered."""
    part = "server" if code == "server_unavailable" else "gateway"
    if sent:
        what = f"cannot tell the outcome of the call: the cpuOS {part} at {url} went away before it answered"
    else:
        what = f"cannot reach the cpuOS {part}: {url}"
    return Unavailable(what, reason, code=code, hint="cpuos up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call waits for a part that is away."""

    attempts: int
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0


# A server never reached yet is probably not running: say so soon. One that answered before is probably restarting.
BRIEF = Patience(attempts=3)
PATIENT = Patience(attempts=10)


class Retry:
    """Decides after each failure: the delay before the next attempt, or None to give up."""

    def __init__(self, patience: Patience, *, repeatable: bool) -> None:
        self._patience = patience
        self._repeatable = repeatable
        self._failures = 0
        self._paused = False

    def after_failure(self, failure: TransportFailure) -> float | None:
        """A request that may have arrived is repeated only when a repeat changes nothing."""
        delay = self._next_delay() if self._repeatable or not failure.sent else None
        return 0.0 if failure.stale and delay is not None else delay

    def after_error(self, error: CpuosError) -> float | None:
        if error.code == "sandbox_paused" and not self._paused and error.details.get("auto_resume", True):
            # The call has waited for the resume already; once more, as the answer's Retry-After says.
            self._paused = True
            return PAUSED_S if self._repeatable else None
        return self._next_delay() if self._repeatable and error.code in _PASSING_CODES else None

    def progress(self) -> None:
        """Something new arrived: the other side works, so patience starts anew."""
        self._failures = 0

    def _next_delay(self) -> float | None:
        self._failures += 1
        if self._failures >= self._patience.attempts:
            return None
        delay = min(self._patience.first_delay_s * 2 ** (self._failures - 1), self._patience.max_delay_s)
        return delay * random.uniform(0.8, 1.2)


class Ticket:
    """A data-plane ticket and its age, told by the local monotonic clock and the server's own `Date`."""

    def __init__(
        self,
        *,
        data_url: str,
        ticket: str,
        expires_at: datetime,
        date: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.data_url = data_url.rstrip("/")
        self.headers = {"authorization": f"Bearer {ticket}"}
        self._clock = clock
        self._stale_at = clock() + 0.9 * _lifetime_s(expires_at, date)

    @property
    def fresh(self) -> bool:
        """Good for a request whose body cannot be sent twice; others just try and renew on `ticket_expired`."""
        return self._clock() < self._stale_at


def _lifetime_s(expires_at: datetime, date: str | None) -> float:
    if expires_at.tzinfo is None:
        expires_at = expires_at.replace(tzinfo=UTC)
    return max((expires_at - (_parse_date(date) or datetime.now(UTC))).total_seconds(), 0.0)


def _parse_date(text: str | None) -> datetime | None:
    """A `Date` header: "Tue, 01 Dec 2026 10:00:00 GMT". The standard library's parser costs ten times its use here."""
    try:
        _, day, month, year, clock, _ = (text or "").split(" ")
        hour, minute, second = map(int, clock.split(":"))
        return datetime(int(year), _MONTHS.index(month) + 1, int(day), hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
