"""Sandboxes that stand still: frozen by the real agent, gone on by an attach, called awake."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_process import fixed_dialler, gateway_process
from gateway_rig import SANDBOX, DataClient, LocalDialler, Rig, TicketMint, error_code, go_agent, open_rig
from preview_rig import OK, PreviewRig, open_previews, serving
from test_gateway_hostile import AGENT_CODES, CALLS, attached
from test_gateway_restart import control
from websockets.asyncio.client import connect

from cpuos.gateway import commands, suspension
from cpuos.testing.hostile_agent import Misdeed
from cpuos.testing.waiting import until
from cpuos.types.frames import Frame, FrameDecoder, FrameKind, encode_frame

FREEZE, FREEZE_2 = "f" * 32, "0" * 32
FREEZES = [Misdeed.MANY_LISTENERS, Misdeed.LYING_LISTENERS]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces")


@pytest.fixture
async def agent(agent_binary: Path, tmp_path: Path, dialler: LocalDialler) -> AsyncIterator[int]:
    async with go_agent(agent_binary, tmp_path, dialler, first=True) as pid:
        yield pid


class Follower:
    """A client that reads a command's stream, whatever happens to the sandbox."""

    def __init__(self, client: DataClient, command_id: str) -> None:
        self.frames: list[Frame] = []
        self._task = asyncio.create_task(self._follow(client, command_id))

    async def _follow(self, client: DataClient, command_id: str) -> None:
        decoder = FrameDecoder()
        async with client.http.stream("GET", f"{client.base}/commands/{command_id}/stream") as answer:
            async for piece in answer.aiter_raw():
                self.frames += decoder.feed(piece)

    @property
    def stdout(self) -> bytes:
        position, pieces = 0, []
        for frame in self.frames:
            if frame.kind is FrameKind.STDOUT:
                assert frame.offset == position
                position += len(frame.payload)
                pieces.append(frame.payload)
        return b"".join(pieces)

    async def end(self) -> dict[str, Any]:
        await asyncio.wait_for(self._task, 60)
        assert self.frames[-1].kind is FrameKind.ENDED
        return json.loads(self.frames[-1].payload)["command"]


async def resume(rig: Rig, dialler: LocalDialler, freeze: str = FREEZE, *, incarnation: int = 1) -> None:
    dialler.thaw(freeze, incarnation=incarnation)
    answer = await rig.attach()
    assert answer.status_code == 200, answer.text


