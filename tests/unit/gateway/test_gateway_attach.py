"""An attach that begins before its sandbox runs: it waits for the node, then for the agent, and can be called off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gateway_rig import SANDBOX, LocalDialled, LocalDialler, Rig, error_code, go_agent, open_rig

import cpuos.gateway.agent.client as agent_client
from cpuos.errors import Conflict, CpuosError, NotFound, Unavailable
from cpuos.testing.waiting import until

UNKNOWN = NotFound("cannot find sandbox", code="sandbox_not_found")
BEING_MADE = Conflict("cannot reach sandbox", "it is still being created")
SILENT = Unavailable("cannot reach the node daemon", "TimeoutError", code="node_unavailable")


@dataclass(kw_only=True)
class SlowNode(LocalDialler):
    """Answers these errors first, one a dial."""

    refusals: list[CpuosError] = field(default_factory=list)

    async def dial(self, sandbox_id: str, generation: int) -> LocalDialled:
        if self.refusals:
            self.dials += 1
            raise self.refusals.pop(0)
        return await super().dial(sandbox_id, generation)


@pytest.fixture
def dialler() -> SlowNode:
    return SlowNode(address=("127.0.0.1", 1))


async def attach(rig: Rig, *, starting_s: float, wait_s: float = 5) -> tuple[int, str]:
    body = {"generation": 1, "hostname": "box", "wait_s": wait_s, "starting_s": starting_s}
    answer = await rig.control.post(f"/v1/sandboxes/{rig.sandbox}/attach", json=body)
    return answer.status_code, "" if answer.status_code == 200 else error_code(answer)


async def test_it_waits_for_a_node_that_makes_the_sandbox(agent: int, dialler: SlowNode, tmp_path: Path) -> None:
    dialler.refusals = [UNKNOWN, UNKNOWN, BEING_MADE, SILENT, UNKNOWN]
    async with open_rig(tmp_path, dialler) as rig:
        assert await attach(rig, starting_s=30) == (200, "")
        assert dialler.refusals == []
        async with rig.client() as client:
            assert (await client.exec("echo hi")).stdout == b"hi\n"


@pytest.mark.parametrize("refusal", [UNKNOWN, BEING_MADE, SILENT], ids=["unknown", "being made", "silent"])
async def test_it_does_not_wait_unasked(agent: int, dialler: SlowNode, tmp_path: Path, refusal: CpuosError) -> None:
    dialler.refusals = [refusal]
    async with open_rig(tmp_path, dialler) as rig:
        assert await attach(rig, starting_s=0) == (refusal.status, refusal.code)
        assert await attach(rig, starting_s=0) == (200, "")


async def test_it_gives_up_when_the_node_takes_too_long(agent: int, dialler: SlowNode, tmp_path: Path) -> None:
    dialler.refusals = [UNKNOWN] * 1000
    async with open_rig(tmp_path, dialler) as rig:
        assert await attach(rig, starting_s=0.05) == (404, "sandbox_not_found")


async def test_other_refusals_are_told_at_once(agent: int, dialler: SlowNode, tmp_path: Path) -> None:
    dialler.refusals = [Conflict("cannot use sandbox", code="stale_generation")]
    async with open_rig(tmp_path, dialler) as rig:
        assert await attach(rig, starting_s=30) == (409, "stale_generation")
        assert dialler.dials == 1


async def test_a_create_that_failed_calls_it_off(agent: int, dialler: SlowNode, tmp_path: Path) -> None:
    dialler.refusals = [UNKNOWN] * 100_000
    async with open_rig(tmp_path, dialler) as rig:
        waiting = asyncio.create_task(attach(rig, starting_s=600))
        await until(lambda: dialler.dials)
        told = {"reason": "stopped", "text": "it was not made"}
        assert (await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json=told)).status_code == 204
        assert await asyncio.wait_for(waiting, 30) == (410, "sandbox_lost")


async def test_those_who_still_wait_to_attach_it_come_too_late(agent: int, dialler: SlowNode, tmp_path: Path) -> None:
    """Two are on their way when it is given up: the second would be at the next generation's agent else."""
    dialler.refusals = [UNKNOWN] * 100_000
    async with open_rig(tmp_path, dialler) as rig:
        waiting = [asyncio.create_task(attach(rig, starting_s=600)) for _ in range(2)]
        await until(lambda: dialler.dials)
        await asyncio.sleep(0)
        told = {"reason": "stopped", "text": "it was not made", "generation": 1}
        assert (await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json=told)).status_code == 204
        assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == [(410, "sandbox_lost")] * 2


async def test_a_late_word_for_an_earlier_generation_means_nothing(
    agent: int, dialler: SlowNode, tmp_path: Path
) -> None:
    async with open_rig(tmp_path, dialler) as rig:
        body = {"generation": 2, "hostname": "box", "wait_s": 5}
        assert (await rig.control.post(f"/v1/sandboxes/{SANDBOX}/attach", json=body)).status_code == 200
        told = {"reason": "stopped", "text": "it was not made", "generation": 1}
        assert (await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json=told)).status_code == 204
        assert (await rig.control.delete(f"/v1/sandboxes/{SANDBOX}", params={"generation": 1})).status_code == 204
        assert rig.gateway.sandboxes.get(SANDBOX).ended is None
        assert (await rig.control.delete(f"/v1/sandboxes/{SANDBOX}", params={"generation": 2})).status_code == 204
        assert rig.gateway.sandboxes.find(SANDBOX) is None


async def test_an_agent_that_comes_late_is_asked_on_one_socket(
    agent_binary: Path, dialler: SlowNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals cost the node nothing: it made one socket for all of them, and one for the connection held ready."""
    monkeypatch.setattr(agent_client, "REFUSED_LIMIT_S", 600)
    with free_port() as port:
        dialler.address = ("127.0.0.1", port)
        async with open_rig(tmp_path, dialler) as rig:
            waiting = asyncio.create_task(attach(rig, starting_s=0, wait_s=100))
            await until(lambda: dialler.dials)
            await asyncio.sleep(0.05)  # some refusals
            assert not waiting.done()
            assert dialler.dials == 1
            async with go_agent(agent_binary, tmp_path, dialler, port=port):
                assert await waiting == (200, "")
                assert dialler.dials <= 3


async def test_a_first_command_takes_the_connection_of_the_attach(
    agent: int, dialler: SlowNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_client, "BOOT_QUIET_S", 600)
    async with open_rig(tmp_path, dialler) as rig, rig.client() as client:
        assert await attach(rig, starting_s=0) == (200, "")
        assert (await client.exec("echo hi")).stdout == b"hi\n"
        assert dialler.dials == 1, "nothing is dialled beside it"
        assert (await client.exec("echo hi")).stdout == b"hi\n", "the next one dials where it must"


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it; not listening, so that it refuses
        yield held.getsockname()[1]
