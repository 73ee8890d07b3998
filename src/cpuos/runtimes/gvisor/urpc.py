"""Client of a sandbox's control socket (gVisor calls it urpc), pinned to RUNSC_VERSION.

A call is one connection: a JSON request, our end closed for writing, the JSON answer until the end. The answers asked
for here are small and capped; the one big answer (ProcfsDump) is read by the unprivileged victim worker only.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from cpuos.errors import PlatformError

__all__ = ["ControlSocket", "UrpcFailure"]

_MAX_ANSWER = 64 << 10
_TIMEOUT_S = 5.0
_THIS_PROCESS_ONLY = 0  # DeliverToProcess


class UrpcFailure(PlatformError):
    """The sentry did not answer, answered too much, or refused."""


class ControlSocket:
    """Typed calls to one sandbox. Nothing is kept between calls."""

    def __init__(self, path: Path, *, sandbox_id: str, group: str = "") -> None:
        """`group`: the name of its cgroup as seen from inside, where that is not its id."""
        self._path = path
        self._sandbox_id = sandbox_id
        self._group = group or sandbox_id

    async def set_process_limit(self, limit: int) -> None:
        """Write pids.max of the sandbox's own cgroup: it holds for the guest's root too."""
        await self._cgroup("WriteControlFiles", name="pids.max", value=str(limit))

    async def count_processes(self) -> int:
        """Tasks in the sandbox, threads counted as the limit counts them."""
        return int(await self._cgroup("ReadControlFiles", name="pids.current"))

    async def processes_full(self) -> bool:
        """Whether another task would be refused. A hostile root may have lifted its own limit: then never."""
        used, limit = await self._cgroup_texts("ReadControlFiles", [("pids.current", None), ("pids.max", None)])
        return limit.strip() != "max" and int(used) >= int(limit)

    async def kill(self, pid: int) -> None:
        """SIGKILL one guest process (its number in the sandbox's root PID namespace)."""
        await self._call(
            "containerManager.Signal",
            {"CID": self._sandbox_id, "Signo": 9, "PID": pid, "Mode": _THIS_PROCESS_ONLY},
        )

    def connect(self) -> socket.socket:
        """A connected socket, to hand to the victim worker."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Socket addresses hold 108 bytes; through the open file any path fits.
        try:
            file = os.open(self._path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                made.connect(f"/proc/self/fd/{file}")
            finally:
                os.close(file)
        except OSError as problem:
            made.close()
            raise UrpcFailure(f"cannot reach the sentry of sandbox {self._sandbox_id}", str(problem)) from problem
        return made

    async def _cgroup(self, method: str, *, name: str, value: str | None = None) -> str:
        return (await self._cgroup_texts(method, [(name, value)]))[0]

    async def _cgroup_texts(self, method: str, files: list[tuple[str, str | None]]) -> list[str]:
        """Read or write files of its pids controller, in one call."""
        arguments: list[dict[str, Any]] = []
        for name, value in files:
            argument: dict[str, Any] = {"file": {"controller": "pids", "path": f"/{self._group}", "name": name}}
            arguments.append(argument if value is None else argument | {"value": value})
        answer = await self._call(f"Cgroups.{method}", {"args": arguments})
        try:
            told = [answer["results"][number] for number in range(len(files))]
            results = [(str(one["value"]), bool(one["is_error"])) for one in told]
        except (KeyError, IndexError, TypeError) as problem:
            raise self._failure(f"Cgroups.{method}", "unexpected answer") from problem
        for text, failed in results:
            if failed:
                raise self._failure(f"Cgroups.{method}", text[:200])
        return [text for text, _ in results]

    async def _call(self, method: str, argument: Any) -> Any:
        loop = asyncio.get_running_loop()
        request = json.dumps({"method": method, "arg": argument}).encode()
        answer = bytearray()
        try:
            with self.connect() as connection:
                connection.setblocking(False)
                async with asyncio.timeout(_TIMEOUT_S):
                    await loop.sock_sendall(connection, request)
                    connection.shutdown(socket.SHUT_WR)
                    while chunk := await loop.sock_recv(connection, 65536):
                        answer += chunk
                        if len(answer) > _MAX_ANSWER:
                            raise self._failure(method, f"its answer is over {_MAX_ANSWER} bytes")
            parsed = json.loads(answer)
            if parsed["success"] is not True:
                raise self._failure(method, str(parsed.get("err", ""))[:200])
            return parsed.get("result")
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise self._failure(method, f"{type(problem).__name__}: {problem}"[:200]) from problem

    def _failure(self, method: str, why: str) -> UrpcFailure:
        return UrpcFailure(f"cannot call {method} of sandbox {self._sandbox_id}", why)
