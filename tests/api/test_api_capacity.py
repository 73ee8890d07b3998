"""Room is promised once: races for the last of it, quotas, and what a restart takes up again."""

from __future__ import annotations

import asyncio

from sqlalchemy import update

from control_plane import Installation, error_of
from cpuos.server.db.models import Workspace


async def test_100_creates_with_room_for_60(installation: Installation) -> None:
    installation.node.capacity = {"cpu": 16, "memory_mib": 60 * 256, "disk_mib": 1 << 20, "max_sandboxes": 1000}
    async with installation.serve() as server:
        answers = await asyncio.gather(*(server.create(memory_mib=256, disk_mib=64, cpu=1) for _ in range(100)))
        good = [answer.json()["sandbox"] for answer in answers if answer.status_code == 201]
        refused = [answer for answer in answers if answer.status_code != 201]
        assert (len(good), len(refused)) == (60, 40)
        for answer in refused:
            assert (answer.status_code, error_of(answer)["code"]) == (429, "capacity_exceeded")
            assert set(error_of(answer)["details"]["short"]) == {"memory_mib"}
            assert "memory: 256 MiB asked, 0 MiB free" in error_of(answer)["why"]
        await server.settle()
        assert set(installation.node.sandboxes) == {sandbox["id"] for sandbox in good}
        listed = (await server.http.get("/v1/sandboxes?state=all")).json()["sandboxes"]
        assert {sandbox["state"] for sandbox in listed} == {"running"}
        assert len(listed) == 60
        await asyncio.gather(*(server.kill(sandbox["id"]) for sandbox in good))
        assert installation.node.sandboxes == {}
        room = (await server.http.get("/v1/capacity")).json()
        assert {name: amount["reserved"] for name, amount in room.items()} == dict.fromkeys(room, 0)
        assert (await server.create(memory_mib=60 * 256)).status_code == 201


async def test_each_limit_is_named(installation: Installation) -> None:
    installation.node.capacity = {"cpu": 1, "memory_mib": 4096, "disk_mib": 4096, "max_sandboxes": 2}
    async with installation.serve() as server:
        small = {"cpu": 1, "memory_mib": 128, "disk_mib": 64}
        for asked, short in (
            ({"cpu": 9}, "cpu"),
            ({"memory_mib": 4097}, "memory_mib"),
            ({"disk_mib": 5000}, "disk_mib"),
        ):
            error = error_of(await server.create(**{**small, **asked}))
            assert (error["code"], list(error["details"]["short"])) == ("capacity_exceeded", [short])
        await server.created(**small)
        await server.created(**small)
        assert list(error_of(await server.create(**small))["details"]["short"]) == ["sandboxes"]


async def test_room_is_given_back_by_every_end(installation: Installation) -> None:
    installation.node.capacity = {"cpu": 16, "memory_mib": 2048, "disk_mib": 1 << 20, "max_sandboxes": 9}
    async with installation.serve() as server:
        sandbox = await server.created()
        assert (await server.create()).status_code == 429
        await installation.node.die(sandbox["id"])
        await server.settle()
        sandbox = await server.created(timeout_s=60)
        installation.clock.advance(61)
        await server.settle()
        assert (await server.get(sandbox["id"]))["state"] == "stopped"
        sandbox = await server.created()
        await server.kill(sandbox["id"])
        await server.created()


async def test_a_restart_takes_up_the_promises(installation: Installation) -> None:
    installation.node.capacity = {"cpu": 16, "memory_mib": 4096, "disk_mib": 1 << 20, "max_sandboxes": 9}
    async with installation.serve() as server:
        await server.created()
        killed = await server.created()
        await server.kill(killed["id"])
    async with installation.serve() as server:
        await server.created()
        assert (await server.create()).status_code == 429


async def test_a_quota_holds_in_a_race(installation: Installation) -> None:
    async with installation.serve() as server:
        async with server.plane.database.write() as connection:
            await connection.execute(update(Workspace).values(max_sandboxes=5))
        answers = await asyncio.gather(*(server.create() for _ in range(20)))
        refused = [error_of(answer) for answer in answers if answer.status_code != 201]
        assert len(refused) == 15
        assert {error["code"] for error in refused} == {"limit_reached"}
        assert len(installation.node.sandboxes) == 5


async def test_a_name_goes_to_one_in_a_race(installation: Installation) -> None:
    async with installation.serve() as server:
        answers = await asyncio.gather(*(server.create(name="only") for _ in range(10)))
        assert sorted(answer.status_code for answer in answers) == [201] + [409] * 9
        assert len(installation.node.sandboxes) == 1
        assert (await server.http.get("/v1/capacity")).json()["sandboxes"]["reserved"] == 1


async def test_a_template_that_was_just_installed_is_found(installation: Installation) -> None:
    async with installation.serve() as server:
        await server.created()
        assert (await server.create(template="ruby")).status_code == 404
        installation.node.templates.append("ruby")
        assert (await server.create(template="ruby")).status_code == 201
