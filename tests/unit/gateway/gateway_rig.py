"""What the gateway's tests stand on: an agent on loopback, tickets of a test key, and a client of the data API."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cpuos.gateway.access import Gateway
from cpuos.gateway.agent.connection import AgentTimes
from cpuos.gateway.limits import GatewayLimits
from cpuos.gateway.service import open_gateway, serve_gateway
from cpuos.gateway.spool import SpoolLimits
from cpuos.testing.waiting import until
from cpuos.types.frames import Frame, FrameDecoder, FrameKind

SANDBOX = "s" * 20
REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class LocalDialled:
    socket: socket.socket
    address: tuple[str, int] | str
    statement: bytes
    signature: bytes
    session_key: bytes


@dataclass(kw_only=True)
class LocalDialler:
    """Stands in for the node's dial socket."""

    address: tuple[str, int] | str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    session_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    words: dict[str, Any] = field(default_factory=dict)
    """More for the statement: an incarnation, a thaw."""
    dials: int = 0

    def thaw(self, freeze: str, *, incarnation: int) -> None:
        """From here on the statement of a sandbox that goes on."""
        self.words = {"incarnation": incarnation, "thaw": freeze, "from": SANDBOX}
        self.session_key = secrets.token_bytes(32)

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    async def dial(self, sandbox_id: str, generation: int) -> LocalDialled:
        self.dials += 1
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        guest = socket.socket(family, socket.SOCK_STREAM)
        guest.setblocking(False)
        now = time.time()
        statement = json.dumps(
            {
                "sandbox": sandbox_id,
                "generation": generation,
                "expires_at": int(now) + 60,
                "session_key": base64.b64encode(self.session_key).decode(),
                "hostname": "box",
                "now": now,
            }
            | self.words
        ).encode()
        return LocalDialled(
            socket=guest,
            address=self.address,
            statement=statement,
            signature=self.key.sign(b"cpuos-identity-v1\n" + statement),
            session_key=self.session_key,
        )


class TicketMint:
    """Plays the server's part: a key whose public half the gateway reads."""

    def __init__(self, folder: Path) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.path = folder / "ticket.pub"
        self.publish()
        self._numbers = itertools.count(1)

    def publish(self) -> None:
        public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.path.write_bytes(public)

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = time.time()
        claims = {
            "jti": f"t{next(self._numbers)}",
            "iss": "cpuos",
            "ws": "default",
            "sbx": SANDBOX,
            "gen": 1,
            "act": "key:test",
            "scope": ["exec", "files"],
            "task": None,
            "pv": 1,
            "iat": int(now),
            "exp": int(now) + 600,
        }
        return {name: value for name, value in (claims | changes).items() if value is not ...}

    def ticket(self, **changes: Any) -> str:
        return jwt.encode(self.claims(**changes), self.key, algorithm="EdDSA")


def agent_program(folder: Path) -> Path | None:
    """The guest agent, built once a test run, or `$CPUOS_TEST_AGENT`; None without Go."""
    if given := os.environ.get("CPUOS_TEST_AGENT"):
        return Path(given)
    built = folder / "cpuos-agent"
    if not built.exists():
        go = shutil.which("go")
        if go is None:
            return None
        environment = os.environ | {"CGO_ENABLED": "0"}
        subprocess.run(
            [go, "build", "-o", str(built), "."], cwd=REPOSITORY / "guest", check=True, env=environment, timeout=300
        )
    return built


