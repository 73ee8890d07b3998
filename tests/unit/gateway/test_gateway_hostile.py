"""An agent that breaks its contract in every known way: a clear code, no crash, no hang, no bloat."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_rig import SANDBOX, DataClient, LocalDialler, Rig, error_code, open_rig

from cpuos.errors import ERRORS, CapacityExceeded, SandboxGone, Unavailable
from cpuos.gateway.agent import answers
from cpuos.gateway.agent.connection import AgentTimes
from cpuos.testing.hostile_agent import HostileAgent, Misdeed
from cpuos.types.frames import FrameKind

TIMES = AgentTimes(connect_s=0.3, answer_s=0.3, identity_s=0.3, slow_answer_s=0.3, freeze_s=0.3)
FREEZE = "f" * 32
AGENT_CODES = ("agent_invalid", "agent_unresponsive")
STREAMS = [
    Misdeed.BAD_FRAME,
    Misdeed.HUGE_FRAME,
    Misdeed.CUT_FRAME,
    Misdeed.WRONG_OFFSET,
    Misdeed.BAD_ENDED,
    Misdeed.DEEP_ENDED,
    Misdeed.HOST_FRAMES,
]
"""Misdeeds after a proper STARTED: the command has begun, and ends as unknown."""
TOLD_APART = {Misdeed.BACK_OFFSET, Misdeed.FLOOD, Misdeed.SILENT_STREAM, Misdeed.LYING_ENDED, Misdeed.AFTER_ENDED}
TOLD_APART |= {Misdeed.NO_SUCH_CALL, Misdeed.MANY_LISTENERS, Misdeed.LYING_LISTENERS, Misdeed.FROZEN_FOR_EVER}
TOLD_APART |= {Misdeed.REFUSE_OTHERWISE}
CALLS = [misdeed for misdeed in Misdeed if misdeed not in {*STREAMS, *TOLD_APART, Misdeed.NO_STARTED}]


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@asynccontextmanager
async def hostile(folder: Path) -> AsyncIterator[tuple[HostileAgent, Rig]]:
    async with HostileAgent(SANDBOX) as agent:
        dialler = LocalDialler(address=agent.address)
        async with open_rig(folder, dialler, times=TIMES) as rig:
            yield agent, rig


@asynccontextmanager
async def attached(folder: Path) -> AsyncIterator[tuple[HostileAgent, Rig, DataClient]]:
    async with hostile(folder) as (agent, rig):
        assert (await rig.attach()).status_code == 200
        async with rig.client() as client:
            yield agent, rig, client


@pytest.mark.parametrize("misdeed", CALLS)
async def test_attach(tmp_path: Path, misdeed: Misdeed) -> None:
    async with hostile(tmp_path) as (agent, rig):
        agent.misbehave(misdeed)
        before, began = resident_kib(), time.monotonic()
        answer = await rig.attach(wait_s=0.3)
        assert time.monotonic() - began < 20
        assert answer.status_code in (502, 504), answer.text
        assert error_code(answer) in AGENT_CODES
        assert resident_kib() - before < 24 << 10
        agent.behave()
        if misdeed is not Misdeed.NEVER_ACCEPT:
            assert (await rig.attach()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/identity", "/v1/commands", "/v1/thaw", "/v1/freeze"])
async def test_a_refusal_is_never_trouble_of_the_platform(tmp_path: Path, path: str) -> None:
    """As that it would be waited for: a sandbox could put off its pause, its resume and its end for ever."""
    known = {"/v1/identity": "restore_incomplete", "/v1/freeze": "freeze_failed"}
    async with hostile(tmp_path) as (agent, rig):
        for agent_code in answers.AGENT_CODES:
            agent.behave()
            assert (await rig.attach()).status_code == 200
            agent.refuses_as = agent_code
            agent.misbehave(Misdeed.REFUSE_OTHERWISE, at=path)
            told = await rig.suspend(FREEZE)
            if path != "/v1/freeze":
                assert told.status_code == 200
                agent.is_frozen = path == "/v1/thaw"
                told = await rig.attach(wait_s=0.3)
            assert told.status_code >= 400, (agent_code, told.text)
            assert error_code(told) in (*AGENT_CODES, known.get(path)), (agent_code, told.text)
            assert not issubclass(ERRORS[error_code(told)][0], Unavailable | CapacityExceeded | SandboxGone)


async def test_a_slow_call_is_not_sent_twice(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, _, client):
        await client.call("GET", "/files/stat?path=/x")  # leaves a connection to be used again
        agent.misbehave(Misdeed.NEVER_ANSWER, at="/v1/files")
        answer = await client.call("POST", "/files/move?path=/x&to=/y")
        assert error_code(answer) == "agent_unresponsive"
        assert len([line for line in agent.requests if line.startswith("POST /v1/files/move")]) == 1


# A redirect's status and a foreign identity mean nothing at a file call: it is a refusal outside the contract.
@pytest.mark.parametrize("misdeed", [m for m in CALLS if "identity" not in m and not m.startswith("wrong_s")])
async def test_calls_of_files(tmp_path: Path, misdeed: Misdeed) -> None:
    async with attached(tmp_path) as (agent, _, client):
        if misdeed in (Misdeed.LONG_BODY, Misdeed.WRONG_GENERATION):
            agent.misbehave(misdeed, at="/v1/files/stat")
            answer = await client.call("GET", "/files/stat?path=/x")
            assert error_code(answer) == "agent_invalid"
            return
        agent.misbehave(misdeed, at="/v1/files")
        before, began = resident_kib(), time.monotonic()
        answer = await client.call("GET", "/files/stat?path=/x")
        assert error_code(answer) in AGENT_CODES, answer.text
        listed = await client.call("GET", "/files/list?path=/x")
        assert error_code(listed) in AGENT_CODES
        try:
            async with asyncio.timeout(3), client.http.stream("GET", client.base + "/files?path=/x") as read:
                size = 0
                async for piece in read.aiter_raw():
                    size += len(piece)
                    if size > 80 << 20:
                        break
                # What came whole was announced so; anything else is an error or a cut.
                assert read.status_code in (200, 502, 504)
        except Exception as error:
            assert "closed" in str(error) or "incomplete" in str(error) or isinstance(error, TimeoutError)  # noqa: PT017
        put = await client.call("PUT", "/files?path=/x", content=b"x" * 100_000)
        assert error_code(put) in AGENT_CODES
        assert time.monotonic() - began < 40
        assert resident_kib() - before < 32 << 10


@pytest.mark.parametrize("misdeed", [*CALLS, Misdeed.NO_STARTED])
async def test_starts(tmp_path: Path, misdeed: Misdeed) -> None:
    async with attached(tmp_path) as (agent, rig, client):
        agent.misbehave(misdeed, at="/v1/commands")
        before, began = resident_kib(), time.monotonic()
        answer = await client.call("POST", "/commands", json={"command": "true"})
        assert time.monotonic() - began < 20
        assert error_code(answer) in AGENT_CODES, answer.text
        assert (await client.call("GET", "/commands")).json()["commands"] == []
        entries = await rig.journal()
        assert [entry["phase"] for entry in entries] == ["intent", "outcome"]
        assert entries[1]["result"] == "unknown"
        assert resident_kib() - before < 24 << 10


@pytest.mark.parametrize("misdeed", STREAMS)
async def test_streams_end_as_unknown(tmp_path: Path, misdeed: Misdeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.gateway.trust.RETRY_S", (0.01,))
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(misdeed, at="/v1/commands")
        answer = await client.call("POST", "/commands", json={"command": "true"})
        if answer.status_code != 200:
            assert error_code(answer) in AGENT_CODES
            return
        command = (await client.call("GET", "/commands")).json()["commands"][0]
        end = await client.wait(command["id"], timeout_s=30)
        assert end["status"] == "unknown", end
        assert "contract" in end["reason"] or "cut" in end["reason"]
        assert end["exit_code"] is None


async def test_a_lying_end_changes_no_count(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(Misdeed.LYING_ENDED, at="/v1/commands")
        end = (await client.exec("true")).end
        assert end["stdout_bytes"] < 1000


async def test_output_that_goes_back_is_not_recorded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.gateway.trust.RETRY_S", (0.01,))
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(Misdeed.BACK_OFFSET, at="/v1/commands")
        command_id = await client.spawn("true")
        await client.has_said(len(b"forward"), command_id=command_id)
        await asyncio.sleep(0.3)  # what goes back is ignored: nothing tells that it has come
        command = (await client.call("GET", f"/commands/{command_id}")).json()
        output = (await client.call("GET", f"/commands/{command_id}/output")).content
        assert (output, command["stdout_bytes"]) == (b"forward", len(b"forward"))


async def test_a_flood_is_bounded_in_memory_and_on_disk(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, rig, client):
        agent.misbehave(Misdeed.FLOOD, at="/v1/commands")
        before = resident_kib()
        command_id = await client.spawn("true")
        run = rig.gateway.sandboxes.get(SANDBOX).runs[command_id]
        for stream in run.recorded.streams.values():
            stream._head, stream._tail = 1 << 20, 1 << 20
        async with asyncio.timeout(60):
            while run.recorded.streams["stdout"].total < 300 << 20:
                await run.recorded.change(1)
        assert run.recorded.streams["stdout"].total >= 300 << 20
        assert resident_kib() - before < 24 << 10
        assert run.recorded.stored <= 4 << 20
        # Other calls are served meanwhile.
        assert (await client.call("GET", f"/commands/{command_id}")).json()["status"] == "running"
        await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json={"reason": "lost", "text": "it died"})
        assert (await client.wait(command_id))["status"] == "sandbox_lost"


async def test_a_silent_stream_ends_as_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.gateway.trust.RETRY_S", (0.01,))
    monkeypatch.setattr("cpuos.gateway.commands.SILENCE_LIMIT_S", 0.0)
    monkeypatch.setattr("cpuos.gateway.sandboxes.LOOK_EVERY_S", 0.05)
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(Misdeed.SILENT_STREAM, at="/v1/commands")
        command_id = await client.spawn("true")
        end = await client.wait(command_id, timeout_s=30)
        assert (end["status"], end["reason"]) == ("unknown", "the agent has fallen silent")


async def test_a_time_limit_that_the_agent_does_not_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.gateway.commands.TIMEOUT_GRACE_S", 0.1)
    monkeypatch.setattr("cpuos.gateway.sandboxes.LOOK_EVERY_S", 0.05)
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(Misdeed.SILENT_STREAM, at="/v1/commands")
        end = (await client.exec("true", timeout_s=0.2)).end
        assert end["status"] == "unknown"
        assert "time limit" in end["reason"]


async def test_frames_after_the_end_are_not_read(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, _, client):
        agent.misbehave(Misdeed.AFTER_ENDED, at="/v1/commands")
        stream = await client.exec("true")
        assert stream.end["status"] == "exited"
        assert [frame.kind for frame in stream.frames].count(FrameKind.ENDED) == 1
