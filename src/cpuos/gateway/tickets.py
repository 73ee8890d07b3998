"""Tickets: who may do what in one sandbox, signed by the server, checked here without asking anybody.

Checked tickets are kept by their text. Revocations are pushed by the server and kept in a small file, so that a
restart of the gateway does not let a revoked ticket in again.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from cpuos.errors import AuthenticationError, InvalidRequest, Unavailable

__all__ = ["Revocations", "Ticket", "TicketVerifier"]

SCOPES = frozenset({"exec", "files", "link", "preview", "records"})
MAX_TICKET_BYTES = 8 << 10
CACHED_TICKETS = 4096
KEY_LOOK_EVERY_S = 1.0
REVOCATION_KEPT_S = 32 * 86400.0
"""Longer than any ticket or link lives."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A checked ticket."""

    id: str
    workspace: str
    sandbox: str
    generation: int
    actor: str
    scope: frozenset[str]
    issued_at: float
    expires_at: float
    path: str | None = None
    """The one file that a link gives."""
    port: int | None = None
    """The one port that a preview shows."""
    epoch: int | None = None
    """Of the port's being published: closing it ends the epoch."""
    host: str | None = None
    """What the server inside gets as Host instead of the preview's name."""
    task: str | None = None
    policy_version: int | None = None


class Revocations:
    """Which tickets were taken back: one by its id, or all of a sandbox or an actor issued until then."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._rows: dict[tuple[str, str], float] = {}
        self._load()

    def _load(self) -> None:
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return
        oldest = self._clock() - REVOCATION_KEPT_S
        for line in lines:
            try:
                kind, value, at = json.loads(line)
            except ValueError:
                continue  # torn by a power cut
            if at >= oldest:
                self._rows[kind, value] = at
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps([*key, at]) + "\n" for key, at in self._rows.items()))
        partial.replace(self._path)

    def revoke(self, kind: str, value: str) -> None:
        """`kind` is jti, sandbox or actor."""
        if kind not in ("jti", "sandbox", "actor"):
            raise InvalidRequest(f"cannot revoke tickets by {kind!r}", "name one of jti, sandbox, actor")
        at = self._clock()
        self._rows[kind, value] = at
        line = json.dumps([kind, value, at]) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def covers(self, ticket: Ticket) -> bool:
        if not self._rows:
            return False
        if ("jti", ticket.id) in self._rows:
            return True
        latest = max(self._rows.get(("sandbox", ticket.sandbox), 0), self._rows.get(("actor", ticket.actor), 0))
        # `iat` is whole seconds: a ticket of the revocation's own second counts as older.
        return ticket.issued_at <= latest


class TicketVerifier:
    """Checks tickets against the server's public key file, which is read again when it changes."""

    def __init__(self, key_path: Path, *, revocations: Revocations, clock: Callable[[], float] = time.time) -> None:
        self._key_path = key_path
        self._revocations = revocations
        self._clock = clock
        self._key: Ed25519PublicKey | None = None
        self._key_seen: tuple[int, int, int] | None = None
        self._looked_at = 0.0
        self._known: OrderedDict[str, Ticket] = OrderedDict()

    def verify(self, text: str) -> Ticket:
        """The ticket, or `ticket_invalid`, `ticket_expired`."""
        now = self._clock()
        if now - self._looked_at >= KEY_LOOK_EVERY_S or self._key is None:
            self._look_at_key(now)
        ticket = self._known.get(text)
        if ticket is None:
            ticket = self._read(text)
            self._known[text] = ticket
            if len(self._known) > CACHED_TICKETS:
                self._known.popitem(last=False)
        if ticket.expires_at <= now:
            self._known.pop(text, None)
            raise AuthenticationError(
                "cannot use the ticket: it has expired",
                "a ticket lives a few minutes",
                code="ticket_expired",
                hint="ask the server for a new one: POST /v1/sandboxes/ID/access",
            )
        if self._revocations.covers(ticket):
            raise _invalid("it was revoked")
        return ticket

    def _read(self, text: str) -> Ticket:
        if len(text) > MAX_TICKET_BYTES:
            raise _invalid(f"it is over {MAX_TICKET_BYTES} bytes")
        options = {"require": ["jti", "sbx", "gen", "ws", "act", "scope", "iat", "exp"], "verify_exp": False}
        try:
            claims = jwt.decode(text, self._key, algorithms=["EdDSA"], issuer="cpuos", options=options, leeway=60)
        except jwt.InvalidTokenError as error:
            raise _invalid(str(error)) from None
        try:
            return _from_claims(claims)
        except (TypeError, ValueError) as error:
            raise _invalid(f"a claim is malformed: {error}") from None

    def _look_at_key(self, now: float) -> None:
        self._looked_at = now
        try:
            found = self._key_path.stat()
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if seen == self._key_seen:
                return
            key = _read_key(self._key_path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            if self._key is not None:
                return
            raise Unavailable(
                "cannot check tickets", f"the server's public key is not readable: {error}", hint="cpuos up"
            ) from error
        self._key, self._key_seen = key, seen
        self._known.clear()


def _read_key(data: bytes) -> Ed25519PublicKey:
    if data.lstrip().startswith(b"-----"):
        key = load_pem_public_key(data)
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("not an Ed25519 key")
        return key
    raw = data if len(data) == 32 else base64.b64decode(data.strip(), validate=True)
    return Ed25519PublicKey.from_public_bytes(raw)


def _from_claims(claims: dict[str, Any]) -> Ticket:
    scope = claims["scope"]
    scope = frozenset(scope.split() if isinstance(scope, str) else map(_text, scope))
    if not scope <= SCOPES:
        raise ValueError("scope")
    path = claims.get("path")
    task = claims.get("task")
    host = claims.get("host")
    return Ticket(
        id=_text(claims["jti"]),
        workspace=_text(claims["ws"]),
        sandbox=_text(claims["sbx"]),
        generation=int(claims["gen"]),
        actor=_text(claims["act"]),
        scope=scope,
        issued_at=float(claims["iat"]),
        expires_at=float(claims["exp"]),
        path=None if path is None else _text(path),
        port=_number(claims.get("port")),
        epoch=_number(claims.get("epoch")),
        host=None if host is None else _text(host),
        task=None if task is None else _text(task),
        policy_version=claims.get("pv"),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value


def _number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"{type(value).__name__} where a number is expected")
    return value


def _invalid(why: str) -> AuthenticationError:
    return AuthenticationError("cannot use the ticket", why, code="ticket_invalid")
