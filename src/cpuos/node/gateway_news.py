"""What the gateway hears of the node: which guest process was killed for memory, so that its command ends as
`oom_killed`, and which sandboxes stand still because the volume is full, so that calls for them are refused.

Best effort: without the news a command is told as killed by a signal, which is true too, and a call waits in vain.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import structlog

__all__ = ["GatewayNews"]

_TELL_S = 2.0

log = structlog.get_logger("cpuos.node")


class GatewayNews:
    """Posts to the gateway's control socket, in the background."""

    def __init__(self, gateway_socket: Path) -> None:
        self._socket = gateway_socket
        self._telling: set[asyncio.Task[None]] = set()

    def tell_killed(self, sandbox_id: str, pids: tuple[int, ...]) -> None:
        """`pids`: the process that dies, then its ancestors; numbers of the sandbox's own."""
        if pids:
            self._tell(sandbox_id, "oom", {"pid": pids[0], "ancestors": list(pids[1:])})

    def tell_halted(self, sandbox_id: str, *, halted: bool) -> None:
        self._tell(sandbox_id, "halted", {"halted": halted})

    def _tell(self, sandbox_id: str, what: str, body: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._post(sandbox_id, what, json.dumps(body).encode()))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _post(self, sandbox_id: str, what: str, body: bytes) -> None:
        head = (
            f"POST /v1/sandboxes/{sandbox_id}/{what} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
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
                log.warning("the gateway refused the news", sandbox=sandbox_id, news=what, status=status)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as problem:
            log.warning("the gateway did not hear the news", sandbox=sandbox_id, news=what, why=str(problem))
