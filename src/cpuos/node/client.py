"""How the other processes reach a node: control for the server, dialling for the gateway."""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2
from pydantic import BaseModel

from cpuos.answers import read_answer
from cpuos.errors import CpuosError, Unavailable, error_from_body
from cpuos.types.limits import LimitFacts
from cpuos.types.network import EffectivePolicy
from cpuos.types.node import (
    NodeFacts,
    NodeGeneration,
    NodeNetworkUpdate,
    NodePause,
    NodeRepause,
    NodeResume,
    NodeSandboxCreate,
    NodeSnapshotCreate,
    PoolFacts,
    SandboxFacts,
    SandboxStats,
    SandboxUsage,
    SnapshotFacts,
)
from cpuos.types.storage import NodeStorage, StorageItem

__all__ = ["Changes", "DialClient", "Dialled", "LocalNodeClient", "NodeClient"]

# An answer is one packet: statement, signature and key in base64 stay far below it.
DIAL_PACKET_BYTES = 16 << 10
# Between two pieces of an image, and for the node to have it on its disk.
TEMPLATE_S = 120.0
# Memory and disks of many GiB on a slow volume.
MOVE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What changed after the sequence number that was asked for; `seq` is the next number to ask with."""

    seq: int
    changes: list[SandboxFacts]


class NodeClient(Protocol):
    """The verbs of a node. Errors are those of the table; a node out of reach is `node_unavailable`."""

    async def facts(self) -> NodeFacts: ...

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        """Returns when the sandbox's process runs. A repeat with the same id and generation answers the same facts."""
        ...

    async def get(self, sandbox_id: str) -> SandboxFacts: ...

    async def list(self) -> list[SandboxFacts]: ...

    async def delete(self, sandbox_id: str, *, generation: int) -> None:
        """Idempotent; ends a create of that generation that is still going on, and fences later repeats of it."""
        ...

    async def update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        """Returns when the policy is in place and connections that it forbids are cut. May be repeated; a version older
        than the one in force is `stale_policy`, and changes nothing."""
        ...

    async def put_template(self, image: str, *, size: int, sha256: str, content: AsyncIterator[bytes]) -> None:
        """Keep the image of a build; refused unless it has this size and digest."""
        ...

    async def delete_template(self, image: str) -> None:
        """Refused while a sandbox runs from it; nothing there is fine."""
        ...

    async def stats(self, sandbox_id: str) -> SandboxStats: ...

    async def usage(self) -> builtins.list[SandboxUsage]:
        """What all sandboxes that run have used so far."""
        ...

    async def pause(
        self, sandbox_id: str, *, generation: int, freeze: str, labels: dict[str, str] | None = None
    ) -> SandboxFacts:
        """Memory of a frozen sandbox to disk, then nothing of it stays but files. Idempotent. After a failure it runs
        on, frozen, and the next dial's statement thaws it. `labels` are kept for its resume."""
        ...

    async def resume(
        self,
        sandbox_id: str,
        *,
        generation: int,
        network: EffectivePolicy,
        labels: dict[str, str] | None = None,
        memory: bool = True,
        incomplete: bool = False,
    ) -> SandboxFacts:
        """Returns when its processes are there again, frozen: the next dial's statement thaws them; the facts
        say so where only its files came back. Idempotent. The image is kept until `settle`; after a failure the sandbox
        is paused as before. So it is where its disk, its policy or its labels are not as they were, unless it may be
        `incomplete`."""
        ...

    async def settle(self, sandbox_id: str, *, generation: int) -> None:
        """The resumed sandbox answers: its image can go. Idempotent."""
        ...

    async def repause(self, sandbox_id: str, *, generation: int, frozen: bool = False) -> SandboxFacts:
        """Undo a resume that was not settled: paused as before. Idempotent. `frozen`: its guest has refused to go on,
        so that what was saved of its processes can be taken up again."""
        ...

    async def snapshot(
        self, sandbox_id: str, *, generation: int, snapshot: str, freeze: str | None = None, memory: bool = True
    ) -> SnapshotFacts:
        """Of a frozen sandbox, which the next dial's statement thaws, of a paused one, or (without memory) of what is
        left of one that died and was not deleted. A repeat answers the same."""
        ...

    async def keep_root(self, sandbox_id: str, *, generation: int) -> None:
        """Save what a running sandbox has outside of /workspace, for the case that it dies. A pause does so too."""
        ...

    async def snapshots(self) -> list[SnapshotFacts]: ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Idempotent; refused as `snapshot_in_use` while a create reads it."""
        ...

    async def put_pack(self, image: str, *, size: int, sha256: str, content: AsyncIterator[bytes]) -> None:
        """Keep a data pack; refused unless it has this size and digest."""
        ...

    async def delete_pack(self, image: str) -> None:
        """Refused as `pack_in_use` while a sandbox or a snapshot has it; nothing there is fine."""
        ...

    async def storage(self) -> NodeStorage:
        """What takes room there."""
        ...

    async def prune(self, *, dry_run: bool) -> builtins.list[StorageItem]:
        """Remove what nobody needs, or only say what that is."""
        ...

    async def changes(self, after: int, *, wait_s: float = 25.0) -> Changes:
        """Long poll. Start with 0: then every known sandbox comes once. Deleted ones come as not alive."""
        ...

    async def pool(self, after: int, *, wait_s: float = 25.0) -> PoolFacts:
        """Long poll: the sandboxes that are ready to be taken, once they are others than under the number `after`."""
        ...

    async def aclose(self) -> None: ...


class LocalNodeClient:
    """NodeClient over the node's unix socket."""

    def __init__(self, node_socket: Path | str, *, timeout_s: float = 60.0) -> None:
        self._socket = str(node_socket)
        self._timeout_s = timeout_s
        # No TLS there, and to load whom it would trust takes longer than most calls.
        transport = httpx2.AsyncHTTPTransport(uds=self._socket, verify=False)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://node", timeout=timeout_s, trust_env=False)

    async def __aenter__(self) -> LocalNodeClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def facts(self) -> NodeFacts:
        return NodeFacts.model_validate(await self._call("GET", "/v1/node"))

    async def create(self, request: NodeSandboxCreate) -> SandboxFacts:
        return SandboxFacts.model_validate(await self._call("POST", "/v1/sandboxes", body=request.model_dump()))

    async def get(self, sandbox_id: str) -> SandboxFacts:
        return SandboxFacts.model_validate(await self._call("GET", f"/v1/sandboxes/{sandbox_id}"))

    async def list(self) -> list[SandboxFacts]:
        answer = await self._call("GET", "/v1/sandboxes")
        return [SandboxFacts.model_validate(facts) for facts in answer["sandboxes"]]

    async def delete(self, sandbox_id: str, *, generation: int) -> None:
        await self._call("DELETE", f"/v1/sandboxes/{sandbox_id}", query={"generation": generation})

    async def update_network(self, sandbox_id: str, *, generation: int, policy: EffectivePolicy) -> None:
        body = NodeNetworkUpdate(generation=generation, policy=policy).model_dump(mode="json")
        await self._call("PUT", f"/v1/sandboxes/{sandbox_id}/network", body=body)

    async def put_template(self, image: str, *, size: int, sha256: str, content: AsyncIterator[bytes]) -> None:
        query = {"size": size, "sha256": sha256}
        await self._call("PUT", f"/v1/templates/{image}", query=query, content=content, timeout_s=TEMPLATE_S)

    async def delete_template(self, image: str) -> None:
        await self._call("DELETE", f"/v1/templates/{image}")

    async def usage(self) -> builtins.list[SandboxUsage]:
        answer = await self._call("GET", "/v1/usage")
        return [SandboxUsage.model_validate(used) for used in answer["usage"]]

    async def stats(self, sandbox_id: str) -> SandboxStats:
        return SandboxStats.model_validate(await self._call("GET", f"/v1/sandboxes/{sandbox_id}/stats"))

    async def pause(
        self, sandbox_id: str, *, generation: int, freeze: str, labels: dict[str, str] | None = None
    ) -> SandboxFacts:
        body = NodePause(generation=generation, freeze=freeze, labels=labels)
        return SandboxFacts.model_validate(await self._act(sandbox_id, "pause", body))

    async def resume(
        self,
        sandbox_id: str,
        *,
        generation: int,
        network: EffectivePolicy,
        labels: dict[str, str] | None = None,
        memory: bool = True,
        incomplete: bool = False,
    ) -> SandboxFacts:
        body = NodeResume(generation=generation, network=network, labels=labels, memory=memory, incomplete=incomplete)
        return SandboxFacts.model_validate(await self._act(sandbox_id, "resume", body))

    async def settle(self, sandbox_id: str, *, generation: int) -> None:
        await self._act(sandbox_id, "settle", NodeGeneration(generation=generation))

    async def repause(self, sandbox_id: str, *, generation: int, frozen: bool = False) -> SandboxFacts:
        body = NodeRepause(generation=generation, frozen=frozen)
        return SandboxFacts.model_validate(await self._act(sandbox_id, "repause", body))

    async def snapshot(
        self, sandbox_id: str, *, generation: int, snapshot: str, freeze: str | None = None, memory: bool = True
    ) -> SnapshotFacts:
        body = NodeSnapshotCreate(generation=generation, snapshot=snapshot, freeze=freeze, memory=memory)
        return SnapshotFacts.model_validate(await self._act(sandbox_id, "snapshot", body))

    async def keep_root(self, sandbox_id: str, *, generation: int) -> None:
        await self._act(sandbox_id, "keep-root", NodeGeneration(generation=generation))

    async def snapshots(self) -> list[SnapshotFacts]:
        answer = await self._call("GET", "/v1/snapshots")
        return [SnapshotFacts.model_validate(facts) for facts in answer["snapshots"]]

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._call("DELETE", f"/v1/snapshots/{snapshot}")

    async def put_pack(self, image: str, *, size: int, sha256: str, content: AsyncIterator[bytes]) -> None:
        query = {"size": size, "sha256": sha256}
        await self._call("PUT", f"/v1/packs/{image}", query=query, content=content, timeout_s=TEMPLATE_S)

    async def delete_pack(self, image: str) -> None:
        await self._call("DELETE", f"/v1/packs/{image}")

    async def storage(self) -> NodeStorage:
        return NodeStorage.model_validate(await self._call("GET", "/v1/storage", timeout_s=MOVE_S))

    async def prune(self, *, dry_run: bool) -> builtins.list[StorageItem]:
        answer = await self._call("POST", "/v1/storage/prune", body={"dry_run": dry_run}, timeout_s=MOVE_S)
        return [StorageItem.model_validate(item) for item in answer["items"]]

    async def changes(self, after: int, *, wait_s: float = 25.0) -> Changes:
        query = {"after": after, "wait_s": wait_s}
        answer = await self._call("GET", "/v1/changes", query=query, timeout_s=wait_s + 10)
        return Changes(
            seq=int(answer["seq"]),
            changes=[SandboxFacts.model_validate(facts) for facts in answer["changes"]],
        )

    async def pool(self, after: int, *, wait_s: float = 25.0) -> PoolFacts:
        query = {"after": after, "wait_s": wait_s}
        return PoolFacts.model_validate(await self._call("GET", "/v1/pool", query=query, timeout_s=wait_s + 10))

    async def _act(self, sandbox_id: str, verb: str, body: BaseModel) -> Any:
        """A verb that moves memory or disks takes its time."""
        path = f"/v1/sandboxes/{sandbox_id}/{verb}"
        return await self._call("POST", path, body=body.model_dump(mode="json"), timeout_s=MOVE_S)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, Any] | None = None,
        content: AsyncIterator[bytes] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer = await self._http.request(method, path, json=body, content=content, params=query, timeout=timeout)
        except httpx2.TransportError as error:
            raise _unreachable(self._socket, error) from error
        return read_answer(
            answer.status_code, answer.content, away=lambda why: _unreachable(self._socket, ConnectionError(why))
        )