async def suspend(rig: Rig, freeze: str = FREEZE, **more: Any) -> dict[str, Any]:
    answer = await rig.suspend(freeze, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_stream_goes_on_over_a_pause_without_a_lost_or_doubled_byte(
    rig: Rig, client: DataClient, dialler: LocalDialler
) -> None:
    command_id = await client.spawn("for i in $(seq 300); do seq 1 2000; sleep 0.002; done; exit 3")
    follower = Follower(client, command_id)
    for incarnation in range(1, 5):
        size = len(follower.stdout)
        await until(lambda size=size: len(follower.stdout) > size)
        freeze = f"{incarnation:032x}"
        told = await suspend(rig, freeze)
        assert told["commands"] == [command_id]
        assert told["processes"] >= 1
        assert (await suspend(rig, freeze)) == told
        assert (await client.call("GET", f"/commands/{command_id}")).json()["status"] == "running"
        await resume(rig, dialler, freeze, incarnation=incarnation)
    end = await follower.end()
    assert (end["status"], end["exit_code"]) == ("exited", 3)
    assert follower.stdout == b"".join(b"%d\n" % number for number in range(1, 2001)) * 300


async def test_nothing_runs_while_it_is_suspended(rig: Rig, client: DataClient, dialler, tmp_path) -> None:
    path = tmp_path / "ticks"
    await client.spawn(f"while :; do echo >> {path}; sleep 0.005; done")
    await until(path.exists)
    await suspend(rig)
    size = path.stat().st_size
    for _ in range(10):
        await rig.wakes(wait_s=0.02)
    assert path.stat().st_size == size
    await resume(rig, dialler)
    await until(lambda: path.stat().st_size > size)


async def test_calls_wait_for_the_resume_and_tell_who_can_resume(rig: Rig, client: DataClient, dialler) -> None:
    command_id = await client.spawn("cat", stdin="open")
    follower = Follower(client, command_id)
    await suspend(rig)
    assert (await rig.wakes())["wakes"] == []
    for call in ("", f"/{command_id}", f"/{command_id}/output"):  # records: they need no sandbox
        assert (await client.call("GET", f"/commands{call}")).status_code == 200
    bad = DataClient(rig.url, "nonsense")
    assert (await bad.call("GET", "/files/stat?path=/")).status_code == 401
    await bad.http.aclose()
    other = rig.client(scope=["records"])
    assert (await other.call("GET", "/files/stat?path=/")).status_code == 403
    await other.http.aclose()
    assert (await rig.wakes())["wakes"] == []
    polling = asyncio.create_task(rig.wakes(wait_s=20))
    waiting = [
        asyncio.create_task(client.call("GET", "/files/stat?path=/")),
        asyncio.create_task(client.call("POST", f"/commands/{command_id}/stdin?offset=0&end=true", content=b"typed\n")),
        asyncio.create_task(client.exec("echo hello")),
    ]
    told = await polling
    assert {wake["sandbox"] for wake in told["wakes"]} == {SANDBOX}
    await until(lambda: rig.gateway.sandboxes.get(SANDBOX).gate._waiting == 3)
    told = await rig.wakes()
    assert (await rig.wakes(told["next"]))["wakes"] == []
    assert not any(task.done() for task in waiting)
    await resume(rig, dialler)
    stat, stdin, stream = await asyncio.gather(*waiting)
    assert stat.status_code == 200
    assert stdin.status_code == 200
    assert stream.stdout == b"hello\n"
    assert (await follower.end())["exit_code"] == 0
    assert follower.stdout == b"typed\n"
    assert (await rig.wakes())["wakes"] == []
    assert (await rig.wakes(told["next"] + 1_000_000))["next"] == told["next"]


async def test_a_call_that_waits_in_vain_says_so(rig: Rig, client: DataClient, dialler, monkeypatch) -> None:
    monkeypatch.setattr(suspension, "WAKE_WAIT_S", 0.2)
    await suspend(rig)
    answer = await client.call("GET", "/files/stat?path=/")
    assert (answer.status_code, error_code(answer)) == (503, "sandbox_paused")
    assert answer.headers["retry-after"] == "2"
    assert (await rig.wakes())["wakes"] == []  # nobody waits any more
    await resume(rig, dialler)
    monkeypatch.setattr(suspension, "WAKE_WAIT_S", 60)
    seen = (await rig.wakes())["next"]
    await suspend(rig, FREEZE_2, auto_resume=False)
    answer = await client.call("GET", "/files/stat?path=/")
    assert error_code(answer) == "sandbox_paused"
    assert (await rig.wakes(seen))["wakes"] == []
    await resume(rig, dialler, FREEZE_2, incarnation=2)
    assert (await client.call("GET", "/files/stat?path=/")).status_code == 200


async def test_a_freeze_that_came_to_nothing_is_taken_back(rig: Rig, client: DataClient) -> None:
    """The node never saved anything, so its statement is the one from before."""
    command_id = await client.spawn("while :; do echo tick; sleep 0.005; done")
    await suspend(rig)
    answer = await rig.suspend(FREEZE_2)
    assert (answer.status_code, error_code(answer)) == (409, "wrong_state")
    assert (await rig.attach()).status_code == 200
    seen = (await client.call("GET", f"/commands/{command_id}")).json()["stdout_bytes"]

    async def grows() -> bool:
        return (await client.call("GET", f"/commands/{command_id}")).json()["stdout_bytes"] > seen

    await until(grows)
    assert (await rig.suspend("x")).status_code == 422


async def test_a_replayed_thaw_does_not_attach(rig: Rig, dialler: LocalDialler) -> None:
    await suspend(rig)
    await resume(rig, dialler)
    await suspend(rig, FREEZE_2)
    dialler.thaw(FREEZE, incarnation=2)
    answer = await rig.attach(wait_s=0)
    assert error_code(answer) == "agent_invalid"
    assert (await rig.activity())["suspended"]
    await resume(rig, dialler, FREEZE_2, incarnation=2)


async def test_idle_and_busy(rig: Rig, client: DataClient, dialler: LocalDialler, tmp_path: Path) -> None:
    async def idle() -> float | None:
        told = await rig.activity()
        assert told["busy"] == (told["idle_since"] is None)
        return told["idle_since"]

    began = await idle()
    assert 0 <= time.time() - began < 30
    answer = await rig.suspend(FREEZE, if_idle_since=began - 1)
    assert (answer.status_code, error_code(answer)) == (409, "sandbox_busy")

    job = await client.spawn("sleep 60")
    assert await idle() is None
    answer = await rig.suspend(FREEZE, if_idle_since=time.time() + 1)
    assert (answer.status_code, error_code(answer)) == (409, "sandbox_busy")
    await client.call("POST", f"/commands/{job}/kill", json={})
    assert (await idle()) > began

    async with client.http.stream("GET", f"{client.base}/files/watch?path={tmp_path}"):
        await until(lambda: _busy(rig))
    await until(idle)

    body = base64.urlsafe_b64encode(b'{"argv":["/bin/sleep","60"],"cwd":"/","pty":{"cols":80,"rows":24}}').decode()
    url = f"ws{rig.url.removeprefix('http')}/v1/sandboxes/{SANDBOX}/pty?start={body.rstrip('=')}"
    headers = {"Authorization": f"Bearer {rig.mint.ticket()}"}
    async with connect(url, additional_headers=headers, proxy=None) as terminal:
        await terminal.recv()
        assert await idle() is None
        await terminal.send(encode_frame(FrameKind.KILL, b'{"signal":9}'))
    await until(idle)

    async def slow() -> AsyncIterator[bytes]:
        yield b"half"
        await until(lambda: _busy(rig))
        yield b"rest"

    assert (await client.call("PUT", f"/files?path={tmp_path}/slow", content=slow())).status_code == 200
    since = await until(idle)
    await asyncio.sleep(0.01)
    assert (await client.call("GET", f"/files/stat?path={tmp_path}")).status_code == 200
    assert (await idle()) > since
    since = await idle()
    await client.call("GET", "/commands")
    assert (await idle()) == since

    await suspend(rig, if_idle_since=time.time())
    assert await rig.activity() == {"busy": False, "idle_since": None, "suspended": True}
    await resume(rig, dialler)
    assert (await idle()) > since


async def _busy(rig: Rig) -> bool:
    return (await rig.activity())["busy"]


@asynccontextmanager
async def preview(rig: Rig) -> AsyncIterator[tuple[PreviewRig, int]]:
    async with open_previews(rig) as previews, serving(OK) as inside:
        await previews.publish(inside.port)
        yield previews, inside.port


async def test_previews_of_a_suspended_sandbox(rig: Rig, dialler: LocalDialler, monkeypatch) -> None:
    async with preview(rig) as (previews, port):
        assert (await previews.get(port, headers=previews.auth(port))).status == 200
        await suspend(rig)
        assert (await previews.get(port)).status == 401
        assert (await previews.get(port, headers=previews.auth(port, gen=2))).status == 401
        assert (await rig.wakes())["wakes"] == []
        asked = asyncio.create_task(previews.get(port, headers=previews.auth(port)))
        assert len((await rig.wakes(wait_s=20))["wakes"]) == 1
        assert not asked.done()
        await resume(rig, dialler)
        assert (await asked).body == b"ok"
        monkeypatch.setattr(suspension, "WAKE_WAIT_S", 0.1)
        await suspend(rig, FREEZE_2)
        page = await previews.get(port, headers=[*previews.auth(port), ("Accept", "text/html")])
        assert (page.status, page.one("x-cpuos-error"), page.one("retry-after")) == (503, "sandbox_paused", "2")
        assert b"paused" in page.body
        await resume(rig, dialler, FREEZE_2, incarnation=2)
        assert (await previews.get(port, headers=previews.auth(port))).status == 200


async def test_an_open_preview_is_busy_and_is_told_of_a_pause(rig: Rig, dialler: LocalDialler) -> None:
    async def silent(*_: Any) -> bool:
        await asyncio.sleep(60)
        return False

    async with open_previews(rig) as previews, serving(silent) as inside:
        await previews.publish(inside.port)
        asked = asyncio.create_task(previews.get(inside.port, headers=previews.auth(inside.port)))
        await until(lambda: inside.heads)
        assert await _busy(rig)
        await suspend(rig)
        answer = await asked
        assert (answer.status, answer.one("x-cpuos-error")) == (503, "sandbox_paused")
        await resume(rig, dialler)


async def test_what_a_pause_cuts_says_so(rig: Rig, client: DataClient, dialler: LocalDialler, tmp_path: Path) -> None:
    watch = asyncio.create_task(client.frames("GET", f"/files/watch?path={tmp_path}"))

    async def long() -> AsyncIterator[bytes]:
        while not rig.gateway.sandboxes.get(SANDBOX).gate.suspension:
            yield b"x" * 1000
            await asyncio.sleep(0.01)

    upload = asyncio.create_task(client.call("PUT", f"/files?path={tmp_path}/long", content=long()))
    await until(lambda: _busy(rig))
    await until(lambda: rig.gateway.sandboxes.get(SANDBOX).slots._taken.get("watches"))
    await suspend(rig)
    frames = (await watch).frames
    assert json.loads(frames[-1].payload)["error"]["code"] == "sandbox_paused"
    assert error_code(await upload) == "sandbox_paused"
    assert not (tmp_path / "long").exists()
    await resume(rig, dialler)


async def test_keys_in_a_terminal_call_it_awake_and_its_size_is_kept(rig: Rig, dialler: LocalDialler) -> None:
    body = base64.urlsafe_b64encode(
        b'{"argv":["/bin/bash","--norc"],"cwd":"/","pty":{"cols":80,"rows":24},"env":{"PS1":"> "}}'
    ).decode()
    url = f"ws{rig.url.removeprefix('http')}/v1/sandboxes/{SANDBOX}/pty?start={body.rstrip('=')}"
    headers = {"Authorization": f"Bearer {rig.mint.ticket()}"}
    decoder, seen = FrameDecoder(), bytearray()

    async def read_until(terminal: Any, text: bytes) -> None:
        async with asyncio.timeout(30):
            while text not in seen:
                for frame in decoder.feed(await terminal.recv()):
                    seen.extend(frame.payload if frame.kind is FrameKind.STDOUT else b"")

    async with connect(url, additional_headers=headers, proxy=None) as terminal:
        await terminal.send(encode_frame(FrameKind.STDIN, b"sleep 71 & sleep 0.2; echo be''gun\r"))
        await read_until(terminal, b"begun")
        await suspend(rig)
        await terminal.send(encode_frame(FrameKind.RESIZE, b'{"cols":101,"rows":41}'))
        await asyncio.sleep(0.05)
        assert (await rig.wakes())["wakes"] == []
        await terminal.send(encode_frame(FrameKind.STDIN, b"jobs; stty size; exit 4\r"))
        assert len((await rig.wakes(wait_s=20))["wakes"]) == 1
        await resume(rig, dialler)
        await read_until(terminal, b"41 101")
    assert b"Stopped" not in seen
    assert b"Running" in seen


async def test_a_gateway_that_is_killed_while_suspended(agent_binary: Path, tmp_path: Path) -> None:
    TicketMint(tmp_path)
    dialler = fixed_dialler(1)
    mint = TicketMint(tmp_path)
    async with (
        go_agent(agent_binary, tmp_path, dialler, first=True),
        gateway_process(tmp_path, dialler.address[1]) as process,
    ):
        sandbox = f"/v1/sandboxes/{SANDBOX}"
        await control(process, "POST", f"{sandbox}/attach", {"generation": 1, "hostname": "box"})
        async with DataClient(process.url, mint.ticket()) as client:
            command_id = await client.spawn("for i in $(seq 200); do echo $i; sleep 0.005; done", timeout_s=20)
        told = (await control(process, "POST", f"{sandbox}/suspend", {"freeze": FREEZE})).json()
        await process.kill(9)
        await process.start()
        state = (await control(process, "GET", "/v1/activity")).json()["sandboxes"][SANDBOX]
        assert state == {"busy": False, "idle_since": None, "suspended": True}
        assert (await control(process, "POST", f"{sandbox}/suspend", {"freeze": FREEZE})).json() == told
        async with DataClient(process.url, mint.ticket()) as client:
            follower = Follower(client, command_id)
            asked = asyncio.create_task(client.call("POST", f"/commands/{command_id}/stdin?offset=0", content=b""))
            stat = asyncio.create_task(client.call("GET", "/files/stat?path=/"))
            wakes = (await control(process, "GET", "/v1/wakes?after=0&wait_s=20")).json()
            assert wakes["wakes"][0]["sandbox"] == SANDBOX
            await control(process, "POST", f"{sandbox}/attach", {"generation": 1, "hostname": "box"})
            assert (await stat).status_code == 200
            await asked
            assert (await follower.end())["exit_code"] == 0
            assert follower.stdout == b"".join(b"%d\n" % number for number in range(1, 201))


async def test_a_kill_of_a_suspended_sandbox(rig: Rig, client: DataClient) -> None:
    command_id = await client.spawn("sleep 60")
    await suspend(rig)
    waiting = asyncio.create_task(client.call("GET", "/files/stat?path=/"))
    await rig.wakes(wait_s=20)
    answer = await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json={"reason": "stopped", "text": "killed"})
    assert answer.status_code == 204
    assert error_code(await waiting) == "sandbox_stopped"
    assert (await client.wait(command_id))["status"] == "killed"
    assert (await rig.wakes())["wakes"] == []
    assert (await rig.control.get("/v1/activity")).json() == {"sandboxes": {}}
    assert error_code(await rig.suspend(FREEZE)) == "sandbox_stopped"


