"""Forks: several sandboxes of one, or of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuos.client._async.client import AsyncClient
from cpuos.client._async.connection import make_ticket
from cpuos.client._async.sandbox import CLEAN_UP_S, MOVE_S, AsyncSandbox
from cpuos.client._backend_async import shielded
from cpuos.client._parse import make_labels, make_request, parse_answer
from cpuos.client._start import new_key
from cpuos.errors import CpuosError
from cpuos.types.snapshot import Fork, Forked
from cpuos.types.units import parse_duration_s

__all__ = ["fork"]


async def fork(
    client: AsyncClient,
    path: str,
    count: int,
    *,
    timeout: str | float | None,
    labels: Mapping[str, str] | None,
    key: str | None,
) -> list[AsyncSandbox]:
    """The sandboxes that a fork of a sandbox or of a snapshot makes."""
    values: dict[str, Any] = {"count": count}
    if timeout is not None:
        values["timeout_s"] = parse_duration_s(timeout, name="timeout")
    if labels is not None:
        values["labels"] = make_labels(labels)
    body = make_request(Fork, values, doing="fork")
    key = key or new_key()
    try:
        return await _fork(client, path, body, key)
    except BaseException as error:
        # Interrupted or cancelled: they may be there, or about to be. Their key finds them.
        if not isinstance(error, CpuosError):
            await shielded(_abandon_fork, client, path, body, key, timeout_s=CLEAN_UP_S)
        raise


async def _fork(client: AsyncClient, path: str, body: bytes, key: str) -> list[AsyncSandbox]:
    answer = await client.server.call(
        "POST", path, headers={"idempotency-key": key}, content=body, read_timeout_s=MOVE_S
    )
    made = parse_answer(Forked, answer.body).sandboxes
    return [AsyncSandbox(client, one.sandbox, ticket=make_ticket(one.access, answer)) for one in made]


async def _abandon_fork(client: AsyncClient, path: str, body: bytes, key: str) -> None:
    try:
        for made in await _fork(client, path, body, key):
            await made.kill()
    except CpuosError:
        return  # what may exist ends by its own timeout
