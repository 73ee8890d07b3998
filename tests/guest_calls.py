"""A host of one guest agent for tests: identity, freeze and shell commands, over a node's dial socket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import time
from typing import Any
from urllib.parse import quote

from cpuos.node.client import DialClient, Dialled

ANSWER_S = 60.0


class GuestCalls:
    """The host side of one sandbox of a node. Each call has a connection of its own."""

    def __init__(self, dial: DialClient, sandbox_id: str, *, generation: int) -> None:
        self._dial = dial
        self._id = sandbox_id
        self._generation = generation
        self._count = 0

    async def identify(self) -> dict[str, Any]:
        """Tell the agent who it is, which thaws one that is frozen; its hello."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                return await self.call("POST", "/v1/identity", body=None)
            except OSError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

    async def freeze(self, nonce: str) -> dict[str, Any]:
        return await self.call("POST", "/v1/freeze", body={"freeze": nonce})

    async def run(self, command: str, *, user: str = "root") -> str:
        """What a shell command says, once it has ended."""
        self._count += 1
        name = f"{self._count:04d}{time.time_ns() % 10**12:012d}"
        body = {"command": f"({command}) > /tmp/{name} 2>&1", "user": user, "cwd": "/", "attach": False}
        await self.call("POST", f"/v1/commands?id={name}", body=body)
        deadline = time.monotonic() + ANSWER_S
        while (await self.call("GET", f"/v1/commands/{name}"))["status"] == "running":
            assert time.monotonic() < deadline, command
            await asyncio.sleep(0.01)
        await self.call("DELETE", f"/v1/commands/{name}")
        return str(await self.call("GET", f"/v1/files?path={quote(f'/tmp/{name}')}", as_text=True))

    async def start(self, name: str, command: str) -> None:
        """Begin a command that goes on; `name` has 16 letters."""
        await self.call("POST", f"/v1/commands?id={name}", body={"command": command, "user": "root", "attach": False})

    async def call(self, method: str, target: str, *, body: Any = (), as_text: bool = False) -> Any:
        dialled = await self._dial.dial(self._id, self._generation)
        return await asyncio.to_thread(_call, dialled, method, target, body, as_text)


def _call(dialled: Dialled, method: str, target: str, body: Any, as_text: bool) -> Any:
    with contextlib.closing(dialled.socket) as guest:
        guest.settimeout(ANSWER_S)
        guest.connect(dialled.address)
        if target == "/v1/identity":
            body = {
                "statement": base64.b64encode(dialled.statement).decode(),
                "signature": base64.b64encode(dialled.signature).decode(),
            }
        connection = http.client.HTTPConnection("guest")
        connection.sock = guest
        headers = {"authorization": f"Bearer {dialled.session_key.hex()}"}
        connection.request(method, target, json.dumps(body) if body != () else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status < 300, f"{method} {target}: {answer.status} {text}"
    return text if as_text else json.loads(text or "null")
