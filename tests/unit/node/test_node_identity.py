from __future__ import annotations

import json
import stat

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cpuos.errors import PlatformError
from cpuos.node.identity import SIGNATURE_DOMAIN, load_identity

A = "a" * 20


def test_the_key_is_made_once_and_is_private(tmp_path):
    path = tmp_path / "identity.key"
    first = load_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]
    assert load_identity(path).public_key == first.public_key


def test_a_short_key_is_an_error_and_stays(tmp_path):
    path = tmp_path / "identity.key"
    path.write_bytes(b"short")
    with pytest.raises(PlatformError, match="cannot read the node's key"):
        load_identity(path)
    assert path.read_bytes() == b"short"


def test_a_thawing_statement_names_the_freeze_and_who_froze(tmp_path):
    identity = load_identity(tmp_path / "identity.key")
    again = identity.sign_statement(A, 3, session_key=b"k" * 32, hostname="box", incarnation=2, thaw="f" * 32)
    said = json.loads(again.statement)
    assert (said["incarnation"], said["thaw"], said["from"]) == (2, "f" * 32, A)
    copied = identity.sign_statement(
        "b" * 20, 1, session_key=b"k" * 32, hostname="box", incarnation=1, thaw="f" * 32, frozen_as=A
    )
    assert json.loads(copied.statement)["from"] == A


def test_a_statement_says_what_the_contract_lists(tmp_path):
    identity = load_identity(tmp_path / "identity.key", now=lambda: 1000.25)
    signed = identity.sign_statement(A, 3, session_key=b"k" * 32, hostname="box")
    said = json.loads(signed.statement)
    assert said == {
        "sandbox": A,
        "generation": 3,
        "incarnation": 0,
        "expires_at": 1060,
        "session_key": "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=",
        "hostname": "box",
        "now": 1000.25,
    }
    key = Ed25519PublicKey.from_public_bytes(identity.public_key)
    key.verify(signed.signature, SIGNATURE_DOMAIN + signed.statement)
    with pytest.raises(InvalidSignature):
        key.verify(signed.signature, signed.statement)
    with pytest.raises(InvalidSignature):
        key.verify(signed.signature, SIGNATURE_DOMAIN + signed.statement.replace(b'"generation":3', b'"generation":4'))
