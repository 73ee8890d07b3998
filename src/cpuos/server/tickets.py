"""Tickets: what the gateway needs to know to let a caller at one sandbox's data, signed by this server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpuos.errors import SetupRequired
from cpuos.server.clock import Clock
from cpuos.types.sandbox import Access

__all__ = ["TICKET_LIFE_S", "TicketSigner", "load_ticket_key", "publish_public_key"]

TICKET_LIFE_S = 15 * 60
POLICY_VERSION = 1
ISSUER = "cpuos"


class TicketSigner:
    def __init__(self, key: Ed25519PrivateKey, clock: Clock) -> None:
        self._key = key
        self._clock = clock

    def access(
        self,
        *,
        data_url: str,
        workspace: str,
        sandbox: str,
        generation: int,
        actor: str,
        task: str | None,
        scope: Sequence[str] = ("exec", "files"),
    ) -> Access:
        """The way to one sandbox's commands and files; with scope `records` only to what its commands left."""
        expires_at = self._clock() + timedelta(seconds=TICKET_LIFE_S)
        ticket = self._sign(
            expires_at,
            scope=scope,
            ws=workspace,
            sbx=sandbox,
            gen=generation,
            act=actor,
            task=task,
        )
        return Access(data_url=data_url, ticket=ticket, expires_at=expires_at)

    def link(
        self,
        *,
        data_url: str,
        workspace: str,
        sandbox: str,
        generation: int,
        actor: str,
        path: str,
        expires_s: float,
    ) -> tuple[str, datetime]:
        """A URL that downloads one file, to give away."""
        expires_at = self._clock() + timedelta(seconds=expires_s)
        token = self._sign(expires_at, scope=("link",), ws=workspace, sbx=sandbox, gen=generation, act=actor, path=path)
        return f"{data_url}/v1/links/{quote(token)}", expires_at

    def preview(
        self,
        *,
        workspace: str,
        sandbox: str,
        generation: int,
        actor: str,
        port: int,
        epoch: int,
        host: str | None,
        expires_at: datetime,
    ) -> str:
        """Opens one published port, until it is closed."""
        return self._sign(
            expires_at,
            scope=("preview",),
            ws=workspace,
            sbx=sandbox,
            gen=generation,
            act=actor,
            port=port,
            epoch=epoch,
            host=host,
        )

    def _sign(self, expires_at: datetime, *, scope: Sequence[str], **claims: str | int | None) -> str:
        payload = {
            "jti": secrets.token_urlsafe(12),
            "iss": ISSUER,
            "pv": POLICY_VERSION,
            "iat": int(self._clock().timestamp()),
            "exp": int(expires_at.timestamp()),
            "scope": list(scope),
            **{name: value for name, value in claims.items() if value is not None},
        }
        return jwt.encode(payload, self._key, algorithm="EdDSA")


def load_ticket_key(path: Path) -> Ed25519PrivateKey:
    """Read the signing key; make it at the first start. Only the server's user can read it."""
    if not path.exists():
        _make_key(path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise SetupRequired(f"cannot read the ticket key: {path}", str(error), hint=f"rm {path}; cpuos up") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SetupRequired(f"cannot use the ticket key: {path}", "it is not an Ed25519 key", hint=f"rm {path}")
    return key


def publish_public_key(key: Ed25519PrivateKey, path: Path) -> None:
    """Write the public half (PEM), whole or not at all, readable by the group."""
    encoded = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(encoded)
    partial.chmod(0o640)
    partial.replace(path)


def _make_key(path: Path) -> None:
    encoded = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)  # like O_EXCL, but whole: a start that is killed here leaves no half a key
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)
