"""Keeps the parts of one instance running: starts them, starts again what dies, stops them on SIGTERM.

The parts outlive it. A supervisor that finds them running, after its own death, watches over them by pidfd as if it had
started them; so does the next one after a restart for a new version.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cpuos.errors import Unavailable
from cpuos.services.parts import PARTS, Part, spawn_part
from cpuos.services.processes import Process, find_process, kill_process, open_process
from cpuos.services.record import PartRecord, Record, read_record, write_record
from cpuos.settings import Settings, load_settings, read_endpoint

__all__ = ["Supervisor", "main"]

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
STEADY_S = 30.0
"""A part that lived this long starts again at once when it dies."""
STOP_GRACE_S = 12.0
LOG_BYTES = 32 << 20

Spawn = Callable[[Part, Settings], Process]


@dataclass
class _Watched:
    part: Part
    process: Process | None = None
    descriptor: int = -1
    since: float = 0.0
    failures: int = 0
    restarts: int = -1
    start_at: float = field(default=0.0)


class Supervisor:
    """One run of it; `spawn`, `clock` and the signal pipe are what a test replaces.

    Pauses are by a clock that nobody sets: a machine whose date goes back keeps no part waiting.
    """

    def __init__(self, settings: Settings, *, spawn: Spawn, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._spawn = spawn
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._watched = [_Watched(part) for part in PARTS]
        self._stopping = False
        self._logs_checked = -math.inf

    def run(self, stop: socket.socket) -> None:
        """Until `stop` is readable; then the parts are stopped, last started first."""
        self._selector.register(stop, selectors.EVENT_READ, None)
        self._adopt()
        while not self._stopping:
            self._start_due()
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    self._stopping = True
                else:
                    self._on_death(key.data)
            self._rotate_logs()
        self._stop_parts()
        self._selector.close()

    def _adopt(self) -> None:
        """Take over parts that run already."""
        record = read_record(self._settings)
        for watched in self._watched:
            known = record.parts.get(watched.part.name) if record else None
            if known and (descriptor := open_process(known.process)) is not None:
                watched.restarts = known.restarts
                self._watch(watched, known.process, descriptor, since=known.since)
        self._write()

    def _start_due(self) -> None:
        for watched in self._watched:
            if watched.process is None and watched.start_at <= time.monotonic():
                settings = _with_pinned_ports(self._settings, fresh=watched.failures >= 3)
                process = self._spawn(watched.part, settings)
                watched.restarts += 1
                descriptor = open_process(process)
                if descriptor is None:
                    _reap(process)
                    self._schedule(watched)
                    continue
                self._watch(watched, process, descriptor, since=self._clock())
                self._write()

    def _watch(self, watched: _Watched, process: Process, descriptor: int, *, since: float) -> None:
        watched.process, watched.descriptor, watched.since = process, descriptor, since
        self._selector.register(descriptor, selectors.EVENT_READ, watched)

    def _on_death(self, watched: _Watched) -> None:
        self._selector.unregister(watched.descriptor)
        os.close(watched.descriptor)
        status = _reap(watched.process)
        if self._clock() - watched.since >= STEADY_S:
            watched.failures = 0
        print(f"{watched.part.name} ended ({status}) after {self._clock() - watched.since:.1f} s", flush=True)
        watched.process = None
        self._schedule(watched)
        self._write()

    def _schedule(self, watched: _Watched) -> None:
        delay = min(FIRST_DELAY_S * 2**watched.failures, LONGEST_DELAY_S)
        watched.failures += 1
        watched.start_at = time.monotonic() + delay

    def _wait_s(self) -> float:
        due = [watched.start_at - time.monotonic() for watched in self._watched if watched.process is None]
        return max(min([*due, 60.0]), 0.0)

    def _stop_parts(self) -> None:
        for watched in reversed(self._watched):
            if watched.process is None:
                continue
            kill_process(watched.process, grace_s=STOP_GRACE_S)
            _reap(watched.process)
            self._selector.unregister(watched.descriptor)
            os.close(watched.descriptor)
            watched.process = None
            self._write()

    def _write(self) -> None:
        parts = {
            watched.part.name: PartRecord(
                process=watched.process, since=watched.since, restarts=max(watched.restarts, 0)
            )
            for watched in self._watched
            if watched.process is not None
        }
        supervisor = find_process(os.getpid())
        assert supervisor is not None
        settings = self._settings.environment()
        write_record(
            self._settings, Record(supervisor=supervisor, python=sys.executable, settings=settings, parts=parts)
        )

    def _rotate_logs(self) -> None:
        """Keep one older file of each log. The daemons append, so a truncated log goes on at its start."""
        if time.monotonic() - self._logs_checked < 30:
            return
        self._logs_checked = time.monotonic()
        for log in self._settings.log_dir.glob("*.log"):
            if log.stat().st_size > LOG_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)


def main() -> int:
    """`python -m cpuos.services`: the supervisor of the instance that the settings name, in the foreground."""
    settings = load_settings()
    os.umask(0o077)

    def spawn(part: Part, settings: Settings) -> Process:
        # The Popen object may go: pidfds watch its process, and waitpid takes its status.
        started, process = spawn_part(part, settings, python=Path(sys.executable))
        started.returncode = 0
        return process

    with _only_supervisor(settings), _stop_signals() as stop:
        Supervisor(settings, spawn=spawn).run(stop)
    return 0


def _with_pinned_ports(settings: Settings, *, fresh: bool) -> Settings:
    """A part that starts again listens where it did before, for clients hold its address."""
    pinned = {}
    places = (
        ("api_port", settings.server_endpoint),
        ("gateway_port", settings.gateway_endpoint),
        ("preview_port", settings.preview_endpoint),
    )
    for name, path in places:
        url = read_endpoint(path)
        port = urlsplit(url).port if url else None
        if getattr(settings, name) == 0 and port and not fresh:
            pinned[name] = port
    return settings.model_copy(update=pinned)


def _reap(process: Process | None) -> str:
    """Take the exit status of a child; an adopted part is another's child and has none for us."""
    if process is None:
        return "unknown status"
    try:
        _, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return "unknown status"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


@contextlib.contextmanager
def _only_supervisor(settings: Settings) -> Iterator[None]:
    """Guards a run directory against a second supervisor."""
    with (settings.run_dir / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"cannot supervise {settings.run_dir}", "another supervisor does already", hint="cpuos status"
            ) from None
        yield


@contextlib.contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """A socket that becomes readable on SIGTERM and SIGINT."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        yield reader
        signal.set_wakeup_fd(-1)
