"""Tickets and revocations, by the clock that is given."""

from __future__ import annotations

import time
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gateway_rig import SANDBOX, Rig, TicketMint, error_code

from cpuos.errors import AuthenticationError, Unavailable
from cpuos.gateway.tickets import Revocations, TicketVerifier


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mint(tmp_path: Path) -> TicketMint:
    return TicketMint(tmp_path)


@pytest.fixture
def verifier(mint: TicketMint, tmp_path: Path, clock: Clock) -> TicketVerifier:
    return TicketVerifier(mint.path, revocations=Revocations(tmp_path / "revoked", clock=clock), clock=clock)


def test_a_good_ticket_and_its_end(mint: TicketMint, verifier: TicketVerifier, clock: Clock) -> None:
    text = mint.ticket(exp=int(clock.now) + 60)
    ticket = verifier.verify(text)
    assert (ticket.sandbox, ticket.generation, ticket.actor, ticket.workspace) == (SANDBOX, 1, "key:test", "default")
    assert verifier.verify(text) is ticket
    clock.now += 61
    with pytest.raises(AuthenticationError) as caught:
        verifier.verify(text)
    assert caught.value.code == "ticket_expired"


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "other"},
        {"jti": ...},
        {"exp": ...},
        {"sbx": 7},
        {"scope": ["exec", "root"]},
        {"gen": "x"},
        {"act": None},
        {"path": 3},
    ],
)
def test_wrong_claims(mint: TicketMint, verifier: TicketVerifier, claims: dict[str, object]) -> None:
    with pytest.raises(AuthenticationError) as caught:
        verifier.verify(mint.ticket(**claims))
    assert caught.value.code == "ticket_invalid"


def test_foreign_signatures(mint: TicketMint, verifier: TicketVerifier) -> None:
    stranger = jwt.encode(mint.claims(), Ed25519PrivateKey.generate(), algorithm="EdDSA")
    unsigned = jwt.encode(mint.claims(), None, algorithm="none")
    shared = jwt.encode(mint.claims(), "secret" * 10, algorithm="HS256")
    for text in (stranger, unsigned, shared, "", "a.b.c", "x" * 9000, mint.ticket()[:-4] + "AAAA"):
        with pytest.raises(AuthenticationError) as caught:
            verifier.verify(text)
        assert caught.value.code == "ticket_invalid"


def test_a_new_key_is_read_and_the_old_one_forgotten(mint: TicketMint, verifier: TicketVerifier, clock: Clock) -> None:
    old = mint.ticket(exp=int(clock.now) + 600)
    verifier.verify(old)
    mint.key = Ed25519PrivateKey.generate()
    mint.publish()
    clock.now += 2
    verifier.verify(mint.ticket(exp=int(clock.now) + 600))
    with pytest.raises(AuthenticationError):
        verifier.verify(old)


def test_without_a_key_the_gateway_says_so(tmp_path: Path) -> None:
    verifier = TicketVerifier(tmp_path / "missing", revocations=Revocations(tmp_path / "revoked"))
    with pytest.raises(Unavailable):
        verifier.verify("x")


@pytest.mark.parametrize("kind", ["jti", "sandbox", "actor"])
def test_revocations_hold_over_a_restart(mint: TicketMint, tmp_path: Path, clock: Clock, kind: str) -> None:
    text = mint.ticket(jti="one", iat=int(clock.now) - 5)
    value = {"jti": "one", "sandbox": SANDBOX, "actor": "key:test"}[kind]
    Revocations(tmp_path / "revoked", clock=clock).revoke(kind, value)
    verifier = TicketVerifier(mint.path, revocations=Revocations(tmp_path / "revoked", clock=clock), clock=clock)
    with pytest.raises(AuthenticationError) as caught:
        verifier.verify(text)
    assert (caught.value.code, caught.value.why) == ("ticket_invalid", "it was revoked")
    clock.now += 40 * 86400
    assert not Revocations(tmp_path / "revoked", clock=clock).covers(verifier._read(mint.ticket(jti="one", iat=1)))
    assert (tmp_path / "revoked").read_text() == ""


def test_tickets_issued_after_a_revocation_are_good(mint: TicketMint, tmp_path: Path, clock: Clock) -> None:
    revocations = Revocations(tmp_path / "revoked", clock=clock)
    verifier = TicketVerifier(mint.path, revocations=revocations, clock=clock)
    revocations.revoke("actor", "key:test")
    verifier.verify(mint.ticket(iat=int(clock.now) + 1, exp=int(clock.now) + 600))


async def test_every_way_a_ticket_is_refused(rig: Rig) -> None:
    cases = [
        ({"sbx": "o" * 20}, 401, "ticket_invalid"),
        ({"exp": 1}, 401, "ticket_expired"),
        ({"scope": ["files"]}, 403, "forbidden"),
        ({"gen": 0}, 409, "stale_generation"),
        ({"gen": 2}, 409, "wrong_state"),
    ]
    for claims, status, code in cases:
        async with rig.client(**claims) as client:
            answer = await client.call("GET", "/commands")
            assert (answer.status_code, error_code(answer)) == (status, code)
    async with rig.client() as client:
        for header, code in [(None, "key_missing"), ("Basic x", "ticket_invalid"), ("Bearer x", "ticket_invalid")]:
            client.http.headers.pop("Authorization", None)
            answer = await client.call("GET", "/commands", headers={"Authorization": header} if header else {})
            assert (answer.status_code, error_code(answer)) == (401, code)


async def test_a_revoked_ticket_ends_its_streams(rig: Rig) -> None:
    async with rig.client(jti="gone") as client, rig.client() as other:
        body = {"command": "sleep 30", "cwd": "/"}
        async with client.http.stream("POST", client.base + "/commands", json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            ended = await rig.control.post("/v1/tickets/revoke", json={"jti": "gone"})
            assert ended.json() == {"ended_calls": 1}
            with pytest.raises(Exception, match=r"peer closed|incomplete|disconnected"):
                async for _ in pieces:
                    pass
        refused = await client.call("GET", "/commands")
        assert error_code(refused) == "ticket_invalid"
        listed = (await other.call("GET", "/commands")).json()["commands"]
        assert listed[0]["status"] == "running"
        await other.call("POST", f"/commands/{listed[0]['id']}/kill")
