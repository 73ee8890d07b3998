"""The node's key, and the statements by which a guest agent knows its host and its own generation."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpuos.errors import PlatformError

__all__ = ["SIGNATURE_DOMAIN", "NodeIdentity", "SignedStatement", "load_identity"]

SIGNATURE_DOMAIN = b"cpuos-identity-v1\n"
KEY_BYTES = 32
STATEMENT_LIFE_S = 60


@dataclass(frozen=True, kw_only=True)
class SignedStatement:
    statement: bytes
    signature: bytes


class NodeIdentity:
    """Signs with the node's Ed25519 key; the key itself leaves this object never."""

    def __init__(self, key: Ed25519PrivateKey, *, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._now = now

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign_statement(
        self,
        sandbox_id: str,
        generation: int,
        *,
        session_key: bytes,
        hostname: str,
        incarnation: int = 0,
        thaw: str | None = None,
        frozen_as: str | None = None,
    ) -> SignedStatement:
        """The statement of api/guest.md: valid for this sandbox, generation and incarnation alone.

        `thaw` is the freeze that it ends, `frozen_as` the id of the sandbox that froze: its own, or the one that it is
        a copy of. Both are told as long as the incarnation lasts.
        """
        now = self._now()
        fields: dict[str, Any] = {
            "sandbox": sandbox_id,
            "generation": generation,
            "incarnation": incarnation,
            "expires_at": int(now) + STATEMENT_LIFE_S,
            "session_key": base64.b64encode(session_key).decode(),
            "hostname": hostname,
            "now": now,
        }
        if thaw is not None:
            fields |= {"thaw": thaw, "from": frozen_as or sandbox_id}
        statement = json.dumps(fields, separators=(",", ":")).encode()
        return SignedStatement(statement=statement, signature=self._key.sign(SIGNATURE_DOMAIN + statement))


def load_identity(path: Path, *, now: Callable[[], float] = time.time) -> NodeIdentity:
    """Read the key, or make it. An existing file is never overwritten: running guests know its public half."""
    try:
        raw = _create_key(path)
    except FileExistsError:
        raw = path.read_bytes()
    if len(raw) != KEY_BYTES:
        raise PlatformError(
            f"cannot read the node's key: {path}",
            f"it has {len(raw)} bytes instead of {KEY_BYTES}; sandboxes that run now know the lost key",
            hint=f"cpuos down && rm {path} && cpuos up",
        )
    return NodeIdentity(Ed25519PrivateKey.from_private_bytes(raw), now=now)


def _create_key(path: Path) -> bytes:
    if path.exists():
        raise FileExistsError(path)
    key = Ed25519PrivateKey.generate()
    raw = key.private_bytes(serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    # Written whole under another name first: a crash leaves no short key behind.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, raw)
        os.fsync(descriptor)
        os.link(draft, path)
    finally:
        os.close(descriptor)
        os.unlink(draft)
    return raw
