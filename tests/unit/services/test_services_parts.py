"""The supervisor and what it stands on, with real processes that do nothing."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuos.errors import SetupRequired
from cpuos.services import status
from cpuos.services.credentials import credentials_path, read_credentials, write_credentials
from cpuos.services.health import ask, part_answers
from cpuos.services.parts import PARTS, Part, limit_memory
from cpuos.services.processes import Process, find_process, kill_process, open_process, wait_for_end
from cpuos.services.record import read_record, record_path
from cpuos.services.supervisor import Supervisor
from cpuos.settings import Settings, load_settings, publish_endpoint


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = load_settings(
        data_dir=tmp_path / "data",
        state_dir=tmp_path / "state",
        run_dir=tmp_path / "run",
        api_port=0,
        gateway_port=0,
        preview_port=0,
    )
    for folder in (made.log_dir, made.server_run_dir, made.gateway_run_dir):
        folder.mkdir(parents=True)
    return made


def until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class Rig:
    """A supervisor in a thread, whose parts are `sleep`."""

    def __init__(
        self,
        settings: Settings,
        argv: tuple[str, ...] = ("sleep", "1000"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.argv = argv
        self.spawned: list[tuple[str, Settings]] = []
        self.spawned_at: list[float] = []
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        Supervisor(self.settings, spawn=self._spawn, clock=self.clock).run(self._stopped)

    def _spawn(self, part: Part, settings: Settings) -> Process:
        self.spawned_at.append(time.monotonic())
        self.spawned.append((part.name, settings))
        child = subprocess.Popen(self.argv, start_new_session=True)
        child.returncode = 0  # the supervisor reaps it
        return find_process(child.pid) or Process(pid=child.pid, started=0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.send(b"x")
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._stop.close()
        self._stopped.close()

    def pids(self) -> dict[str, int]:
        record = read_record(self.settings)
        return {name: part.process.pid for name, part in record.parts.items()} if record else {}


@pytest.fixture
def rig(settings: Settings) -> Iterator[Rig]:
    made = Rig(settings)
    made.start()
    until(lambda: len(made.pids()) == 3, "three parts")
    yield made
    if made._thread.is_alive():
        made.stop()


def test_parts_start_in_order_and_stop_with_it(rig: Rig) -> None:
    assert [name for name, _ in rig.spawned] == ["node", "server", "gateway"]
    pids = rig.pids()
    rig.stop()
    assert all(find_process(pid) is None for pid in pids.values())
    assert rig.pids() == {}


def test_a_part_that_dies_is_started_again(rig: Rig) -> None:
    before = rig.pids()
    os.kill(before["server"], signal.SIGKILL)
    until(lambda: rig.pids().get("server", before["server"]) != before["server"], "a new server")
    after = rig.pids()
    assert (after["node"], after["gateway"]) == (before["node"], before["gateway"])
    record = read_record(rig.settings)
    assert record is not None
    assert record.parts["server"].restarts == 1


def test_it_listens_again_where_it_did(rig: Rig) -> None:
    publish_endpoint(rig.settings.server_endpoint, "http://127.0.0.1:4321")
    before = rig.pids()
    os.kill(before["server"], signal.SIGKILL)
    until(lambda: len(rig.spawned) == 4, "a new server")
    assert rig.spawned[0][1].api_port == 0
    assert rig.spawned[3][1].api_port == 4321


def test_a_part_that_always_dies_is_started_more_and_more_slowly(settings: Settings) -> None:
    rig = Rig(settings, argv=("false",))
    rig.start()
    until(lambda: [name for name, _ in rig.spawned].count("server") == 4, "four servers")
    rig.stop()
    starts = [at for at, (name, _) in zip(rig.spawned_at, rig.spawned, strict=True) if name == "server"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(pause >= 0.9 * least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=False))


def test_a_date_that_goes_back_keeps_no_part_waiting(settings: Settings) -> None:
    rig = Rig(settings, argv=("false",), clock=itertools.count(1e9, -3600).__next__)
    rig.start()
    until(lambda: [name for name, _ in rig.spawned].count("server") == 3, "three servers")
    rig.stop()


def test_the_next_supervisor_takes_over_what_runs(
    rig: Rig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = rig.pids()
    # The first one dies without stopping its parts.
    monkeypatch.setattr(Supervisor, "_stop_parts", lambda self: None)
    rig.stop()
    monkeypatch.undo()
    second = Rig(settings)
    second.start()
    time.sleep(0.1)
    assert second.pids() == pids
    assert second.spawned == []
    os.kill(pids["node"], signal.SIGKILL)
    until(lambda: [name for name, _ in second.spawned] == ["node"], "a new node")
    second.stop()
    assert all(find_process(pid) is None for pid in pids.values())


def test_a_pid_of_another_is_never_hit() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        process = find_process(child.pid)
        assert process is not None
        stale = Process(pid=child.pid, started=process.started - 1)
        assert open_process(stale) is None
        kill_process(stale, grace_s=1)
        assert child.poll() is None
        descriptor = open_process(process)
        assert descriptor is not None
        assert not wait_for_end(descriptor, 0)
        os.close(descriptor)
        threading.Timer(0.05, child.wait).start()
        kill_process(process, grace_s=5)
    assert find_process(process.pid) is None


def test_what_ignores_sigterm_is_killed() -> None:
    ready = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", ready], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = find_process(child.pid)
        assert process is not None
        kill_process(process, grace_s=0.2)
        assert child.wait(30) == -signal.SIGKILL


def test_a_record_that_cannot_be_read_is_none(settings: Settings) -> None:
    assert read_record(settings) is None
    for text in ("", "{}", "[]", '{"parts": {"node": 3}}', '{"parts": {}, "supervisor": {"pid": 1}}'):
        record_path(settings).write_text(text)
        assert read_record(settings) is None


def test_status_of_nothing(settings: Settings) -> None:
    found = status(settings)
    assert found.state == "stopped"
    assert [part.name for part in found.parts] == [part.name for part in PARTS]
    assert not found.supervised


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "key": self.headers["Authorization"]}).encode()
        self.send_response(200 if "health" in self.path or "node" in self.path else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *arguments: object) -> None: ...


class _UnixServer(http.server.HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


@pytest.fixture
def answering(settings: Settings) -> Iterator[None]:
    servers = [http.server.HTTPServer(("127.0.0.1", 0), _Answer), _UnixServer(str(settings.node_socket), _Answer)]  # type: ignore[arg-type]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    publish_endpoint(settings.server_endpoint, f"http://127.0.0.1:{servers[0].server_port}")
    yield
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_health_over_port_and_socket(settings: Settings, answering: None) -> None:
    assert [part_answers(name, settings) for name in ("node", "server", "gateway")] == [True, True, False]
    status_code, body = ask(settings.node_socket, "/else", key="k")
    assert (status_code, body) == (404, {"path": "/else", "key": "Bearer k"})
    assert ask("http://127.0.0.1:1", "/") == (0, None)
    found = status(settings)
    assert found.state == "partial"


def test_credentials_are_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / ".config" / "cpuos" / "credentials.json"
    write_credentials(path, {"api_url": "u", "api_key": "k"}, uid=os.geteuid())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert read_credentials(path) == {"api_url": "u", "api_key": "k"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    path.unlink()
    path.symlink_to(elsewhere)
    write_credentials(path, {"api_key": "new"}, uid=os.geteuid())
    assert elsewhere.read_text() == "precious"
    assert not path.is_symlink()
    assert read_credentials(tmp_path / "none") == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act for another user")
def test_root_writes_as_the_user(tmp_path: Path) -> None:
    with pytest.raises(SetupRequired, match="nobody may not"):
        write_credentials(tmp_path / "cpuos" / "credentials.json", {}, uid=65534)
    assert not (tmp_path / "cpuos").exists()


def test_only_this_machines_instance_writes_into_the_home(settings: Settings) -> None:
    assert credentials_path(settings, uid=os.getuid()) == settings.run_dir / "credentials.json"
    assert credentials_path(load_settings(), uid=os.getuid()) == Path.home() / ".config/cpuos/credentials.json"


@pytest.mark.parametrize("version", [1, 2])
def test_parts_are_limited_in_memory(tmp_path: Path, version: int) -> None:
    (tmp_path / "memory").mkdir() if version == 1 else (tmp_path / "cgroup.subtree_control").write_text("")
    limit_memory(PARTS[1], Process(pid=4711, started=1), instance_id="abcdef", root=tmp_path)
    group = tmp_path / ("memory" if version == 1 else ".") / "cpuos-abcdef-parts" / "server"
    name = "memory.limit_in_bytes" if version == 1 else "memory.max"
    assert (group / name).read_text() == str(1 << 30)
    assert (group / "cgroup.procs").read_text() == "4711"


def test_a_user_without_rights_asks_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Health(_Answer):
        def do_GET(self) -> None:
            parts = {"node": {"status": "ok"}, "gateway": {"status": "down"}}
            body = json.dumps({"status": "degraded", "parts": parts}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    settings = load_settings(run_dir=tmp_path / "run", state_dir=tmp_path / "state", api_port=server.server_port)
    settings.run_dir.mkdir(mode=0o700)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = status(settings)
    assert [part.state for part in found.parts] == ["ready", "ready", "unknown"]
    assert found.state == "partial"
    server.shutdown()
    thread.join()
    server.server_close()
