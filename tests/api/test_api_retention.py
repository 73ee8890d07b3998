"""Old audit entries lie in files; records of ended sandboxes go when nothing else of them is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from control_plane import Installation, Server
from cpuos.errors import PlatformError
from cpuos.server.retention import AuditArchive, RetentionRules
from cpuos.types.audit import AuditEntry, AuditPhase

DAY = 86400


def rules(installation: Installation, **values: Any) -> RetentionRules:
    return RetentionRules(archive=installation.folder / "audit", **values)


def archived(installation: Installation) -> list[dict[str, Any]]:
    files = sorted((installation.folder / "audit").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


async def entries(server: Server, **query: Any) -> list[dict[str, Any]]:
    answer = await server.http.get("/v1/audit", params={"limit": 1000, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()["entries"]


async def known(server: Server) -> list[str]:
    return [one["id"] for one in (await server.http.get("/v1/sandboxes?state=all")).json()["sandboxes"]]


async def test_all_is_kept_unless_somebody_says_otherwise(server: Server) -> None:
    sandbox = (await server.created())["id"]
    await server.kill(sandbox)
    before = await entries(server)
    server.installation.clock.advance(4000 * DAY)
    await server.settle()
    assert (await entries(server))[: len(before)] == before
    assert await known(server) == [sandbox]


async def test_entries_go_into_a_file_before_they_leave_the_database(installation: Installation) -> None:
    async with installation.serve(retention=rules(installation, audit_s=30 * DAY)) as server:
        sandbox = (await server.created())["id"]
        await server.kill(sandbox)
        old = await entries(server)
        installation.clock.advance(29 * DAY)
        await server.settle()
        assert (await entries(server))[: len(old)] == old
        installation.clock.advance(3 * DAY)
        young = (await server.created())["id"]
        await server.settle()
        left = await entries(server)
        assert [one for one in archived(installation) if one["id"] <= old[-1]["id"]] == old
        assert not {one["id"] for one in left} & {one["id"] for one in archived(installation)}
        assert [one["action"] for one in left if one["sandbox"] == young] == ["sandbox.create"]
        (note,) = [one for one in left if one["action"] == "audit.prune"]
        assert note["detail"]["entries"] == len(archived(installation))
        assert (note["detail"]["first"], note["detail"]["files"]) == (old[0]["id"], ["2026-01.jsonl"])
        await server.settle()
        assert len(await entries(server, action="audit")) == 1, "once a day, and not each time"
        assert (installation.folder / "audit").stat().st_mode & 0o777 == 0o700


async def test_an_open_intent_stays(installation: Installation) -> None:
    async with installation.serve(retention=rules(installation, audit_s=DAY), outcome_deadline_s=1e9) as server:
        audit = server.plane.reconciler._retention._audit
        async with server.plane.database.write() as connection:
            intent = await audit.intend(connection, workspace="default", actor="x", action="sandbox.kill", target="y")
        installation.clock.advance(3 * DAY)
        await server.settle()
        assert [one["id"] for one in await entries(server, action="sandbox.kill")] == [intent.id]


async def test_what_cannot_be_archived_stays(installation: Installation) -> None:
    (installation.folder / "audit").write_text("in the way")
    async with installation.serve(retention=rules(installation, audit_s=DAY)) as server:
        await server.created()
        before = await entries(server)
        installation.clock.advance(3 * DAY)
        await server.settle()
        assert (await entries(server))[: len(before)] == before


def entry(number: int, month: int = 1) -> AuditEntry:
    return AuditEntry(
        id=number,
        at=f"2026-{month:02}-05T00:00:00Z",
        workspace="w",
        actor="a",
        action="file.read",
        target="t",
        phase=AuditPhase.OUTCOME,
    )


def test_an_archive_takes_each_entry_once_and_loses_none(tmp_path: Path) -> None:
    """It was killed behind the write, in the middle of one, or met a full disk."""
    file = tmp_path / "2026-01.jsonl"
    AuditArchive(tmp_path).append([entry(1), entry(2), entry(3, month=2)])
    AuditArchive(tmp_path).append([entry(1), entry(2), entry(3, month=2), entry(4)])
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [1, 2, 4]
    with file.open("a") as torn:
        torn.write('{"id":5,"at":"20')
    archive = AuditArchive(tmp_path)
    archive.append([entry(5), entry(6)])
    archive.append([entry(6), entry(0)])
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [1, 2, 4, 5, 6, 0]
    assert len((tmp_path / "2026-02.jsonl").read_text().splitlines()) == 1


async def test_ended_sandboxes_go_when_nothing_else_of_them_is_left(installation: Installation) -> None:
    async with installation.serve(retention=rules(installation, sandboxes_s=2 * DAY)) as server:
        ended, kept, live = [(await server.created(timeout_s=30 * DAY))["id"] for _ in range(3)]
        await server.http.post(f"/v1/sandboxes/{ended}/ports", json={"port": 3000})
        answer = await server.http.post(f"/v1/sandboxes/{kept}/snapshots", json={})
        assert answer.status_code == 201, answer.text
        for sandbox in (ended, kept):
            await server.kill(sandbox)
        await server.settle()
        installation.clock.advance(1.5 * DAY)
        await server.settle()
        await server.settle()
        assert len(await known(server)) == 3
        installation.clock.advance(2 * DAY)
        await server.settle()
        assert sorted(await known(server)) == sorted([kept, live]), "a snapshot is of the one, the other lives"
        (note,) = await entries(server, action="sandbox.prune")
        assert note["detail"]["sandboxes"] == [ended]
        told = {one["action"] for one in await entries(server, sandbox=ended)}
        assert {"sandbox.create", "sandbox.kill"} <= told, "by its id, though its record is gone"
        assert (await server.http.get("/v1/audit", params={"sandbox": "nobody"})).status_code == 404


async def test_a_create_that_failed_goes_too(installation: Installation) -> None:
    async with installation.serve(retention=rules(installation, sandboxes_s=2 * DAY)) as server:
        installation.node.create_error = PlatformError("cannot create", "broken")
        assert (await server.create()).status_code >= 400
        await server.settle()
        for _ in range(3):
            installation.clock.advance(2 * DAY)
            await server.settle()
        assert await known(server) == []
