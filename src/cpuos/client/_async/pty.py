"""A command on a terminal: keys up, screen down, over one WebSocket."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType

from cpuos.client._async.connection import AsyncGateway
from cpuos.client._async.job import kill_command, kill_quietly
from cpuos.client._backend_async import Lock, WebSocket, shielded
from cpuos.client._http import TransportFailure, encode_query, unreachable
from cpuos.client._sink import OutputSink
from cpuos.client._start import encode_start
from cpuos.client._stream import CommandStream, Output
from cpuos.client.result import Result, raise_platform_failure
from cpuos.errors import CpuosError
from cpuos.types.frames import FrameKind, encode_frame

__all__ = ["AsyncPty", "open_pty"]

# Frames hold up to 1 MiB; keys come in small pieces, pasted text in these.
PIECE_BYTES = 1 << 16


class AsyncPty:
    """Iterate over the screen's bytes; `send` keys meanwhile. At the end of the block the command is killed."""

    def __init__(self, gateway: AsyncGateway, socket: WebSocket) -> None:
        self._gateway = gateway
        self._socket = socket
        # What came while the opening was awaited.
        self._arrived: list[Output] = []
        self._stream = CommandStream()
        self._sink = OutputSink(on_stdout=None, on_stderr=None, max_output="1MiB")
        # Guards the order of what is sent, and with it the offset.
        self._sending = Lock()
        self._sent = 0
        self._closed = False

    @property
    def id(self) -> str:
        """Id of the command."""
        return self._stream.command_id or ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def send(self, data: bytes | str) -> None:
        """Type these bytes."""
        data = data.encode() if isinstance(data, str) else data
        async with self._sending:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                await self._socket.send(encode_frame(FrameKind.STDIN, piece, offset=self._sent))
                self._sent += len(piece)

    async def resize(self, cols: int, rows: int) -> None:
        """New size of the screen."""
        await self._send_json(FrameKind.RESIZE, {"cols": cols, "rows": rows})

    async def kill(self, signal: str = "KILL") -> None:
        """Signal the command; "INT" is Ctrl-C."""
        # Not on the socket: there it would wait behind keys that the program does not read.
        await kill_command(self._gateway, self.id, signal)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            arrived, self._arrived = self._arrived, []
            for event in arrived:
                yield event.data
            if self._stream.ended is not None:
                return
            await self._receive()

    async def begin(self) -> None:
        """Wait until the command runs; raises what the other side refused."""
        while self._stream.command_id is None:
            await self._receive()

    async def _receive(self) -> None:
        try:
            message = await self._socket.receive()
        except TransportFailure as failure:
            raise self._stream.cut_error(failure.reason) from failure
        for event in self._stream.feed(message):
            self._sink.take(event)
            if isinstance(event, Output):
                self._arrived.append(event)

    async def wait(self) -> Result:
        """The result once the command ended; output not yet iterated over is passed by."""
        async for _ in self:
            pass
        assert self._stream.ended is not None
        result = self._sink.result(self._stream.ended)
        raise_platform_failure(result)
        return result

    async def close(self) -> None:
        """Leave the terminal; a command still running is killed."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._stream.ended is None:
                await kill_quietly(self._gateway, self._stream)
        finally:
            await self._socket.close()

    async def __aenter__(self) -> AsyncPty:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await shielded(self.close, timeout_s=5.0)

    async def _send_json(self, kind: FrameKind, value: dict[str, object]) -> None:
        async with self._sending:
            await self._socket.send(encode_frame(kind, json.dumps(value).encode()))


async def open_pty(
    gateway: AsyncGateway,
    command: str | Sequence[str],
    *,
    size: tuple[int, int],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    user: str | None,
    timeout: str | float | None,
) -> AsyncPty:
    """Start a command on a terminal of this size (columns, rows)."""
    import shlex

    # A text is split into words here: run by `bash -c` there would be a second shell around it.
    argv = shlex.split(command) if isinstance(command, str) else command
    body = encode_start(argv, cwd=cwd, env=env, user=user, timeout=timeout, open_stdin=True, pty=size)
    start = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
    for attempt in range(2):
        base_url, headers = await gateway.websocket_target()
        url = "ws" + base_url.removeprefix("http") + f"{gateway.root}/pty" + encode_query({"start": start})
        try:
            session = AsyncPty(gateway, await WebSocket.connect(url, headers))
        except TransportFailure as failure:
            raise unreachable("gateway_unavailable", url=base_url, reason=failure.reason, sent=False) from None
        try:
            await session.begin()
            return session
        except BaseException as error:
            await shielded(session.close, timeout_s=5.0)
            if attempt or not isinstance(error, CpuosError) or not gateway.renews(error, headers):
                raise
    raise AssertionError("the second attempt returns or raises")