@dataclass(frozen=True, kw_only=True)
class Dialled:
    """The way to one sandbox's agent. The receiver owns the socket and connects it to the address."""

    socket: socket.socket
    """Not connected, non-blocking, made where the sandbox is reachable."""
    address: tuple[str, int] | str
    statement: bytes
    """What `POST /v1/identity` of the guest contract takes, signed by the node."""
    signature: bytes
    session_key: bytes


class DialClient:
    """Asks the node for sockets to sandboxes' agents, and for what of their limits is used up; for the gateway."""

    def __init__(self, dial_socket: Path | str, *, timeout_s: float = 10.0) -> None:
        self._socket = str(dial_socket)
        self._timeout_s = timeout_s

    async def dial(self, sandbox_id: str, generation: int) -> Dialled:
        return _read_answer(*await self._ask({"sandbox": sandbox_id, "generation": generation}))

    async def limits(self, sandbox_id: str, generation: int) -> LimitFacts:
        """Which limits of the sandbox are used up now."""
        packet, descriptors = await self._ask({"sandbox": sandbox_id, "generation": generation, "ask": "limits"})
        for descriptor in descriptors:
            os.close(descriptor)
        answer = json.loads(packet) if packet else {}
        if "memory_bytes" not in answer:
            raise error_from_body(answer)
        return LimitFacts.model_validate(answer)

    async def _ask(self, question: dict[str, object]) -> tuple[bytes, list[int]]:
        try:
            async with asyncio.timeout(self._timeout_s), self._connected() as connection:
                await _send_packet(connection, json.dumps(question).encode())
                return await _receive_packet(connection)
        except (OSError, TimeoutError) as error:
            raise _unreachable(self._socket, error) from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            connection.setblocking(False)
            while True:
                try:
                    connection.connect(self._socket)  # a unix connect is done at once, or the backlog is full
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
            yield connection


