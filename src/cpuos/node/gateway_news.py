"""Tells the gateway which guest process was killed for memory, so that its command ends as `oom_killed`.

Best effort: without the news the command is told as killed by a signal, which is true too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import structlog

__all__ = ["MemoryNews"]

_TELL_S = 2.0

log = structlog.get_logger("cpuos.node")


class MemoryNews:
    """Posts to the gateway's control socket, in the background."""

    def __init__(self, gateway_socket: Path) -> None:
        self._socket = gateway_socket
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, sandbox_id: str, pids: tuple[int, ...]) -> None:
        """`pids`: the process that dies, then its ancestors; numbers of the sandbox's own."""
        if not pids:
            return
        task = asyncio.get_running_loop().create_task(self._post(sandbox_id, pids))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _post(self, sandbox_id: str, pids: tuple[int, ...]) -> None:
        body = json.dumps({"pid": pids[0], "ancestors": list(pids[1:])}).encode()
        head = (
            f"POST /v1/sandboxes/{sandbox_id}/oom HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(_TELL_S):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(head.encode() + body)
                    status = (await reader.readuntil(b"\r\n")).split()[1:2]
                finally:
                    writer.close()
            if status != [b"200"]:
                log.warning("the gateway refused the news of a kill", sandbox=sandbox_id, status=status)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as problem:
            log.warning("the gateway did not hear of a kill", sandbox=sandbox_id, why=str(problem))
