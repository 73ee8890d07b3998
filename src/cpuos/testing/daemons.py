"""Fake node daemons as real processes that start in milliseconds: forked from one that has everything imported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Self

from cpuos.errors import CpuosError
from cpuos.node.client import LocalNodeClient
from cpuos.settings import Settings
from cpuos.testing import node
from cpuos.testing.node import plan_fault

__all__ = ["Daemon", "DaemonForker", "NodeDaemon", "main"]


class NodeDaemon:
    """One daemon of `python -m cpuos.testing.node`."""

    def __init__(self, pid: int, *, log: Path, forker: DaemonForker) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._log = log
        self._forker = forker

    def poll(self) -> int | None:
        return self._wait("poll")

    def wait(self) -> int | None:
        return self._wait("wait")

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def log(self) -> list[dict[str, Any]]:
        """Its log entries so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def _wait(self, verb: str) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.ask({verb: self.pid})["status"]
        return self.returncode


class Daemon:
    """A daemon with a client of it; stopped in the end when it has not ended before."""

    def __init__(self, process: NodeDaemon, settings: Settings) -> None:
        self.process = process
        self.client = LocalNodeClient(settings.node_socket)

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + 60
        while True:
            try:
                await self.client.list()
                return self
            except CpuosError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()
        self.process.terminate()
        await asyncio.to_thread(self.process.wait)


class DaemonForker:
    """The process that forks daemons; end it with `with`."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cpuos.testing.daemons"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._count = 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()

    def start(self, settings: Settings, *, kill_at: str = "") -> NodeDaemon:
        """A daemon; with `kill_at` it kills itself with SIGKILL at that checkpoint."""
        self._count += 1
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        log = settings.log_dir / f"node-{self._count}.log"
        if kill_at:
            plan_fault(settings, kill_at, kill=True)
        pid = self.ask({"fork": settings.environment(), "log": str(log)})["pid"]
        return NodeDaemon(pid, log=log, forker=self)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        if "fork" in question:
            answer = {"pid": _fork(question["fork"], log=question["log"])}
        elif "wait" in question:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])}
        else:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        print(json.dumps(answer), flush=True)


def _fork(environment: dict[str, str], *, log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.environ.update(environment)
        null = os.open(os.devnull, os.O_RDWR)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, number)
        node.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
