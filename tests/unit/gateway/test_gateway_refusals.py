"""What a command was refused: asked of the records worker, told with its end, and never in the end's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import DataClient, Rig

from cpuos.gateway.refusals import LocalRefusals, explain
from cpuos.types.network import ConnectionKind, RefusedConnection

SANDBOX = "a" * 20
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def refusal(seconds: float, **fields: Any) -> dict[str, Any]:
    known = {"kind": "tcp", "address": "169.254.169.254", "port": 80, "rule": "always blocked: link-local", "count": 1}
    return {"at": (NOW + timedelta(seconds=seconds)).isoformat(), **known, **fields}


class Worker:
    """Answers as the records worker does; `answer` may be made to misbehave."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        self.instance = "one"
        self.targets: list[str] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.answer: Callable[[dict[str, Any]], bytes] = _whole

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                target = head.split(" ")[1]
                self.targets.append(target)
                after = int(target.rpartition("=")[2])
                page = {"instance": self.instance, "refusals": self.pages[after:], "next": len(self.pages)}
                writer.write(self.answer(page))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _whole(page: dict[str, Any]) -> bytes:
    body = json.dumps(page).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@asynccontextmanager
async def serving(worker: Worker, path: Path) -> AsyncIterator[LocalRefusals]:
    server = await asyncio.start_unix_server(worker.serve, path)
    refusals = LocalRefusals(path)
    try:
        yield refusals
    finally:
        await refusals.aclose()
        server.close()
        await asyncio.wait(worker.tasks)


async def test_only_what_came_since_the_start_is_told(tmp_path: Path) -> None:
    worker = Worker()
    worker.pages = [refusal(0), refusal(10, port=443)]
    async with serving(worker, tmp_path / "s") as refusals:
        assert [one.port for one in await refusals.since(SANDBOX, NOW + timedelta(seconds=5)) or []] == [443]
        worker.pages.append(refusal(20, kind="dns", address=None, port=None, name="evil.example", rule="x"))
        told = await refusals.since(SANDBOX, NOW + timedelta(seconds=5)) or []
        assert [one.port for one in told] == [443, None]
        assert await refusals.since("b" * 20, NOW + timedelta(seconds=30)) == []
    assert worker.connections == 1
    assert worker.targets[1] == f"/v1/sandboxes/{SANDBOX}/refusals?after=2"


async def test_one_that_began_before_the_start_and_went_on_is_told(tmp_path: Path) -> None:
    worker = Worker()
    start, last = NOW + timedelta(seconds=5), NOW + timedelta(seconds=5.5)
    over = (NOW + timedelta(seconds=4.9)).isoformat()
    worker.pages = [refusal(4.8, port=80, until=over), refusal(4.8, port=443, until=last.isoformat(), count=2)]
    async with serving(worker, tmp_path / "s") as refusals:
        told = await refusals.since(SANDBOX, start) or []
    assert [(one.port, one.at, one.count) for one in told] == [(443, last, 2)]


async def test_a_worker_that_restarted_counts_anew(tmp_path: Path) -> None:
    worker = Worker()
    worker.pages = [refusal(1)] * 3
    async with serving(worker, tmp_path / "s") as refusals:
        assert len(await refusals.since(SANDBOX, NOW) or []) == 3
        worker.instance, worker.pages = "two", [refusal(2, port=1)] * 4
        assert [one.port for one in await refusals.since(SANDBOX, NOW) or []] == [1] * 4


@pytest.mark.parametrize(
    "answer",
    [
        lambda page: b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        lambda page: b"nonsense\r\n\r\n",
        lambda page: b"HTTP/1.1 200 OK\r\n\r\n",
        lambda page: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        lambda page: b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"',
        lambda page: b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n",
        lambda page: b"",
    ],
)
async def test_a_worker_that_fails_is_not_known_and_soon(tmp_path: Path, answer: Callable[[Any], bytes]) -> None:
    worker = Worker()
    worker.answer = answer
    async with serving(worker, tmp_path / "s") as refusals:
        async with asyncio.timeout(20):
            assert await refusals.since(SANDBOX, NOW) is None
        worker.answer, worker.pages = _whole, [refusal(1)]
        assert len(await refusals.since(SANDBOX, NOW) or []) == 1


async def test_no_worker_is_not_known(tmp_path: Path) -> None:
    assert await LocalRefusals(tmp_path / "none").since(SANDBOX, NOW) is None


async def test_a_worker_that_closed_the_kept_connection_is_asked_again(tmp_path: Path) -> None:
    worker = Worker()
    worker.pages = [refusal(1)]
    async with serving(worker, tmp_path / "s") as refusals:
        worker.answer = lambda page: _whole(page).replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n")
        for _ in range(3):
            assert len(await refusals.since(SANDBOX, NOW) or []) == 1
    assert worker.connections == 3


@pytest.mark.parametrize(
    ("rule", "help_"),
    [
        ("always blocked: link-local", "blocked for every sandbox"),
        ("not in the sandbox allow list", "add x.example:443 to its allow list"),
        ("workspace deny x.example", "change its network policy"),
    ],
)
def test_a_refusal_says_what_would_help(rule: str, help_: str) -> None:
    refused = RefusedConnection(at=NOW, kind=ConnectionKind.TCP, name="x.example", port=443, rule=rule, reason="")
    assert f"x.example:443 was refused by network policy ({rule})" in explain(refused)
    assert help_ in explain(refused)


def test_a_name_that_is_always_blocked_may_be_so_for_its_address() -> None:
    rule = "always blocked: private"
    refused = RefusedConnection(at=NOW, kind=ConnectionKind.DNS, name="x.example", rule=rule, reason="")
    assert f"it, or the address it leads to, is off limits ({rule})" in explain(refused)


async def test_the_end_of_a_command_tells_what_was_refused_since_its_start(rig: Rig, client: DataClient) -> None:
    worker = Worker()
    server = await asyncio.start_unix_server(worker.serve, rig.folder / "records.sock")
    before, after = datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(hours=1)
    worker.pages = [refusal(0, at=before.isoformat()), refusal(0, at=after.isoformat(), count=3)]
    try:
        failed = (await client.exec("exit 7")).end
        assert [(one["address"], one["count"]) for one in failed["refused_connections"]] == [("169.254.169.254", 3)]
        assert "169.254.169.254:80 was refused" in failed["refused_connections"][0]["reason"]
        assert (await client.exec("sleep 0.1")).end["refused_connections"] == failed["refused_connections"]
        assert (await client.call("GET", f"/commands/{failed['id']}")).json() == failed
        asked = len(worker.targets)
        quick = (await client.exec(["true"])).end
        if quick["duration_s"] < 0.05:
            assert (quick["refused_connections"], len(worker.targets)) == (None, asked)
    finally:
        server.close()
        await rig.gateway.sandboxes.aclose()
        for task in worker.tasks:
            task.cancel()
        await asyncio.wait(worker.tasks)


async def test_a_silent_worker_holds_up_no_end(rig: Rig, client: DataClient) -> None:
    worker = Worker()
    worker.answer = lambda page: b""
    server = await asyncio.start_unix_server(worker.serve, rig.folder / "records.sock")
    try:
        async with asyncio.timeout(30):
            ended = (await client.exec("exit 7")).end
        assert (ended["exit_code"], ended["refused_connections"]) == (7, None)
    finally:
        server.close()
        await asyncio.wait(worker.tasks)