async def test_an_agent_that_cannot_freeze(agent_binary: Path, tmp_path: Path, dialler: LocalDialler) -> None:
    """Not the first process of its namespace: a clean refusal, and all goes on."""
    async with go_agent(agent_binary, tmp_path, dialler), open_rig(tmp_path, dialler) as rig:
        await rig.attach()
        async with rig.client() as client:
            command_id = await client.spawn("for i in $(seq 100); do echo $i; sleep 0.01; done")
            answer = await rig.suspend(FREEZE)
            assert (answer.status_code, error_code(answer)) == (409, "freeze_failed")
            assert (await rig.activity())["suspended"] is False
            stream = await client.frames("GET", f"/commands/{command_id}/stream")
            assert stream.stdout == b"".join(b"%d\n" % number for number in range(1, 101))


@pytest.mark.parametrize("misdeed", [*CALLS, *FREEZES])
async def test_a_hostile_answer_to_a_freeze(tmp_path: Path, misdeed: Misdeed) -> None:
    async with attached(tmp_path) as (agent, rig, client):
        agent.misbehave(misdeed, at="/v1/freeze")
        began = time.monotonic()
        answer = await rig.suspend(FREEZE)
        assert time.monotonic() - began < 20
        assert error_code(answer) in (*AGENT_CODES, "freeze_failed"), answer.text
        agent.behave()
        await until(lambda: _attached(rig))
        assert (await client.call("GET", "/files/stat?path=/x")).status_code in (404, 502)