def _read_answer(packet: bytes, descriptors: list[int]) -> Dialled:
    try:
        answer = json.loads(packet) if packet else {}
        if "error" in answer or len(descriptors) != 1:
            raise error_from_body(answer)
        address = answer["address"]
        guest = socket.socket(fileno=descriptors.pop())
        guest.setblocking(False)
        return Dialled(
            socket=guest,
            address=address if isinstance(address, str) else (str(address[0]), int(address[1])),
            statement=base64.b64decode(answer["statement"]),
            signature=base64.b64decode(answer["signature"]),
            session_key=base64.b64decode(answer["session_key"]),
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _send_packet(connection: socket.socket, packet: bytes) -> None:
    while True:
        try:
            connection.send(packet)
            return
        except BrokenPipeError:
            return  # refused already: the answer says why
        except BlockingIOError:
            await _ready(connection, writing=True)


async def _receive_packet(connection: socket.socket) -> tuple[bytes, list[int]]:
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, DIAL_PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            return packet, descriptors
        except BlockingIOError:
            await _ready(connection, writing=False)


async def _ready(connection: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(connection)


def _unreachable(path: str, error: Exception) -> CpuosError:
    return Unavailable(
        "cannot reach the node daemon",
        f"{path}: {str(error) or type(error).__name__}",
        code="node_unavailable",
        hint="cpuos up",
    )
