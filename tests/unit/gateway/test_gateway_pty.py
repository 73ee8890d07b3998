"""Terminals over WebSocket, and the process as it is started."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import pytest
from gateway_rig import Rig
from websockets.asyncio.client import ClientConnection, connect

from cpuos.types.frames import Frame, FrameDecoder, FrameKind, encode_frame


def pty_url(rig: Rig, **values: Any) -> str:
    body = {"argv": ["/bin/bash", "--norc"], "cwd": "/", "pty": {"cols": 91, "rows": 33}, **values}
    start = base64.urlsafe_b64encode(json.dumps(body).encode()).rstrip(b"=").decode()
    return f"ws{rig.url.removeprefix('http')}/v1/sandboxes/{rig.sandbox}/pty?start={start}"


def auth(rig: Rig, **claims: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {rig.mint.ticket(**claims)}"}


async def frames_until(
    socket: ClientConnection, *, text: bytes = b"\x00never", kind: FrameKind | None = None
) -> list[Frame]:
    """Frames until their output has the text, or one of the kind came."""
    decoder, frames, output = FrameDecoder(), [], b""
    async with asyncio.timeout(30):
        while True:
            for frame in decoder.feed(await socket.recv()):
                frames.append(frame)
                output += frame.payload if frame.kind is FrameKind.STDOUT else b""
            assert decoder.pending == 0
            if text in output or (kind is not None and frames[-1].kind is kind):
                return frames


def typed(text: bytes) -> bytes:
    return encode_frame(FrameKind.STDIN, text)


async def test_a_terminal_has_its_size_and_takes_keys(rig: Rig) -> None:
    async with connect(pty_url(rig), additional_headers=auth(rig), proxy=None) as socket:
        await socket.send(typed(b"stty size\r"))
        frames = await frames_until(socket, text=b"33 91")
        assert frames[0].kind is FrameKind.STARTED
        await socket.send(encode_frame(FrameKind.RESIZE, b'{"cols":100,"rows":40}'))
        await socket.send(typed(b"stty size\r"))
        await frames_until(socket, text=b"40 100")
        await socket.send(typed(b"exit 3\r"))
        frames = await frames_until(socket, kind=FrameKind.ENDED)
        assert json.loads(frames[-1].payload)["command"]["exit_code"] == 3


async def test_ctrl_c_and_kill(rig: Rig) -> None:
    async with connect(pty_url(rig), additional_headers=auth(rig), proxy=None) as socket:
        await socket.send(typed(b"echo re''ady; sleep 100; echo st''opped $?\r"))
        await frames_until(socket, text=b"ready")
        await asyncio.sleep(0.2)
        await socket.send(encode_frame(FrameKind.KILL, b'{"signal":"INT"}'))
        await socket.send(typed(b"echo al''ive\r"))
        await frames_until(socket, text=b"alive")
        await socket.send(encode_frame(FrameKind.KILL, b'{"signal":"KILL"}'))
        frames = await frames_until(socket, kind=FrameKind.ENDED)
        assert json.loads(frames[-1].payload)["command"]["status"] == "killed"


async def test_signals_and_sizes_come_before_what_nobody_reads(rig: Rig) -> None:
    """A raw terminal whose program reads nothing, and more typed than it, the agent and the gateway hold together."""
    sized = "trap 'stty size' WINCH; stty raw -echo; echo ready; while :; do sleep 0.05; done"
    async with connect(
        pty_url(rig, argv=["/bin/bash", "-c", sized]), additional_headers=auth(rig), proxy=None
    ) as socket:
        await frames_until(socket, text=b"ready")
        for _ in range(14):  # 896 KiB
            await socket.send(typed(b"x" * (64 << 10)))
        await socket.send(encode_frame(FrameKind.RESIZE, b'{"cols":100,"rows":40}'))
        await frames_until(socket, text=b"40 100")
        await socket.send(encode_frame(FrameKind.KILL, b'{"signal":"KILL"}'))
        frames = await frames_until(socket, kind=FrameKind.ENDED)
        assert json.loads(frames[-1].payload)["command"]["status"] == "killed"


async def test_much_that_is_typed_comes_whole_and_in_order(rig: Rig) -> None:
    size = 3 << 20  # more than may wait
    counted = f"stty raw -echo; echo ready; head -c {size} | sha256sum"
    data = bytes(range(1, 256)) * (size // 255 + 1)
    wanted = hashlib.sha256(data[:size]).hexdigest().encode()
    async with connect(
        pty_url(rig, argv=["/bin/bash", "-c", counted]), additional_headers=auth(rig), proxy=None
    ) as socket:
        await frames_until(socket, text=b"ready")
        for begin in range(0, size, 60_000):
            await socket.send(typed(data[begin : min(size, begin + 60_000)]))
        await frames_until(socket, text=wanted)


async def test_a_closed_socket_leaves_the_program_and_another_attaches(rig: Rig) -> None:
    async with connect(pty_url(rig), additional_headers=auth(rig), proxy=None) as socket:
        await socket.send(typed(b"echo fi''rst\r"))
        frames = await frames_until(socket, text=b"first")
        command_id = json.loads(frames[0].payload)["command"]["id"]
    url = f"{pty_url(rig).partition('?')[0]}?command={command_id}"
    async with connect(url, additional_headers=auth(rig), proxy=None) as socket:
        await frames_until(socket, text=b"first")
        await socket.send(typed(b"echo se''cond; exit\r"))
        await frames_until(socket, kind=FrameKind.ENDED)


async def test_a_browser_sends_its_ticket_first(rig: Rig) -> None:
    async with connect(pty_url(rig), proxy=None) as socket:
        await socket.send(json.dumps({"ticket": rig.mint.ticket()}))
        await socket.send(typed(b"echo h''i; exit\r"))
        await frames_until(socket, kind=FrameKind.ENDED)


@pytest.mark.parametrize(
    ("claims", "first", "values", "code"),
    [
        ({"exp": 1}, None, {}, "ticket_expired"),
        ({"scope": ["files"]}, None, {}, "forbidden"),
        (None, "hello", {}, "key_missing"),
        (None, '{"ticket":"x"}', {}, "ticket_invalid"),
        ({}, None, {"argv": []}, "invalid_request"),
        ({}, None, {"cwd": "/no/such"}, "file_not_found"),
        ({}, "text", {}, "invalid_request"),
        ({}, b"\xff" * 16, {}, "invalid_request"),
        ({}, encode_frame(FrameKind.RESIZE, b"{}x"), {}, "invalid_request"),
        ({}, encode_frame(FrameKind.STDOUT, b"x"), {}, "invalid_request"),
        ({}, encode_frame(FrameKind.KILL, b'{"signal":[]}'), {}, "invalid_request"),
    ],
)
async def test_refusals_come_as_an_error_frame(
    rig: Rig, claims: dict[str, Any] | None, first: str | bytes | None, values: dict[str, Any], code: str
) -> None:
    headers = {} if claims is None else auth(rig, **claims)
    async with connect(pty_url(rig, **values), additional_headers=headers, proxy=None) as socket:
        if first is not None:
            await socket.send(first)
        frames = await frames_until(socket, kind=FrameKind.ERROR)
        assert json.loads(frames[-1].payload)["error"]["code"] == code
        await socket.wait_closed()
        assert socket.close_code == 4000


async def test_an_unknown_socket_route(rig: Rig) -> None:
    with pytest.raises(Exception, match="403"):
        async with connect(f"ws{rig.url.removeprefix('http')}/v1/nothing", proxy=None):
            pass