async def test_an_agent_of_an_earlier_release(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, rig, client):
        agent.misbehave(Misdeed.NO_SUCH_CALL, at="/v1/freeze")
        answer = await rig.suspend(FREEZE)
        assert error_code(answer) == "freeze_failed"
        assert "earlier release" in answer.text
        assert await _attached(rig)
        assert (await client.call("GET", "/files/stat?path=/x")).status_code == 502


async def test_a_kill_does_not_wait_for_a_freeze(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, rig, _):
        agent.misbehave(Misdeed.NEVER_ANSWER, at="/v1/freeze")
        sandbox = rig.gateway.sandboxes.get(SANDBOX)
        sandbox._agent.times = dataclasses.replace(sandbox._agent.times, freeze_s=300)
        asked = asyncio.create_task(rig.suspend(FREEZE))
        await until(lambda: any("freeze" in line for line in agent.requests))
        answer = await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json={"reason": "stopped", "text": "x"})
        assert answer.status_code == 204
        assert error_code(await asked) == "sandbox_lost"
        assert sandbox.ended is not None


async def test_so_many_calls_wait_and_no_more(rig: Rig, client: DataClient, dialler, monkeypatch) -> None:
    monkeypatch.setattr(suspension, "MAX_WAITING", 2)
    await suspend(rig)
    waiting = [asyncio.create_task(client.call("GET", "/files/stat?path=/")) for _ in range(2)]
    await until(lambda: rig.gateway.sandboxes.get(SANDBOX).gate._waiting == 2)
    assert error_code(await client.call("GET", "/files/stat?path=/")) == "sandbox_paused"
    await resume(rig, dialler)
    assert [(await task).status_code for task in waiting] == [200, 200]


