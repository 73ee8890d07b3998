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
        self._telling: set[asyncio.Task[int]] = set()

    def tell_killed(self, sandbox_id: str, pids: tuple[int, ...]) -> None:
        """`pids`: the process that dies, then its ancestors; numbers of the sandbox's own. None where only the host
        knows which it was."""
        self._tell(sandbox_id, "oom", {"pids": list(pids)})

    def tell_halted(self, sandbox_id: str, *, halted: bool) -> None:
        self._tell(sandbox_id, "halted", {"halted": halted})

    async def suspend(self, sandbox_id: str, *, freeze: str, limit_s: float) -> str:
        """Its programs stand still, and calls for it wait; else why not."""
        status = await self._ask(sandbox_id, "suspend", {"freeze": freeze}, limit_s=limit_s)
        return "" if status == 200 else f"the gateway did not freeze it: {status or 'it did not answer'}"

    async def go_on(self, sandbox_id: str, *, generation: int, hostname: str, limit_s: float) -> None:
        body = {"generation": generation, "hostname": hostname, "wait_s": limit_s}
        await self._ask(sandbox_id, "attach", body, limit_s=limit_s + 1)

    def _tell(self, sandbox_id: str, what: str, body: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(sandbox_id, what, body))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _ask(self, sandbox_id: str, what: str, told: dict[str, Any], *, limit_s: float = _TELL_S) -> int:
        """The status of the answer; 0 when there is none."""
        body = json.dumps(told).encode()
        head = (
            f"POST /v1/sandboxes/{sandbox_id}/{what} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(head.encode() + body)
                    status = int((await reader.readuntil(b"\r\n")).split()[1])
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as problem:
            log.warning("the gateway did not hear the news", sandbox=sandbox_id, news=what, why=str(problem))
            return 0
        except (IndexError, ValueError):
            status = 0
        if status != 200:
            log.warning("the gateway refused the news", sandbox=sandbox_id, news=what, status=status)
        return status
