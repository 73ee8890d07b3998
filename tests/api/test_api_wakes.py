"""What happens by itself: idle sandboxes are paused or ended, called ones are resumed, and neither becomes a storm."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from control_plane import Installation, Server, check_nothing_is_left
from cpuos.errors import Conflict, PlatformError
from cpuos.server.wakes import MAX_WAKES
from cpuos.testing.waiting import until

DAMAGED = PlatformError("cannot resume", "its memory is not what was saved", code="snapshot_damaged")


async def state_of(server: Server, ref: str = "one") -> str:
    return (await server.get(ref))["state"]


async def pause(server: Server, ref: str = "one") -> httpx2.Response:
    answer = await server.http.post(f"/v1/sandboxes/{ref}/pause")
    assert answer.status_code == 200, answer.text
    return answer


async def look_for_idle(server: Server) -> None:
    await server.plane.reconciler.pause_idle()
    await server.plane.tasks.shared_ended()


async def wake(server: Server, sandbox: str) -> None:
    """As when the gateway told of a call."""
    await server.plane.reconciler._wakes.wake([sandbox])
    await server.plane.tasks.shared_ended()


async def test_an_idle_one_is_paused_after_its_time(server: Server) -> None:
    sandbox = (await server.created(name="one", idle_timeout_s=60))["id"]
    clock, gateway = server.installation.clock, server.installation.gateway
    gateway.idle_since[sandbox] = clock().timestamp()
    clock.advance(59)
    await look_for_idle(server)
    assert await state_of(server) == "running"
    clock.advance(2)
    await look_for_idle(server)
    paused = await server.get("one")
    assert (paused["state"], paused["reason"]) == ("paused", "idle for 60 s")
    entries = (await server.http.get("/v1/audit", params={"sandbox": sandbox})).json()["entries"]
    assert (entries[-1]["actor"], entries[-1]["action"]) == ("system", "sandbox.pause")
    await check_nothing_is_left(server)


async def test_a_busy_one_is_not(server: Server) -> None:
    sandbox = (await server.created(name="one", idle_timeout_s=60, timeout_s=86400))["id"]
    clock, gateway = server.installation.clock, server.installation.gateway
    gateway.idle_since[sandbox] = None
    clock.advance(3600)
    await look_for_idle(server)
    assert await state_of(server) == "running"
    # The command ends, and the next begins between the look and the freeze: the gateway knows.
    gateway.idle_since[sandbox] = clock().timestamp() - 61
    gateway.suspend_error = Conflict("cannot suspend", "a command runs", code="sandbox_busy")
    await look_for_idle(server)
    assert await state_of(server) == "running"
    assert server.installation.node.calls["pause"] == 0
    await check_nothing_is_left(server)


async def test_one_without_an_idle_time_is_left_alone(server: Server) -> None:
    await server.created(name="one", timeout_s=86400)
    server.installation.clock.advance(3600)
    server.installation.gateway.reachable = False  # it is not even asked
    await look_for_idle(server)
    assert await state_of(server) == "running"


async def test_an_idle_one_can_be_ended(server: Server) -> None:
    sandbox = (await server.created(name="one", idle_timeout_s=60, on_idle="kill"))["id"]
    server.installation.clock.advance(61)
    await look_for_idle(server)
    ended = await server.get(sandbox)
    assert (ended["state"], ended["reason"]) == ("stopped", "idle for 60 s")
    await check_nothing_is_left(server)


async def test_one_that_could_not_be_paused_is_not_tried_at_once_again(server: Server) -> None:
    await server.created(name="one", idle_timeout_s=60, timeout_s=86400)
    node, clock = server.installation.node, server.installation.clock
    node.errors["pause"] = PlatformError("cannot pause", "the volume is full", code="disk_full")
    clock.advance(61)
    for _ in range(5):
        await look_for_idle(server)
    assert node.calls["pause"] == 1
    assert await state_of(server) == "running"
    clock.advance(61)
    del node.errors["pause"]
    await look_for_idle(server)
    assert await state_of(server) == "paused"


async def test_a_call_resumes_it(installation: Installation) -> None:
    async with installation.serve(reconcile=True) as server:
        sandbox = (await server.created(name="one"))["id"]
        await pause(server)
        await installation.gateway.call(sandbox)

        async def running() -> bool:
            return await state_of(server) == "running"

        await until(running)
        entries = (await server.http.get("/v1/audit", params={"sandbox": sandbox})).json()["entries"]
        assert (entries[-1]["action"], entries[-1]["detail"]) == ("sandbox.resume", {"reason": "called"})
        await check_nothing_is_left(server)


async def test_a_call_in_the_middle_of_a_pause_resumes_it_after(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    node = server.installation.node
    node.gates["pause"].close()
    call = asyncio.create_task(pause(server))
    await until(lambda: node.gates["pause"].waiting)
    await server.plane.reconciler._wakes.wake([sandbox])
    node.gates["pause"].open()
    await call
    await server.plane.tasks.shared_ended()
    assert await state_of(server) == "running"


async def test_one_without_auto_resume_stays_paused(server: Server) -> None:
    sandbox = (await server.created(name="one", auto_resume=False))["id"]
    await pause(server)
    assert server.installation.gateway.suspended[sandbox]["auto_resume"] is False
    await wake(server, sandbox)
    assert await state_of(server) == "paused"
    assert (await server.http.post("/v1/sandboxes/one/resume")).json()["state"] == "running"


@pytest.mark.parametrize("ended", [True, False])
async def test_calls_to_what_is_not_paused_change_nothing(server: Server, ended: bool) -> None:
    sandbox = (await server.created(name="one"))["id"]
    if ended:
        await server.kill("one")
    await wake(server, sandbox)
    await wake(server, "z" * 20)
    assert server.installation.node.calls["resume"] == 0
    assert await state_of(server, sandbox) == ("stopped" if ended else "running")


async def test_another_gateway_process_counts_from_the_start(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    gateway, wakes = server.installation.gateway, server.plane.reconciler._wakes
    for _ in range(3):
        await gateway.call("z" * 20)
    await wakes.follow(wait_s=0)
    await wakes.follow(wait_s=0)
    await pause(server)
    gateway.called, gateway.wakes_source = [], "gateway-process-2"
    await gateway.call(sandbox)
    for _ in range(2):
        await wakes.follow(wait_s=0)
    await server.plane.tasks.shared_ended()
    assert await state_of(server) == "running"


# --- storms ---


async def test_calls_do_not_make_a_storm_of_resumes(server: Server) -> None:
    """A visitor of a public preview, or a loop of calls, must not keep the node at restores and checkpoints."""
    sandbox = (await server.created(name="one", idle_timeout_s=1, timeout_s=86400))["id"]
    node, clock = server.installation.node, server.installation.clock
    for _ in range(MAX_WAKES + 10):
        clock.advance(2)
        await look_for_idle(server)
        assert await state_of(server) == "paused"
        await wake(server, sandbox)
        if await state_of(server) == "paused":
            break
    assert node.calls["resume"] == MAX_WAKES
    clock.advance(600)
    await wake(server, sandbox)
    assert await state_of(server) == "running"
    await check_nothing_is_left(server)


async def test_a_resume_that_fails_is_tried_later_each_time(server: Server) -> None:
    sandbox = (await server.created(name="one"))["id"]
    await pause(server)
    node, clock = server.installation.node, server.installation.clock
    node.errors["resume"] = DAMAGED
    for _ in range(120):
        await wake(server, sandbox)
        clock.advance(1)
    assert 3 <= node.calls["resume"] <= 8
    del node.errors["resume"]
    clock.advance(61)
    await wake(server, sandbox)
    assert await state_of(server) == "running"


async def test_calls_do_not_take_more_room_than_there_is(server: Server) -> None:
    server.installation.node.capacity |= {"memory_mib": 2048}
    first = (await server.created(memory_mib=2048))["id"]
    await pause(server, first)
    second = (await server.created(memory_mib=2048))["id"]
    await wake(server, first)
    assert [await state_of(server, one) for one in (first, second)] == ["paused", "running"]
    await check_nothing_is_left(server)
