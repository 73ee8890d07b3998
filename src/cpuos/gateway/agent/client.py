"""The agent of one sandbox generation: a few kept connections, and the calls of the guest contract."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cpuos.errors import AgentFailure, Conflict, CpuosError
from cpuos.gateway.agent.answers import (
    AgentCommands,
    Continued,
    Frozen,
    GuestLimits,
    Hello,
    own_refusal,
    read_answer,
    refusal,
)
from cpuos.gateway.agent.connection import (
    AgentConnection,
    AgentTimes,
    FrameSink,
    agent_unresponsive,
    open_connection,
)
from cpuos.gateway.agent.http import AnswerHead, agent_invalid
from cpuos.gateway.agent.sockets import Dialled, Dialler, SocketStock, duplicate
from cpuos.gateway.agent.streams import ByteStream

__all__ = ["AgentClient"]

MAX_JSON = 4 << 20
MAX_IDLE = 4
SPARE = 2
"""Connections held ready, so that a command start waits for no dial."""
IDLE_LIMIT_S = 300.0
FIRST_CONNECT_LIMIT_S = 0.03
"""While a sandbox boots, a SYN into its not yet living link is lost: better a new one than TCP's retry after 1 s."""
BOOT_POLL_S = 0.01
BOOT_SOON_S = 0.5
BOOT_SLOW_POLL_S = 0.05
BOOT_QUIET_S = 0.05
"""After its first answer the agent gets ready for a first command, which takes that connection: until then no other."""
REFUSED_POLL_S = 0.002
REFUSED_LIMIT_S = 1.0
"""The link lives, its agent is not there yet: a matter of milliseconds."""
UNKNOWN_POLL_S = 0.2
NOT_THERE_YET = frozenset({"sandbox_not_found", "wrong_state", "node_unavailable"})
"""What a node says of a sandbox that it is about to make, or takes long to make; a busy one may say nothing in time."""
DELETE_QUIET_S = 0.5
DELETE_BATCH = 32


