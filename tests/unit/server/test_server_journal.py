"""The gateway's journal comes into the audit exactly once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from control_plane import Installation, Server
from cpuos.errors import Unavailable
from cpuos.server.gateway import JournalPage


def entry(seq: int, sandbox: str, **changes: Any) -> dict[str, Any]:
    values = {"actor": "key:1", "action": "command.start", "phase": "intent", "target": f"command{seq}"}
    values |= {"workspace": "someone-else", "at": "2026-01-01T00:00:00Z", "result": None, "detail": {"argv": ["ls"]}}
    return {"seq": seq, "sandbox": sandbox, **values, **changes}


async def commands(server: Server) -> list[dict[str, Any]]:
    with suppress(Unavailable):
        await server.plane.reconciler.ingest()
    answer = await server.http.get("/v1/audit", params={"action": "command", "limit": 1000})
    return answer.json()["entries"]


async def test_entries_come_once_over_restarts_and_many_pages(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.gateway.entries = [entry(seq, sandbox) for seq in range(1, 701)]
        assert len(await commands(server)) == 700
        assert len(await commands(server)) == 700
    async with installation.serve() as server:
        installation.gateway.entries.append(entry(701, sandbox))
        found = await commands(server)
    assert [row["target"] for row in found] == [f"command{seq}" for seq in range(1, 702)]


async def test_an_outcome_is_tied_to_its_intent_also_pages_later(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.gateway.entries = [entry(1, sandbox)]
        (intent,) = await commands(server)
        installation.gateway.entries.append(entry(2, sandbox, phase="outcome", intent=1, result="ok"))
        outcome = (await commands(server))[1]
        installation.gateway.entries += [
            entry(3, sandbox),
            entry(4, sandbox, phase="outcome", intent=3, result="error"),
        ]
        same_page = (await commands(server))[2:]
    assert same_page[1]["intent_id"] == same_page[0]["id"]
    assert outcome["intent_id"] == intent["id"]
    assert outcome["result"] == "ok"
    assert outcome["sandbox"] == sandbox


async def test_the_workspace_is_that_of_the_record(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.gateway.entries = [entry(1, sandbox), entry(2, "z" * 20), {"seq": 3}, entry(4, sandbox)]
        found = await commands(server)
    assert [(row["target"], row["workspace"]) for row in found] == [("command1", "default"), ("command4", "default")]


async def test_another_gateway_instance_starts_anew(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.gateway.entries = [entry(1, sandbox), entry(2, sandbox)]
        assert len(await commands(server)) == 2
        installation.gateway.source = "gateway-2"
        installation.gateway.entries = [entry(1, sandbox, target="other")]
        assert [row["target"] for row in await commands(server)] == ["command1", "command2", "other"]
        installation.gateway.source = "gateway-1"
        installation.gateway.entries = [entry(1, sandbox), entry(2, sandbox), entry(3, sandbox)]
        assert len(await commands(server)) == 4


async def test_an_answer_that_is_lost_after_it_was_stored_changes_nothing(tmp_path: Path) -> None:
    installation = Installation(folder=tmp_path)
    async with installation.serve() as server:
        sandbox = (await server.created())["id"]
        installation.gateway.entries = [entry(seq, sandbox) for seq in range(1, 6)]
        real, fail = installation.gateway.journal, True

        async def journal(after: int, *, limit: int) -> JournalPage:
            nonlocal fail
            if after and fail:
                fail = False
                raise Unavailable("cannot reach the gateway", code="gateway_unavailable")
            return await real(after, limit=3)

        installation.gateway.journal = journal  # type: ignore[method-assign]
        await commands(server)
        await commands(server)
        await commands(server)
        assert len(await commands(server)) == 5