@asynccontextmanager
async def go_agent(
    program: Path, folder: Path, dialler: LocalDialler, *, port: int = 0, first: bool = False
) -> AsyncIterator[int]:
    """The real agent on loopback, its programs run as the caller; its process number.

    `first`: as the first process of a namespace, as a freeze needs it (and root). It may not set the machine's clock.
    """
    table = folder / "users"
    table.mkdir(exist_ok=True)
    identity = f"{os.getuid()}:{os.getgid()}"
    (table / "passwd").write_text(f"user:x:{identity}:User:{folder}:/bin/bash\nroot:x:0:0:root:/root:/bin/bash\n")
    (table / "group").write_text(f"user:x:{os.getgid()}:\n")
    arguments = ["--sandbox", SANDBOX, "--node-key", base64.b64encode(dialler.public_key).decode()]
    arguments += ["--listen", f"127.0.0.1:{port}", "--user-table", str(table)]
    # What is mounted elsewhere is not held by this namespace.
    alone = ("unshare", "--pid", "--fork", "--propagation", "slave", "--mount-proc", "--kill-child")
    alone += ("setpriv", "--bounding-set", "-sys_time")
    process = await asyncio.create_subprocess_exec(
        *(alone if first else ()), str(program), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        host, _, port = line.decode().strip().rpartition(":")
        dialler.address = (host, int(port))
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A whole command stream as a client saw it."""

    frames: list[Frame]

    def data(self, kind: FrameKind) -> bytes:
        return b"".join(frame.payload for frame in self.frames if frame.kind is kind)

    @property
    def stdout(self) -> bytes:
        return self.data(FrameKind.STDOUT)

    @property
    def stderr(self) -> bytes:
        return self.data(FrameKind.STDERR)

    @property
    def end(self) -> dict[str, Any]:
        assert self.frames[-1].kind is FrameKind.ENDED, self.frames[-1]
        return json.loads(self.frames[-1].payload)["command"]

    @property
    def gaps(self) -> list[dict[str, Any]]:
        return [json.loads(frame.payload) for frame in self.frames if frame.kind is FrameKind.GAP]

    def in_order(self) -> bool:
        """Offsets follow each other but for what GAP frames name."""
        positions = {"stdout": 0, "stderr": 0}
        for frame in self.frames:
            if frame.kind is FrameKind.GAP:
                gap = json.loads(frame.payload)
                assert gap["from"] == positions[gap["stream"]]
                positions[gap["stream"]] = gap["to"]
            elif frame.kind in (FrameKind.STDOUT, FrameKind.STDERR):
                name = frame.kind.name.lower()
                if frame.offset != positions[name]:
                    return False
                positions[name] += len(frame.payload)
        return True


class DataClient:
    """Calls of one sandbox with one ticket."""

    def __init__(self, url: str, ticket: str, *, sandbox: str = SANDBOX) -> None:
        self.url = url
        self.base = f"/v1/sandboxes/{sandbox}"
        headers = {"Authorization": f"Bearer {ticket}"}
        # There is no TLS; to load whom it would trust takes as long as many a test.
        self.http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False, verify=False)

    async def __aenter__(self) -> DataClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.aclose()

    async def call(self, method: str, path: str, **rest: Any) -> httpx2.Response:
        return await self.http.request(method, self.base + path, **rest)

    async def exec(self, command: str | list[str], *, query: str = "", headers: Any = None, **values: Any) -> Stream:
        program = {"command": command} if isinstance(command, str) else {"argv": command}
        body = {"cwd": "/", **program, **values}
        return await self.frames("POST", f"/commands{query}", json=body, headers=headers)

    async def frames(self, method: str, path: str, **rest: Any) -> Stream:
        decoder, frames = FrameDecoder(), []
        async with self.http.stream(method, self.base + path, **rest) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise AssertionError(f"{answer.status_code} {answer.text}")
            async for piece in answer.aiter_raw():
                frames += decoder.feed(piece)
        assert decoder.pending == 0
        return Stream(frames=frames)

    async def spawn(self, command: str | list[str], **values: Any) -> str:
        program = {"command": command} if isinstance(command, str) else {"argv": command}
        answer = await self.call("POST", "/commands", json={"cwd": "/", "detach": True, **program, **values})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    async def has_said(self, stdout_bytes: int, *, command_id: str = "") -> str:
        """Wait until a command, the only one or this, has written so much; its id."""

        async def look() -> str:
            known = (await self.call("GET", "/commands")).json()["commands"]
            asked = [one for one in known if one["id"] == command_id or not command_id]
            return next((one["id"] for one in asked if one["stdout_bytes"] >= stdout_bytes), "")

        return await until(look)

    async def wait(self, command_id: str, *, timeout_s: float = 20) -> dict[str, Any]:
        answer = await self.call("GET", f"/commands/{command_id}/wait?timeout_s={timeout_s}")
        assert answer.status_code == 200, answer.text
        return answer.json()


def error_code(answer: httpx2.Response) -> str:
    return answer.json()["error"]["code"]


@dataclass(kw_only=True)
class Rig:
    """A gateway in this process, listening, with its parts at hand."""

    gateway: Gateway
    url: str
    mint: TicketMint
    control: httpx2.AsyncClient
    folder: Path
    sandbox: str = SANDBOX

    def client(self, **claims: Any) -> DataClient:
        return DataClient(self.url, self.mint.ticket(**claims), sandbox=self.sandbox)

    async def attach(self, *, generation: int = 1, wait_s: float = 5) -> httpx2.Response:
        body = {"generation": generation, "hostname": "box", "wait_s": wait_s}
        return await self.control.post(f"/v1/sandboxes/{self.sandbox}/attach", json=body)

    async def suspend(self, freeze: str, **more: Any) -> httpx2.Response:
        return await self.control.post(f"/v1/sandboxes/{self.sandbox}/suspend", json={"freeze": freeze, **more})

    async def activity(self) -> dict[str, Any]:
        return (await self.control.get("/v1/activity")).json()["sandboxes"][self.sandbox]

    async def wakes(self, after: int = 0, *, wait_s: float = 0) -> dict[str, Any]:
        return (await self.control.get(f"/v1/wakes?after={after}&wait_s={wait_s}")).json()

    async def journal(self) -> list[dict[str, Any]]:
        return (await self.control.get("/v1/journal?after=0")).json()["entries"]


@asynccontextmanager
async def open_rig(
    folder: Path,
    dialler: Any,
    *,
    limit_reader: Any = None,
    limits: GatewayLimits | None = None,
    spool_limits: SpoolLimits | None = None,
    times: AgentTimes | None = None,
    mint: TicketMint | None = None,
) -> AsyncIterator[Rig]:
    mint = mint or TicketMint(folder)
    control_socket = folder / "gateway.sock"
    async with (
        open_gateway(
            folder / "state",
            public_key=mint.path,
            dialler=dialler,
            limit_reader=limit_reader,
            records_socket=folder / "records.sock",
            limits=limits,
            spool_limits=spool_limits,
            times=times,
        ) as gateway,
        serve_gateway(
            gateway,
            host="127.0.0.1",
            port=0,
            control_socket=control_socket,
            control_peers=frozenset({os.geteuid()}),
        ) as url,
        httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(control_socket), verify=False),
            base_url="http://gateway",
            timeout=60,
        ) as control,
    ):
        yield Rig(gateway=gateway, url=url, mint=mint, control=control, folder=folder)