class AgentClient:
    """Opened by `identify`. Every call takes a connection of its own; a call that fails half-way closes it."""

    def __init__(self, dialler: Dialler, *, sandbox_id: str, generation: int, times: AgentTimes | None = None) -> None:
        self._sockets = SocketStock(dialler, sandbox_id=sandbox_id, generation=generation)
        self.times = times or AgentTimes()
        self._sandbox_id = sandbox_id
        self._generation = generation
        self._session = b""
        self._idle: list[tuple[AgentConnection, float]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling = False
        self._ended: list[str] = []
        self._closed = False
        self._open: weakref.WeakSet[AgentConnection] = weakref.WeakSet()
        """All connections, whoever uses them."""
        self._tunnels: set[ByteStream] = set()

    async def aclose(self) -> None:
        """End all connections, also those in use: a sandbox that died says nothing of it on them."""
        self._closed = True
        for stream in list(self._tunnels):
            stream.abort()
        for task in self._tasks:
            task.cancel()
        self._sockets.close()
        for connection in list(self._open):
            connection.cut()
        self._idle.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # identity

    async def identify(
        self,
        *,
        wait_s: float,
        starting_s: float = 0.0,
        expected: dict[str, Any] | None = None,
        incomplete: bool = False,
    ) -> Hello:
        """Make the agent ours: dial until it answers, prove who asks, and check who answers.

        A frozen one goes on by this: where not all of `expected` (what it told when it froze) is there, only if it may
        be `incomplete`, and is `restore_incomplete` else. For `starting_s` the node may still be making the sandbox;
        `wait_s` counts from when it runs.
        """
        more: dict[str, Any] = {} if expected is None else {"expected": expected, "incomplete": incomplete}
        dialled = await self._dial_when_made(starting_s)
        began = time.monotonic()
        deadline = began + wait_s
        connect_limit_s = FIRST_CONNECT_LIMIT_S
        while True:
            try:
                return await self._identify_once(dialled, connect_limit_s, more)
            except AgentFailure as error:
                if error.code != "agent_unresponsive" or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(BOOT_POLL_S if time.monotonic() - began < BOOT_SOON_S else BOOT_SLOW_POLL_S)
            connect_limit_s = min(connect_limit_s * 1.5, self.times.connect_s)
            dialled = await self._sockets.dial()

    async def _dial_when_made(self, starting_s: float) -> Dialled:
        """The node itself holds a dial back until it has made the sandbox: one that is not known yet will be soon."""
        until = time.monotonic() + starting_s
        poll_s = BOOT_POLL_S
        while True:
            try:
                return await self._sockets.dial()
            except CpuosError as error:
                if error.code not in NOT_THERE_YET or time.monotonic() >= until:
                    raise
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, UNKNOWN_POLL_S)

    async def _identify_once(self, dialled: Dialled, connect_limit_s: float, more: dict[str, Any]) -> Hello:
        connection = await self._connect_when_listening(dialled, connect_limit_s)
        try:
            body = json.dumps(
                {
                    "statement": base64.b64encode(dialled.statement).decode(),
                    "signature": base64.b64encode(dialled.signature).decode(),
                    **more,
                }
            ).encode()
            connection.request(_head("POST", "/v1/identity", b"", length=len(body)), body)
            answer = await connection.read_head(limit_s=self.times.identity_s)
            told = await connection.read_body(answer, limit=MAX_JSON)
            if answer.status != 200:
                raise own_refusal(told, what="cannot make the sandbox's agent ours", known="restore_incomplete")
            hello = read_answer(Hello, told)
            if hello.sandbox != self._sandbox_id or hello.generation != self._generation:
                raise agent_invalid("it names another sandbox or generation than was dialled")
        except BaseException:
            connection.close()
            raise
        self._session = b"Authorization: Bearer " + dialled.session_key.hex().encode() + b"\r\n"
        self._give(connection, answer)
        self._refill(after_s=BOOT_QUIET_S)
        return hello

    async def _connect_when_listening(self, dialled: Dialled, limit_s: float) -> AgentConnection:
        """A refusal comes at once: the same socket asks again, which costs the node nothing."""
        guest, until = dialled.socket, time.monotonic() + REFUSED_LIMIT_S
        while True:
            again = duplicate(guest)
            try:
                connection = await self._connect(guest, dialled.address, limit_s=limit_s)
            except AgentFailure as error:
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                if again is None or not refused or time.monotonic() >= until:
                    raise
                await asyncio.sleep(REFUSED_POLL_S)
                if not self._sockets.disconnect(again):
                    raise
                guest, again = again, None
            else:
                return connection
            finally:
                if again is not None:
                    again.close()

    # plain calls

    async def call(
        self,
        method: str,
        target: str,
        *,
        what: str,
        body: bytes = b"",
        limit: int = MAX_JSON,
        limit_s: float | None = None,
        of_itself: str | None = None,
    ) -> bytes:
        """One JSON call: the body of its 2xx answer, else the agent's refusal as our error. `of_itself`: it is about
        the sandbox and not for a client, and may be refused with this code."""
        async with self.exchange(method, target, body=body, limit_s=limit_s) as (connection, head):
            told = await connection.read_body(head, limit=limit)
        if 200 <= head.status < 300:
            return told
        raise refusal(told, what=what) if of_itself is None else own_refusal(told, what=what, known=of_itself)

    @asynccontextmanager
    async def exchange(
        self, method: str, target: str, *, body: bytes = b"", limit_s: float | None = None
    ) -> AsyncIterator[tuple[AgentConnection, AnswerHead]]:
        """Send a request and give its answer's head; the connection goes back when the body was read to its end."""
        request = _head(method, target, self._session, length=len(body) if body or method != "GET" else None)
        connection, fresh = await self._take()
        try:
            connection.request(request, body)
            try:
                head = await connection.read_head(limit_s=limit_s)
            except AgentFailure:
                if fresh or connection.answered or connection.usable:  # usable: it is slow, and may be at work
                    raise
                # A kept connection that the agent had closed meanwhile: the request was not read.
                connection.close()
                connection = await self._dial()
                connection.request(request, body)
                head = await connection.read_head(limit_s=limit_s)
            if head.upgraded:
                raise agent_invalid("it upgraded a connection unasked")
            yield connection, head
        except BaseException:
            connection.close()
            raise
        self._give(connection, head)

    @asynccontextmanager
    async def upload(self, method: str, target: str, *, length: int | None) -> AsyncIterator[AgentConnection]:
        """Send a request head; the caller sends the body (chunked where `length` is None) and reads the answer."""
        connection, _ = await self._take()
        try:
            connection.request(_head(method, target, self._session, length=length, chunked=length is None))
            yield connection
        finally:
            # Used up: whether the agent read the whole body is not worth the proof.
            connection.close()
            self._refill()

    # streams

    async def stream(
        self,
        method: str,
        target: str,
        *,
        sink: FrameSink,
        what: str,
        body: bytes = b"",
        meanwhile: Callable[[], None] | None = None,
    ) -> AgentConnection:
        """Upgrade a connection to frames for the sink; a refusal comes as our error, and nothing streams.

        `meanwhile` is called once the request is on its way.
        """
        extra = self._session + b"Connection: Upgrade\r\nUpgrade: cpuos-frames/1\r\n"
        request = _head(method, target, extra, length=len(body) if method != "GET" else None)
        connection, fresh = await self._take()
        try:
            connection.request(request, body)
            if meanwhile is not None:
                meanwhile()
            try:
                head = await connection.read_head()
            except AgentFailure:
                if fresh or connection.answered:
                    raise
                connection.close()
                connection = await self._dial()
                connection.request(request, body)
                head = await connection.read_head()
            if head.upgraded:
                connection.upgrade(sink)
                if not self._idle:  # else when the command has ended: now the sandbox has to start a program
                    self._refill()
                return connection
            told = await connection.read_body(head, limit=MAX_JSON)
        except BaseException:
            connection.close()
            raise
        self._give(connection, head)
        if head.status < 400:
            raise agent_invalid(f"it answered {head.status} where a stream was asked")
        raise refusal(told, what=what)

    async def tunnel(self, port: int) -> ByteStream:
        """A connection to a server inside that listens on its loopback; a refusal comes as our error.

        Ended with the sandbox, at the latest.
        """
        extra = self._session + b"Connection: Upgrade\r\nUpgrade: tunnel\r\n"
        request = _head("POST", f"/v1/ports/{port}/connect", extra)
        connection, fresh = await self._take()
        try:
            connection.request(request)
            try:
                head = await connection.read_head()
            except AgentFailure:
                if fresh or connection.answered:
                    raise
                connection.close()
                connection = await self._dial()
                connection.request(request)
                head = await connection.read_head()
            self._refill()
            if head.upgraded:
                return self._as_tunnel(connection)
            told = await connection.read_body(head, limit=MAX_JSON)
        except BaseException:
            connection.close()
            raise
        self._give(connection, head)
        if head.status < 400:
            raise agent_invalid(f"it answered {head.status} where a tunnel was asked")
        error = refusal(told, what=f"cannot reach port {port} of sandbox {self._sandbox_id}")
        if error.code == "port_not_open":
            error.hint = (
                f"start a server there, such as: cpuos exec {self._sandbox_id} -- python3 -m http.server {port}"
            )
        raise error

    def _as_tunnel(self, connection: AgentConnection) -> ByteStream:
        def lost() -> None:
            self._tunnels.discard(stream)
            if closed is not None:
                closed()

        closed, connection.when_closed = connection.when_closed, None
        stream = ByteStream(when_lost=lost)
        stream.unread(connection.hand_over(stream))
        self._open.discard(connection)
        self._tunnels.add(stream)
        if self._closed or stream.lost:
            stream.abort()
        return stream

    # commands that the agent need not keep

    def forget_command(self, command_id: str) -> None:
        """Tell the agent, in a quiet moment, that the end of this command is recorded."""
        self._refill()
        self._ended.append(command_id)
        if len(self._ended) == 1:
            self._spawn(self._forget_later())

    def kill_command_later(self, command_id: str) -> None:
        """For a start whose answer was lost or wrong: should it run, nobody records it, so it must not go on."""
        self._spawn(self._kill(command_id))

    async def _kill(self, command_id: str) -> None:
        body = json.dumps({"signal": 9, "reason": "its start could not be recorded"}).encode()
        with contextlib.suppress(CpuosError):
            await self.call("POST", f"/v1/commands/{command_id}/kill", what="cannot kill the command", body=body)
            self.forget_command(command_id)

    async def _forget_later(self) -> None:
        while self._ended:
            if len(self._ended) < DELETE_BATCH:
                await asyncio.sleep(DELETE_QUIET_S)
            batch, self._ended[:] = self._ended[:DELETE_BATCH], self._ended[DELETE_BATCH:]
            if not batch:
                return  # taken away while this slept
            with contextlib.suppress(CpuosError):
                await self._forget(batch)

    async def _forget(self, batch: list[str]) -> None:
        """All asked at once, so that the agent wakes once. What is not answered is asked again, one by one."""
        left = list(batch)
        connection, _ = await self._take()
        try:
            connection.request(b"".join(_head("DELETE", f"/v1/commands/{ended}", self._session) for ended in batch))
            while left:
                head = await connection.read_head()
                await connection.read_body(head, limit=MAX_JSON)
                left.pop(0)
                if not head.reusable:
                    break
            self._give(connection, head)
        except BaseException as error:
            connection.close()
            if not isinstance(error, AgentFailure):
                raise
        for ended in left:
            with contextlib.suppress(CpuosError):
                await self.call("DELETE", f"/v1/commands/{ended}", what="cannot forget the command")

    async def commands(self) -> AgentCommands:
        """What the agent still knows."""
        told = await self.call("GET", "/v1/commands", what="cannot list the commands", of_itself="")
        return read_answer(AgentCommands, told)

    async def limits(self) -> GuestLimits:
        """Those that the guest's own kernel sees used up."""
        told = await self.call("GET", "/v1/limits", what="cannot read the limits", of_itself="")
        return read_answer(GuestLimits, told)

    # standing still

    async def freeze(self, freeze: str) -> Frozen:
        """Stop all processes. An agent that cannot, or does not know how, refuses as `freeze_failed`."""
        what = f"cannot freeze sandbox {self._sandbox_id}"
        body = json.dumps({"freeze": freeze}).encode()
        try:
            told = await self.call(
                "POST", "/v1/freeze", what=what, body=body, limit_s=self.times.freeze_s, of_itself="freeze_failed"
            )
        except AgentFailure as error:
            if error.details.get("agent_code") == "not_found":
                raise Conflict(what, "its agent is of an earlier release", code="freeze_failed") from error
            raise
        return read_answer(Frozen, told)

    async def thaw(self, freeze: str) -> Continued:
        """Take a freeze back from which nothing came."""
        body = json.dumps({"freeze": freeze}).encode()
        what = f"cannot thaw sandbox {self._sandbox_id}"
        return read_answer(Continued, await self.call("POST", "/v1/thaw", what=what, body=body, of_itself=""))

    # connections

    async def _take(self) -> tuple[AgentConnection, bool]:
        while self._idle:
            connection, since = self._idle.pop()
            if connection.usable and time.monotonic() - since < IDLE_LIMIT_S:
                return connection, False
            connection.close()
        return await self._dial(), True

    def _give(self, connection: AgentConnection, head: AnswerHead) -> None:
        if self._closed or not head.reusable or not connection.usable or len(self._idle) >= MAX_IDLE:
            connection.close()
        else:
            self._idle.append((connection, time.monotonic()))

    async def _dial(self) -> AgentConnection:
        self._check_open()
        guest, address = await self._sockets.take()
        again = duplicate(guest)
        try:
            connection = await self._connect(guest, address)
        except BaseException:
            if again is not None:
                again.close()
            raise
        if again is not None:
            connection.when_closed = lambda: self._sockets.give(again, address)
        return connection

    async def _connect(
        self, guest: socket.socket, address: tuple[str, int] | str, *, limit_s: float | None = None
    ) -> AgentConnection:
        connection = await open_connection(guest, address, times=self.times, limit_s=limit_s)
        self._open.add(connection)
        if self._closed:
            connection.close()
            self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise agent_unresponsive("it stands still, or has ended")

    def _refill(self, *, after_s: float = 0.0) -> None:
        if not self._refilling and not self._closed and len(self._idle) < SPARE:
            self._refilling = True
            self._spawn(self._refill_later(after_s))

    async def _refill_later(self, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            with contextlib.suppress(CpuosError):
                while len(self._idle) < SPARE:
                    self._idle.insert(0, (await self._dial(), time.monotonic()))
        finally:
            self._refilling = False

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _head(method: str, target: str, extra: bytes, *, length: int | None = None, chunked: bool = False) -> bytes:
    lines = f"{method} {target} HTTP/1.1\r\nHost: agent\r\n".encode("ascii") + extra
    if chunked:
        lines += b"Transfer-Encoding: chunked\r\n"
    elif length is not None:
        lines += b"Content-Length: %d\r\n" % length
    return lines + b"\r\n"
