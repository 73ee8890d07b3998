"""A node that is short of memory: the longest idle are paused, each step is told, and what it refuses is passed on."""

from __future__ import annotations

from typing import Any

from control_plane import Server, check_nothing_is_left
from cpuos.errors import CapacityExceeded
from cpuos.server.relief import AT_ONCE
from cpuos.types.node import PressureFacts, PressureLevel

WHY = "100 MiB of the host's memory are free, and 512 MiB are to be"


def press(server: Server, level: PressureLevel) -> None:
    server.installation.node.capacity |= {"pressure": PressureFacts(level=level, why=WHY)}


async def look(server: Server) -> None:
    await server.plane.reconciler.relieve()
    await server.plane.tasks.shared_ended()


async def states(server: Server) -> dict[str, str]:
    listed = (await server.http.get("/v1/sandboxes")).json()["sandboxes"]
    return {one["name"]: one["state"] for one in listed}


async def audit(server: Server, action: str) -> list[dict[str, Any]]:
    return (await server.http.get("/v1/audit", params={"action": action})).json()["entries"]


async def create_idle(server: Server, *names: str, **values: Any) -> None:
    """Idle since they were made, one second apart."""
    for name in names:
        made = await server.created(name=name, timeout_s=86400, **values)
        server.installation.gateway.idle_since[made["id"]] = server.installation.clock().timestamp()
        server.installation.clock.advance(1)


async def test_the_longest_idle_are_paused_first(server: Server) -> None:
    await create_idle(server, "first", "second", "third")
    server.installation.clock.advance(31)
    press(server, PressureLevel.PAUSE_IDLE)
    await look(server)
    assert AT_ONCE == 2
    assert await states(server) == {"first": "paused", "second": "paused", "third": "running"}
    assert "short of memory" in (await server.get("first"))["reason"]
    entries = await audit(server, "sandbox.pause")
    assert [entry["actor"] for entry in entries] == ["system"] * 2
    assert "short of memory" in entries[0]["detail"]["reason"]
    await look(server)
    assert (await states(server))["third"] == "paused"
    await check_nothing_is_left(server)


async def test_who_is_busy_or_is_not_resumed_by_calls_is_left_alone(server: Server) -> None:
    await create_idle(server, "busy")
    await create_idle(server, "mine", auto_resume=False)
    busy = (await server.get("busy"))["id"]
    server.installation.gateway.idle_since[busy] = None
    server.installation.clock.advance(3600)
    press(server, PressureLevel.REFUSE_NEW)
    await look(server)
    assert set((await states(server)).values()) == {"running"}


async def test_an_earlier_step_pauses_nobody(server: Server) -> None:
    await create_idle(server, "one")
    server.installation.clock.advance(3600)
    press(server, PressureLevel.SHRINK_POOL)
    await look(server)
    assert await states(server) == {"one": "running"}


async def test_each_step_is_in_audit_and_health(server: Server) -> None:
    for level in (PressureLevel.NONE, PressureLevel.SHRINK_POOL, PressureLevel.REFUSE_NEW, PressureLevel.NONE):
        press(server, level)
        await look(server)
        await look(server)
        server.plane.health_cache.clear()
        alarms = (await server.http.get("/v1/health")).json()["alarms"]
        assert [WHY in alarm for alarm in alarms] == ([] if level is PressureLevel.NONE else [True])
    told = [(entry["detail"]["level"], entry["result"]) for entry in await audit(server, "node.pressure")]
    assert told == [("shrink_pool", "error"), ("refuse_new", "error"), ("none", "ok")]


async def test_what_the_node_refuses_is_passed_on(server: Server) -> None:
    """The server's facts may be older than what happened on the node."""
    short = {"memory_mib": {"asked": 2048, "free": 100, "total": 4096}}
    server.installation.node.create_error = CapacityExceeded(
        "cannot create sandbox", "this node has no room (memory_mib)", details={"short": short}
    )
    answer = await server.create(name="one")
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["details"]["short"]) == ("capacity_exceeded", short)
    server.installation.node.create_error = None
    await server.created(name="one")
    await check_nothing_is_left(server)
