"""Tickets as the gateway will read them, and the key that signs them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from cpuos.errors import SetupRequired
from cpuos.server.tickets import TICKET_LIFE_S, TicketSigner, load_ticket_key, publish_public_key

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def public_bytes(path: Path) -> bytes:
    return load_ticket_key(path).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "ticket.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(public_bytes, [path] * 8))
    assert len(keys) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["ticket.key"]


def test_a_key_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ticket.key"
    path.write_text("nonsense")
    with pytest.raises(SetupRequired, match="cannot read the ticket key"):
        load_ticket_key(path)


def test_the_public_half_verifies_a_ticket(tmp_path: Path) -> None:
    key = load_ticket_key(tmp_path / "ticket.key")
    publish_public_key(key, tmp_path / "ticket.pub")
    assert stat.S_IMODE((tmp_path / "ticket.pub").stat().st_mode) == 0o640
    signer = TicketSigner(key, lambda: NOW)
    access = signer.access(
        data_url="http://g", workspace="default", sandbox="a" * 20, generation=3, actor="key:1", task="t"
    )
    public = load_pem_public_key((tmp_path / "ticket.pub").read_bytes())
    claims = jwt.decode(
        access.ticket, public, algorithms=["EdDSA"], issuer="cpuos", options={"verify_exp": False, "verify_iat": False}
    )
    assert claims.pop("jti")
    assert claims == {
        "iss": "cpuos",
        "ws": "default",
        "sbx": "a" * 20,
        "gen": 3,
        "act": "key:1",
        "task": "t",
        "scope": ["exec", "files"],
        "pv": 1,
        "iat": int(NOW.timestamp()),
        "exp": int(NOW.timestamp()) + TICKET_LIFE_S,
    }
    assert access.expires_at.timestamp() == claims["exp"]


def test_a_link_names_one_path(tmp_path: Path) -> None:
    key = load_ticket_key(tmp_path / "ticket.key")
    url, expires_at = TicketSigner(key, lambda: NOW).link(
        data_url="http://g",
        workspace="w",
        sandbox="a" * 20,
        generation=1,
        actor="key:1",
        path="out/é.png",
        expires_s=60,
    )
    token = url.removeprefix("http://g/v1/links/")
    claims = jwt.decode(
        token,
        key.public_key(),
        algorithms=["EdDSA"],
        issuer="cpuos",
        options={"verify_exp": False, "verify_iat": False},
    )
    assert claims["scope"] == ["link"]
    assert claims["path"] == "out/é.png"
    assert claims["exp"] == int(expires_at.timestamp()) == int(NOW.timestamp()) + 60
