# Generated from src/cpuos/client/_async/forks.py by scripts/gen_sync.py; edit that.
"""Forks: several sandboxes of one, or of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuos.client._backend_sync import shielded
from cpuos.client._parse import make_labels, make_request, parse_answer
from cpuos.client._start import new_key
from cpuos.client._sync.client import Client
from cpuos.client._sync.connection import make_ticket
from cpuos.client._sync.sandbox import CLEAN_UP_S, MOVE_S, Sandbox
from cpuos.errors import CpuosError
from cpuos.types.snapshot import Fork, Forked
from cpuos.types.units import parse_duration_s

__all__ = ["fork"]


def fork(
    client: Client,
    path: str,
    count: int,
    *,
    timeout: str | float | None,
    labels: Mapping[str, str] | None,
    key: str | None,
) -> list[Sandbox]:
    """The sandboxes that a fork of a sandbox or of a snapshot makes."""
    values: dict[str, Any] = {"count": count}
    if timeout is not None:
        values["timeout_s"] = parse_duration_s(timeout, name="timeout")
    if labels is not None:
        values["labels"] = make_labels(labels)
    body = make_request(Fork, values, doing="fork")
    key = key or new_key()
    try:
        return _fork(client, path, body, key)
    except BaseException as error:
        # Interrupted or cancelled: they may be there, or about to be. Their key finds them.
        if not isinstance(error, CpuosError):
            shielded(_abandon_fork, client, path, body, key, timeout_s=CLEAN_UP_S)
        raise


def _fork(client: Client, path: str, body: bytes, key: str) -> list[Sandbox]:
    answer = client.server.call("POST", path, headers={"idempotency-key": key}, content=body, read_timeout_s=MOVE_S)
    made = parse_answer(Forked, answer.body).sandboxes
    return [Sandbox(client, one.sandbox, ticket=make_ticket(one.access, answer)) for one in made]


def _abandon_fork(client: Client, path: str, body: bytes, key: str) -> None:
    try:
        for made in _fork(client, path, body, key):
            made.kill()
    except CpuosError:
        return  # what may exist ends by its own timeout
