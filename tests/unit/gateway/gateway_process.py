"""A gateway as a process of its own, for tests that kill it. Run as a program it serves until it is ended."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HERE = Path(__file__).parent


def fixed_dialler(port: int):
    from gateway_rig import LocalDialler

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    return LocalDialler(address=("127.0.0.1", port), key=key, session_key=bytes(range(32)))


class GatewayProcess:
    """Starts anew on the same state as often as it is asked."""

    def __init__(self, folder: Path, agent_port: int) -> None:
        self.folder = folder
        self._agent_port = agent_port
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "gateway_process.py"),
            str(self.folder),
            str(self._agent_port),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        while not (line := (await self._process.stdout.readline()).decode()).startswith("http"):
            assert line, "the gateway did not start"
        self.url = line.strip()

    async def kill(self, signal: int = 9) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal)
            with suppress(ProcessLookupError):
                await self._process.wait()
        if self._process is not None:
            self._process._transport.close()


@asynccontextmanager
async def gateway_process(folder: Path, agent_port: int) -> AsyncIterator[GatewayProcess]:
    gateway = GatewayProcess(folder, agent_port)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.kill()


async def serve(folder: Path, agent_port: int) -> None:
    from gateway_rig import TicketMint, open_rig

    mint = TicketMint.__new__(TicketMint)
    mint.path = folder / "ticket.pub"
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stop.set)
    async with open_rig(folder, fixed_dialler(agent_port), mint=mint) as rig:
        print(rig.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
