"""The gateway dies by kill -9 or ends by SIGTERM in mid-output: nothing of any command is lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from gateway_process import GatewayProcess, fixed_dialler, gateway_process
from gateway_rig import SANDBOX, DataClient, LocalDialled, LocalDialler, Rig, TicketMint, go_agent, open_rig
from websockets.asyncio.client import connect

from cpuos.types.frames import FrameDecoder, FrameKind, encode_frame


@pytest.fixture
async def process(agent_binary: Path, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    TicketMint(tmp_path)
    dialler = fixed_dialler(1)
    async with go_agent(agent_binary, tmp_path, dialler), gateway_process(tmp_path, dialler.address[1]) as process:
        await control(process, "POST", f"/v1/sandboxes/{SANDBOX}/attach", {"generation": 1, "hostname": "box"})
        yield process


async def control(process: GatewayProcess, method: str, path: str, body: object = None) -> httpx2.Response:
    transport = httpx2.AsyncHTTPTransport(uds=str(process.folder / "gateway.sock"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as client:
        answer = await client.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return answer


def client_of(process: GatewayProcess, mint: TicketMint) -> DataClient:
    return DataClient(process.url, mint.ticket())


@pytest.fixture
def mint(tmp_path: Path) -> TicketMint:
    return TicketMint(tmp_path)


@pytest.mark.parametrize("signal", [9, 15])
async def test_output_in_mid_stream_survives(process: GatewayProcess, mint: TicketMint, signal: int) -> None:
    """A client resumes by its offsets over three restarts and has every byte once."""
    script = "for i in $(seq 300); do seq 1 3000; sleep 0.005; done; echo err >&2; exit 5"
    received = {FrameKind.STDOUT: b"", FrameKind.STDERR: b""}
    command_id, end = None, None
    for life in range(6):
        async with client_of(process, mint) as client:
            if command_id is None:
                opened = client.http.stream("POST", client.base + "/commands", json={"command": script, "cwd": "/"})
            else:
                offsets = f"stdout={len(received[FrameKind.STDOUT])}&stderr={len(received[FrameKind.STDERR])}"
                opened = client.http.stream("GET", f"{client.base}/commands/{command_id}/stream?{offsets}")
            decoder = FrameDecoder()
            killing = asyncio.create_task(kill_later(process, signal)) if life < 3 else None
            try:
                async with opened as answer:
                    assert answer.status_code == 200
                    async for piece in answer.aiter_raw():
                        for frame in decoder.feed(piece):
                            if frame.kind in received:
                                assert frame.offset == len(received[frame.kind])
                                received[frame.kind] += frame.payload
                            elif frame.kind is FrameKind.STARTED:
                                command_id = json.loads(frame.payload)["command"]["id"]
                            elif frame.kind is FrameKind.ENDED:
                                end = json.loads(frame.payload)["command"]
            except httpx2.HTTPError:
                pass
            if killing is not None:
                await killing
        if end is not None:
            break
        await process.start()
    assert (end["status"], end["exit_code"]) == ("exited", 5)
    assert received[FrameKind.STDERR] == b"err\n"
    assert received[FrameKind.STDOUT] == b"".join(b"%d\n" % n for n in range(1, 3001)) * 300


async def kill_later(process: GatewayProcess, signal: int) -> None:
    await asyncio.sleep(random.uniform(0.2, 0.5))
    await process.kill(signal)


async def test_commands_that_end_while_it_is_away(process: GatewayProcess, mint: TicketMint) -> None:
    async with client_of(process, mint) as client:
        quick = await client.spawn("sleep 0.4; seq 1 100000; exit 3")
        slow = await client.spawn("sleep 1.5; echo late")
        done = (await client.exec("echo before")).end["id"]
    await process.kill()
    await asyncio.sleep(0.8)
    await process.start()
    async with client_of(process, mint) as client:
        end = await client.wait(quick)
        assert (end["status"], end["exit_code"]) == ("exited", 3)
        output = (await client.call("GET", f"/commands/{quick}/output")).content
        assert output == b"".join(b"%d\n" % n for n in range(1, 100001))
        assert (await client.wait(slow))["stdout_bytes"] == 5
        assert (await client.call("GET", f"/commands/{done}/output")).content == b"before\n"
        listed = (await client.call("GET", "/commands")).json()["commands"]
        assert {command["id"] for command in listed} == {quick, slow, done}
    entries = (await control(process, "GET", "/v1/journal?after=0")).json()["entries"]
    for command_id in (quick, slow, done):
        phases = [entry["phase"] for entry in entries if entry["target"] == command_id]
        assert phases == ["intent", "outcome"]
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))


async def test_stdin_goes_on_after_a_restart(process: GatewayProcess, mint: TicketMint) -> None:
    data = os.urandom(600_000)
    async with client_of(process, mint) as client:
        command_id = await client.spawn(["cat"], stdin="open")
        await client.call("POST", f"/commands/{command_id}/stdin?offset=0", content=data[:300_000])
    await process.kill()
    await process.start()
    async with client_of(process, mint) as client:
        # The client repeats from an earlier offset than it has to: it cannot know how far it came.
        url = f"/commands/{command_id}/stdin?offset=200000&end=true"
        answer = await client.call("POST", url, content=data[200_000:])
        assert answer.json() == {"offset": 600_000, "open": False}, answer.text
        end = await client.wait(command_id)
        assert (end["status"], end["stdout_bytes"]) == ("exited", 600_000)
        output = (await client.call("GET", f"/commands/{command_id}/output")).content
    assert hashlib.sha256(output).digest() == hashlib.sha256(data).digest()


class SlowNode(LocalDialler):
    """Gives no socket until it may."""

    async def dial(self, sandbox_id: str, generation: int) -> LocalDialled:
        await self.may.wait()
        return await super().dial(sandbox_id, generation)


@pytest.mark.parametrize("asked", ["stdin", "kill", "resize", "terminal"])
async def test_what_is_asked_before_the_commands_are_taken_up_waits(
    agent_binary: Path, tmp_path: Path, asked: str
) -> None:
    """Else it would be dropped, and the answer say that it was done."""
    dialler = SlowNode(address=("127.0.0.1", 1))
    dialler.may = asyncio.Event()
    dialler.may.set()
    async with go_agent(agent_binary, tmp_path, dialler):
        async with open_rig(tmp_path, dialler) as rig, rig.client() as client:
            await rig.attach()
            size = {"pty": {"cols": 91, "rows": 33}} if asked in ("resize", "terminal") else {"stdin": "open"}
            command_id = await client.spawn(["/bin/bash", "-c", "read line; stty size; echo got $line"], **size)
        dialler.may.clear()
        async with open_rig(tmp_path, dialler, mint=rig.mint) as rig, rig.client() as client:
            asking = asyncio.create_task(_ask(rig, client, asked, command_id))
            await asyncio.sleep(0.2)
            assert not asking.done()
            dialler.may.set()
            await asyncio.wait_for(asking, 30)
            end = await client.wait(command_id)
            output = (await client.call("GET", f"/commands/{command_id}/output")).text
            wanted = {
                "stdin": ("exited", "got a line"),
                "kill": ("killed", ""),
                "resize": ("exited", "40 100"),
                "terminal": ("exited", "got a line"),
            }
            assert end["status"] == wanted[asked][0]
            assert wanted[asked][1] in output


async def _ask(rig: Rig, client: DataClient, asked: str, command_id: str) -> None:
    if asked == "stdin":
        answer = await client.call("POST", f"/commands/{command_id}/stdin?end=true", content=b"a line\n")
        assert answer.json() == {"offset": 7, "open": False}
    elif asked == "kill":
        answer = await client.call("POST", f"/commands/{command_id}/kill", json={"signal": "KILL"})
        assert answer.json()["status"] == "killed"
    elif asked == "resize":
        await client.call("POST", f"/commands/{command_id}/resize", json={"cols": 100, "rows": 40})
        await client.call("POST", f"/commands/{command_id}/stdin", content=b"\n")
    else:
        url = f"ws{rig.url.removeprefix('http')}{client.base}/pty?command={command_id}"
        headers = {"Authorization": f"Bearer {rig.mint.ticket()}"}
        async with connect(url, additional_headers=headers, proxy=None) as socket:
            await socket.send(encode_frame(FrameKind.STDIN, b"a line\n"))
            async for message in socket:
                if any(frame.kind is FrameKind.ENDED for frame in FrameDecoder().feed(message)):
                    break


async def test_a_sandbox_that_died_meanwhile(process: GatewayProcess, mint: TicketMint, tmp_path: Path) -> None:
    async with client_of(process, mint) as client:
        command_id = await client.spawn("echo kept; sleep 100")
        await client.has_said(len(b"kept\n"))
    await process.kill()
    process._agent_port = 1  # nobody answers there
    await process.start()
    body = {"reason": "lost", "text": "its process is gone"}
    await control(process, "POST", f"/v1/sandboxes/{SANDBOX}/detach", body)
    async with client_of(process, mint) as client:
        end = await client.wait(command_id)
        assert (end["status"], end["reason"]) == ("sandbox_lost", "its process is gone")
        assert (await client.call("GET", f"/commands/{command_id}/output")).content == b"kept\n"
    # And it stays so over another restart.
    await process.kill()
    await process.start()
    async with client_of(process, mint) as client:
        assert (await client.wait(command_id))["status"] == "sandbox_lost"
        answer = await client.call("POST", "/commands", json={"command": "true"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "sandbox_lost")
