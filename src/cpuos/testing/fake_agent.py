"""A small guest agent in Python that speaks api/guest.md: for tests without a real sandbox.

Commands are real local processes. Isolation is none: run only what a test wrote itself.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cpuos.testing.fake_commands import FakeCommands
from cpuos.testing.fake_files import FakeFiles
from cpuos.testing.fake_freeze import FakeFreezer
from cpuos.testing.fake_http import MAX_HEAD_BYTES, GuestError, HttpRequest, HttpResponse, serve_connection
from cpuos.testing.fake_ports import FakePorts

__all__ = ["FakeAgent"]

SIGNATURE_DOMAIN = b"cpuos-identity-v1\n"


class FakeAgent:
    """One agent. `root` is the folder that it serves as "/"; with `switch_users` it acts as real users (needs root)."""

    def __init__(
        self,
        sandbox_id: str,
        *,
        node_key: bytes,
        root: Path = Path("/"),
        switch_users: bool = False,
        set_hostname: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._node_key = Ed25519PublicKey.from_public_bytes(node_key)
        self._set_hostname = set_hostname
        self._started = time.monotonic()
        self._generation = 0
        self._incarnation = 0
        self._thawed: str | None = None
        """The freeze that the present identity ended."""
        self._told_of_thaw: dict[str, object] = {}
        self._session_key = b""
        self.commands = FakeCommands(root, switch_users=switch_users)
        self.files = FakeFiles(root, switch_users=switch_users)
        self.ports = FakePorts()
        self.freezer = FakeFreezer(self.commands, cut=self._cut_others)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Serve connections of this listening socket until `close`."""
        listener.setblocking(False)
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        self._server = await start(self._connected, sock=listener, limit=MAX_HEAD_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self.commands.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await serve_connection(reader, writer, handler=self._handle)
        except asyncio.CancelledError:
            writer.close()
        finally:
            self._connections.discard(task)

    async def _handle(self, request: HttpRequest) -> HttpResponse | None:
        if (request.method, request.path) == ("POST", "/v1/identity"):
            return HttpResponse(json=self._accept_identity(await request.json()))
        self._check_key(request)
        self.freezer.check(request.method, request.path)
        handlers = {
            ("GET", "/v1/files"): self.files.read,
            ("PUT", "/v1/files"): self.files.write,
            ("DELETE", "/v1/files"): self.files.remove,
            ("GET", "/v1/files/stat"): self.files.stat,
            ("GET", "/v1/files/list"): self.files.list,
            ("POST", "/v1/files/mkdir"): self.files.mkdir,
            ("POST", "/v1/files/move"): self.files.move,
            ("GET", "/v1/files/watch"): self.files.watch,
            ("GET", "/v1/files/tree"): self.files.read_tree,
            ("PUT", "/v1/files/tree"): self.files.write_tree,
            ("POST", "/v1/commands"): self.commands.start,
        }
        handler = handlers.get((request.method, request.path))
        if handler is not None:
            return await handler(request)
        return await self._handle_small(request)

    async def _handle_small(self, request: HttpRequest) -> HttpResponse | None:
        match request.method, request.path.split("/")[2:]:
            case "GET", ["hello"]:
                return HttpResponse(json=self._hello())
            case "GET", ["commands"]:
                return HttpResponse(json={"commands": self.commands.list()})
            case "GET", ["commands", command_id]:
                return HttpResponse(json=self.commands.get(command_id).facts())
            case "POST", ["commands", command_id, "stdin"]:
                command = self.commands.get(command_id)
                data = b"".join([piece async for piece in request.body()])
                end = request.flag("end", default=False)
                return HttpResponse(json={"stdin": await command.post_stdin(data, request.number("offset"), end=end)})
            case "POST", ["commands", command_id, "resize"]:
                self.commands.get(command_id).resize(await request.json())
                return HttpResponse(json={})
            case "POST", ["commands", command_id, "attach"]:
                offsets = {name: request.number(name) for name in ("stdout", "stderr")}
                await self.commands.get(command_id).stream(request, offsets=offsets)
                return None
            case "POST", ["commands", command_id, "kill"]:
                asked = await request.json()
                command = self.commands.get(command_id)
                await command.kill(int(asked.get("signal", 9)), reason=str(asked.get("reason", "")))
                return HttpResponse(json=command.facts())
            case "DELETE", ["commands", command_id]:
                self.commands.remove(command_id)
                return HttpResponse(json={})
            case "POST", ["ports", port, "connect"]:
                await self.ports.connect(request, port)
                return None
            case "POST", ["freeze"]:
                return HttpResponse(json=await self.freezer.freeze(str((await request.json()).get("freeze"))))
            case "POST", ["thaw"]:
                return HttpResponse(json=self.freezer.thaw(str((await request.json()).get("freeze"))))
        raise GuestError("not_found", f"no route {request.method} {request.path}")

    def _accept_identity(self, body: dict[str, Any]) -> dict[str, object]:
        try:
            statement = base64.b64decode(body["statement"])
            self._node_key.verify(base64.b64decode(body["signature"]), SIGNATURE_DOMAIN + statement)
            said = json.loads(statement)
            key = base64.b64decode(said["session_key"])
            if said["expires_at"] <= said["now"]:
                raise ValueError("expired")
            if self._repeats(said, key):
                return self._hello() | self._told_of_thaw
            self._check_newer(said)
        except (InvalidSignature, KeyError, TypeError, ValueError) as error:
            raise GuestError("identity_refused", str(error) or type(error).__name__) from error
        missing = self.freezer.missing(body.get("expected") or {}) if self.freezer.frozen is not None else []
        if missing and not body.get("incomplete"):
            raise GuestError("restore_incomplete", "not all of it came back", missing=missing)
        self._sandbox_id, self._generation, self._session_key = said["sandbox"], said["generation"], key
        self._incarnation, self._thawed = said.get("incarnation", 0), said.get("thaw")
        self._set_hostname(str(said.get("hostname", "")))
        self._told_of_thaw = {}
        if self._thawed is not None:
            thawed = {"continued": self.freezer.go_on(), "reseeded": [], "failed": [], "missing": missing}
            self._told_of_thaw = {"thawed": thawed}
        return self._hello() | self._told_of_thaw

    def _repeats(self, said: dict[str, Any], key: bytes) -> bool:
        told = (said["sandbox"], said["generation"], said.get("incarnation", 0))
        same = told == (self._sandbox_id, self._generation, self._incarnation)
        return same and hmac.compare_digest(key, self._session_key) and said.get("thaw") in (None, self._thawed)

    def _check_newer(self, said: dict[str, Any]) -> None:
        age = (said["generation"], said.get("incarnation", 0))
        frozen, thaw = self.freezer.frozen, said.get("thaw")
        if frozen is None and thaw is not None and self._generation == 0:
            return  # the fake runtime's copies begin anew, with the files alone
        if thaw != frozen or (frozen is not None and said["from"] != self._sandbox_id):
            raise ValueError("it does not end the freeze")
        if said["sandbox"] != self._sandbox_id:
            if frozen is None:
                raise ValueError("another sandbox")
        elif age <= (self._generation, self._incarnation):
            raise ValueError(f"generation and incarnation {age} are not newer")

    def _cut_others(self) -> None:
        for task in self._connections - {asyncio.current_task()}:
            task.cancel()

    def _check_key(self, request: HttpRequest) -> None:
        sent = request.headers.get("authorization", "").encode()
        if not self._session_key or not hmac.compare_digest(sent, f"Bearer {self._session_key.hex()}".encode()):
            raise GuestError("identity_required", "send the session key")

    def _hello(self) -> dict[str, object]:
        return {
            "contract": 1,
            "agent": "fake",
            "sandbox": self._sandbox_id,
            "generation": self._generation,
            "incarnation": self._incarnation,
            "frozen": self.freezer.frozen,
            "boot_s": time.monotonic() - self._started,
            "commands": self.commands.running,
        }
