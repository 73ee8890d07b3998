"""What is not ours is told in our shape: a database that cannot be used is a part that is down, not a fault."""

from __future__ import annotations

import sqlite3

import pytest
from sqlalchemy.exc import OperationalError

from cpuos.server.envelope import body_of_error


@pytest.mark.parametrize(
    "text", ["database is locked", "attempt to write a readonly database", "database or disk is full", "disk I/O error"]
)
def test_an_unusable_database_is_named(text: str) -> None:
    error = OperationalError("INSERT INTO sandbox VALUES (?)", ("secret",), sqlite3.OperationalError(text))
    status, body = body_of_error(error, request_id="req_1")
    assert (status, body["error"]["code"], body["error"]["why"]) == (503, "server_unavailable", text)
    assert "secret" not in str(body)
    assert "INSERT" not in str(body)


def test_a_fault_keeps_its_text() -> None:
    status, body = body_of_error(ValueError("secret"), request_id="req_1")
    assert (status, body["error"]["code"]) == (500, "internal")
    assert "secret" not in str(body)
    assert "req_1" in body["error"]["why"]