async def test_a_gateway_that_died_before_it_knew_of_the_freeze(agent: int, dialler, tmp_path) -> None:
    """The agent is frozen and nothing says so: the next gateway finds it, and it goes on."""
    mint = TicketMint(tmp_path)
    async with open_rig(tmp_path, dialler, mint=mint) as rig, rig.client() as client:
        await rig.attach()
        command_id = await client.spawn("for i in $(seq 200); do echo $i; sleep 0.005; done")
        sandbox = rig.gateway.sandboxes.get(SANDBOX)
        for run in sandbox.runs.values():
            run.hold()
        await sandbox._agent.freeze(FREEZE)
    async with open_rig(tmp_path, dialler, mint=mint) as rig, rig.client() as client:
        assert (await client.wait(command_id))["exit_code"] == 0
        assert (await client.call("GET", f"/commands/{command_id}/output")).content.count(b"\n") == 200


async def test_a_pause_does_not_count_as_a_command_s_time(rig: Rig, client: DataClient, dialler, monkeypatch) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_GRACE_S", 0.1)
    command_id = await client.spawn("sleep 0.5; echo in time", timeout_s=1.0)
    await suspend(rig)
    clock = rig.gateway.sandboxes.get(SANDBOX).gate
    await until(lambda: clock._clock() - clock.suspension.since > 1.2)
    await resume(rig, dialler)
    rig.gateway.sandboxes.get(SANDBOX).look()
    ended = await client.wait(command_id)
    assert (ended["status"], ended["exit_code"]) == ("exited", 0)


async def test_a_hostile_agent_that_is_never_thawed(tmp_path: Path) -> None:
    async with attached(tmp_path) as (agent, rig, client):
        assert (await rig.suspend(FREEZE)).status_code == 200
        agent.misbehave(Misdeed.FROZEN_FOR_EVER)
        answer = await rig.attach(wait_s=0.3)
        assert error_code(answer) == "agent_invalid"
        assert (await rig.activity())["suspended"]
        waiting = asyncio.create_task(client.call("GET", "/files/stat?path=/x"))
        await rig.wakes(wait_s=20)
        agent.behave()
        assert (await rig.attach()).status_code == 200
        assert error_code(await waiting) == "agent_invalid"  # it knows no such call


async def _attached(rig: Rig) -> bool:
    told = await rig.activity()
    return told["idle_since"] is not None and not told["suspended"]
