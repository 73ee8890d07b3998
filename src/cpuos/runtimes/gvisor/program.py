"""Runs runsc: nothing inherited, bounded output, bounded time."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuos.errors import PlatformError, SetupRequired

__all__ = ["Outcome", "Runsc"]

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "GOTRACEBACK": "single"}
_MAX_OUTPUT = 64 << 10
_IDLY = ("/usr/bin/nice", "--adjustment=19")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    returncode: int
    output: str


class Runsc:
    """The program at one path, working on one root folder of sandbox states."""

    def __init__(self, program: Path, *, root: Path) -> None:
        self.program = program
        self.root = root

    async def call(self, *arguments: str, timeout_s: float) -> Outcome:
        """Run a verb to its end and give what it said."""
        process = await self._start(["--root", str(self.root), *arguments], output=PIPE)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                output = await _read_bounded(process.stdout)
                return Outcome(returncode=await process.wait(), output=output.decode(errors="replace").strip())
        except TimeoutError as problem:
            raise PlatformError(f"cannot run runsc {arguments[0]}", f"no end after {timeout_s:g} s") from problem
        finally:
            await _end(process)

    async def launch(
        self,
        sandbox_id: str,
        *verb: str,
        flags: Sequence[str],
        bundle: Path,
        pid_file: Path,
        timeout_s: float,
        idly: bool = False,
    ) -> int:
        """`run -detach` or another verb that makes a sandbox: returns runsc's status when that is there.

        The sandbox keeps runsc's own standard streams, so they are /dev/null: the guest's PID 1 has no way to fill a
        file of the host. What runsc has to say is in the log that `flags` name.
        """
        arguments = [*flags, *verb, "-pid-file", str(pid_file), "-bundle", str(bundle), sandbox_id]
        process = await self._start(arguments, output=DEVNULL, before=_IDLY if idly else ())
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError as problem:
            raise PlatformError(f"cannot start sandbox {sandbox_id}", f"no end after {timeout_s:g} s") from problem
        finally:
            await _end(process)

    async def _start(
        self, arguments: Sequence[str], *, output: int, before: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *before,
                str(self.program),
                *arguments,
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT if output == PIPE else DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
            )
        except OSError as problem:
            raise SetupRequired(
                f"cannot run gVisor: {self.program}", str(problem), code="runtime_unavailable", hint="cpuos up"
            ) from problem


async def _read_bounded(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while chunk := await stream.read(65536):
        kept += chunk[: _MAX_OUTPUT - len(kept)]
    return bytes(kept)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass
        await process.wait()
