"""`up` and `down` of one instance."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cpuos.errors import SetupRequired, Unavailable
from cpuos.key_file import calling_user
from cpuos.services.credentials import credentials_path, hand_over_key, read_credentials
from cpuos.services.directories import make_directories
from cpuos.services.groups import kill_sandbox_processes, running_sandboxes
from cpuos.services.health import ask, part_answers
from cpuos.services.ownership import claim_run_dir, require_free_ports, require_own_run_dir
from cpuos.services.parts import PARTS
from cpuos.services.processes import find_process, kill_process
from cpuos.services.record import Record, read_record, record_path
from cpuos.services.supervisor import STOP_GRACE_S
from cpuos.settings import DEFAULT_RUN_DIR, Settings, load_settings, read_endpoint
from cpuos.setup.engine import set_up
from cpuos.setup.progress import Progress, QuietProgress
from cpuos.setup.source import LINK, environment_path, link_command
from cpuos.setup.steps import all_steps
from cpuos.setup.volume import mount_first

__all__ = ["Instance", "Stopped", "down", "pause_sandboxes", "up"]

READY_S = 60.0
SUPERVISOR_S = 20.0
PAUSE_S = 300.0
_QUIET = QuietProgress()


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A running instance."""

    api_url: str
    gateway_url: str
    credentials: Path
    """File with the URL and the API key of the user who asked."""
    started: bool
    """False when it was running already."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """What `down` found; true when there was anything to end."""

    was_running: bool
    sandboxes: int = 0
    """How many were ended; of an instance that was stopped, those that it had left running."""
    paused: int = 0
    left: dict[str, str] = field(default_factory=dict)
    """Those that were to be paused and could not: they run on. Id to reason."""

    def __bool__(self) -> bool:
        return self.was_running or self.sandboxes > 0


def up(
    settings: Settings | None = None,
    *,
    progress: Progress = _QUIET,
    uid: int | None = None,
    prepare: bool = True,
    ready_s: float = READY_S,
) -> Instance:
    """Start the instance and return when all its parts answer; finish set-up first unless `prepare` is off.

    Idempotent. Parts that run other code or settings than this call's are started anew; sandboxes run on.
    """
    given, settings = settings, settings or load_settings()
    _require_root("start cpuOS", "sudo cpuos up")
    if mount_first(settings) and given is None:
        settings = load_settings()  # of the volume that is there now
    require_own_run_dir(settings, verb="up")
    environment = environment_path(settings)
    if prepare:
        set_up(settings, all_steps(), progress=progress, hint="cpuos up", environment=environment)
    if settings.run_dir == DEFAULT_RUN_DIR and (other := link_command(settings)):
        progress.line(f"kept {LINK}, the command of another installation, {other}")
    python = environment / "bin" / "python"
    if not python.exists():
        raise SetupRequired("cannot start cpuOS: it is not set up", f"there is no {python}", hint="cpuos setup")
    make_directories(settings)
    claim_run_dir(settings)
    with _one_at_a_time(settings):
        record = read_record(settings)
        if record and record.is_supervised and _is_of(record, settings, python):
            started = False
        elif record is None and all(part_answers(part.name, settings) for part in PARTS):
            started = False  # by systemd
        else:
            if record and not _is_of(record, settings, python):
                _stop(record)
            if not any(part_answers(part.name, settings) for part in PARTS):
                require_free_ports(settings)
            _start(settings, python)
            started = True
        try:
            with progress.waiting("waiting for node, server and gateway") if started else contextlib.nullcontext():
                _wait_until_ready(settings, ready_s=ready_s)
        except Unavailable:
            if started and (record := read_record(settings)):
                _stop(record)  # rather nothing than parts that start over and over
            raise
        api_url, gateway_url = _publish_endpoints(settings)
        user = calling_user() if uid is None else uid
        path = hand_over_key(settings, python=python, api_url=api_url, uid=user, tell=progress.line)
    return Instance(api_url=api_url, gateway_url=gateway_url, credentials=path, started=started)


def down(
    settings: Settings | None = None,
    *,
    keep_sandboxes: bool = False,
    pause: bool = False,
    pause_s: float = PAUSE_S,
    uid: int | None = None,
) -> Stopped:
    """Stop the instance, its sandboxes first unless they are to be kept, running or paused. Those that cannot be paused
    in `pause_s` are kept running."""
    settings = settings or load_settings()
    _require_root("stop cpuOS", "sudo cpuos down")
    if not settings.run_dir.is_dir():
        return Stopped(was_running=False)
    require_own_run_dir(settings, verb="down")
    with _one_at_a_time(settings):
        record = read_record(settings)
        paused, left = pause_sandboxes(settings, limit_s=pause_s) if pause else ([], {})
        keep_sandboxes = keep_sandboxes or bool(left) or (pause and not part_answers("node", settings))
        running = set() if keep_sandboxes or pause else _asked_for(settings)
        if not keep_sandboxes and not pause:
            _end_sandboxes(settings, uid=calling_user() if uid is None else uid)
        if record is not None:
            _stop(record)
        if not keep_sandboxes:
            kill_sandbox_processes(settings)  # none is left, unless the node was dead; or those nobody has taken yet
            _leave_host_network(settings)
        published = (settings.server_endpoint, settings.gateway_endpoint, settings.preview_endpoint)
        for path in (record_path(settings), settings.endpoints, *published):
            path.unlink(missing_ok=True)
        for path in (settings.node_socket, settings.dial_socket, settings.gateway_socket):
            path.unlink(missing_ok=True)
    return Stopped(was_running=record is not None, sandboxes=len(running), paused=len(paused), left=left)


def pause_sandboxes(settings: Settings, *, limit_s: float = PAUSE_S) -> tuple[list[str], dict[str, str]]:
    """Have the node pause all that run; ids of those that are, and reasons of those that are not."""
    query = f"/v1/drain?limit_s={limit_s:g}"
    status, body = ask(settings.node_socket, query, method="POST", timeout_s=limit_s + 30)
    if status == 0 and not part_answers("node", settings):
        return [], {}  # it does not run: neither does anything that could be paused now
    if status != 200:
        raise Unavailable("cannot pause the sandboxes", f"the node answered {status or 'nothing'}", hint="cpuos status")
    return body["paused"], body["left"]


def _asked_for(settings: Settings) -> set[str]:
    """Those that run for somebody: not those that the node has ready, as far as it answers."""
    status, body = ask(settings.node_socket, "/v1/sandboxes", timeout_s=10)
    if status != 200:
        return running_sandboxes(settings)
    return {facts["id"] for facts in body["sandboxes"] if facts["alive"] and not facts["paused"]}


def _leave_host_network(settings: Settings) -> None:
    """Without sandboxes nothing of theirs stays on the host; the next start joins it again."""
    from cpuos.node.network.hub import remove_host_network

    remove_host_network(settings.instance_id)


def _end_sandboxes(settings: Settings, *, uid: int) -> None:
    """Kill through the server, so that its records say who ended them; what is left then, at the node."""
    url = read_endpoint(settings.server_endpoint)
    key = read_credentials(credentials_path(settings, uid=uid)).get("api_key", "")
    if url and key:
        _, body = ask(url, "/v1/sandboxes?state=running", key=key, timeout_s=10)
        for sandbox in (body or {}).get("sandboxes", []) if isinstance(body, dict) else []:
            ask(url, f"/v1/sandboxes/{sandbox['id']}", method="DELETE", key=key, timeout_s=60)
    _, body = ask(settings.node_socket, "/v1/sandboxes", timeout_s=10)
    for facts in (body or {}).get("sandboxes", []) if isinstance(body, dict) else []:
        path = f"/v1/sandboxes/{facts['id']}?generation={facts['generation']}"
        ask(settings.node_socket, path, method="DELETE", timeout_s=60)


def _start(settings: Settings, python: Path) -> None:
    record = read_record(settings)
    for name, path in (("server", settings.server_endpoint), ("gateway", settings.gateway_endpoint)):
        known = record.parts.get(name) if record else None
        if known is None or find_process(known.process.pid) != known.process:
            path.unlink(missing_ok=True)  # of an earlier life; one that lives on is adopted and will not publish again
    log = settings.log_dir / "supervisor.log"
    with log.open("ab") as output:
        # --fork: the supervisor becomes init's child, so neither a caller's end nor its signals reach it.
        subprocess.run(
            ["setsid", "--fork", str(python), "-m", "cpuos.services"],
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8", **settings.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
        )
    deadline = time.monotonic() + SUPERVISOR_S
    while not ((record := read_record(settings)) and record.is_supervised):
        if time.monotonic() >= deadline:
            raise _not_ready(settings, "supervisor", how=f"did not begin in {SUPERVISOR_S:.0f} s")
        time.sleep(0.02)


def _stop(record: Record) -> None:
    """The supervisor stops its parts; one that is dead already has left them to us."""
    kill_process(record.supervisor, grace_s=3 * STOP_GRACE_S)
    for part in reversed(PARTS):
        if known := record.parts.get(part.name):
            kill_process(known.process, grace_s=STOP_GRACE_S)


def _is_of(record: Record, settings: Settings, python: Path) -> bool:
    return record.python == str(python) and record.settings == settings.environment()


def _wait_until_ready(settings: Settings, *, ready_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    deadline = clock() + ready_s
    waiting = [part.name for part in PARTS]
    while waiting:
        waiting = [name for name in waiting if not part_answers(name, settings)]
        if not waiting:
            return
        record = read_record(settings)
        restarts = {name: part.restarts for name, part in record.parts.items()} if record else {}
        crashing = [name for name in waiting if restarts.get(name, 0) >= 4]
        if crashing or clock() >= deadline:
            name = (crashing or waiting)[0]
            raise _not_ready(settings, name, how="keeps ending" if crashing else f"did not answer in {ready_s:.0f} s")
        time.sleep(0.05)


def _not_ready(settings: Settings, name: str, *, how: str) -> Unavailable:
    log = settings.log_dir / f"{name}.log"
    try:
        last = log.read_text(errors="replace").splitlines()[-8:]
    except OSError:
        last = []
    lines = "\n".join(f"  {line[:300]}" for line in last)
    return Unavailable(f"cannot start cpuOS: the {name} {how}", f"the end of {log}:\n{lines}", hint=f"tail -n 50 {log}")


def _publish_endpoints(settings: Settings) -> tuple[str, str]:
    urls = [read_endpoint(path) or "" for path in (settings.server_endpoint, settings.gateway_endpoint)]
    partial = settings.endpoints.with_name(f".endpoints.{os.getpid()}")
    partial.write_text(json.dumps({"api_url": urls[0], "gateway_url": urls[1]}) + "\n")
    partial.chmod(0o644)
    partial.replace(settings.endpoints)
    return urls[0], urls[1]


def _require_root(verb: str, hint: str) -> None:
    if os.geteuid() != 0:
        raise SetupRequired(
            f"cannot {verb}: not root", "the node daemon makes namespaces and mounts", code="needs_root", hint=hint
        )


@contextlib.contextmanager
def _one_at_a_time(settings: Settings) -> Iterator[None]:
    """Guards the run directory: `up` and `down` of one instance wait for each other."""
    with (settings.run_dir / "control.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
