"""A private instance: node, gateway and server as processes of their own, in temporary folders, on free ports.

    with Instance(runtime="fake") as instance:
        Sandbox.create(client=instance.client())

With `runtime="gvisor"` (needs root, and what `cpuos setup` made) its sandboxes are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from cpuos.client import AsyncClient, Client
from cpuos.services.directories import make_directories
from cpuos.services.health import ask, part_answers
from cpuos.settings import Settings, load_settings
from cpuos.testing.leftovers import find_traces, remove_groups, remove_mounts
from cpuos.testing.node import write_fake_template
from cpuos.testing.ports import TestPorts

__all__ = ["Instance"]

READY_S = 90.0
STOP_S = 15.0
# From the node up; the server comes last, since it asks the two others.
MODULES = {"node": "cpuos.node", "gateway": "cpuos.gateway", "server": "cpuos.server"}
# A daemon's umask would leave bytecode behind that other users cannot read, and would compile at every start.
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}


class Instance:
    """One instance, started by `with`; at the end its sandboxes are deleted and nothing of it is left."""

    def __init__(
        self, *, runtime: str = "fake", data_dir: Path | None = None, netns: Path | None = None, **values: Any
    ) -> None:
        """With `netns` the parts run in that network namespace; reaching their ports is the caller's affair."""
        self.folder = Path(tempfile.mkdtemp(prefix="cpuos-"))
        self.folder.chmod(0o755)  # the daemons' users pass through it
        self._ports = TestPorts()  # the same over restarts of a part
        if data_dir is None:
            data_dir = self.folder / "data" if runtime == "fake" else load_settings().data_dir
        self.settings: Settings = load_settings(
            data_dir=data_dir,
            state_dir=self.folder / "state",
            run_dir=self.folder / "run",
            runtime=runtime,
            # Without an uplink nothing is changed outside of the instance's own namespaces.
            **{
                "api_port": self._ports.take(),
                "gateway_port": self._ports.take(),
                "preview_port": self._ports.take(),
                "network_uplink": "none",
                "pool_memory_mib": 0,  # nothing is started that a test has not asked for
                "disk_overcommit": 16,  # what a test needs does not hang on what else lies on the machine's disk
                **values,
            },
        )
        self._place = ["nsenter", f"--net={netns}", "--"] if netns else []
        self.api_key = ""
        self._users = _daemons_can_be_other_users()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[Client] = []

    @property
    def state_dir(self) -> Path:
        return self.settings.state_dir

    @property
    def run_dir(self) -> Path:
        return self.settings.run_dir

    @property
    def api_url(self) -> str:
        return f"http://{self.settings.api_host}:{self.settings.api_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://{self.settings.gateway_host}:{self.settings.gateway_port}"

    # its life

    def __enter__(self) -> Self:
        try:
            self._make_folders()
            for part in MODULES:
                self.start(part)
            self.wait_ready()
            self.api_key = self._take_key()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the sandboxes, stop the parts, remove everything."""
        for client in self._clients:
            client.close()
        self._delete_sandboxes()
        for process in self._processes.values():  # nothing of it is kept, so nothing needs an orderly end
            process.kill()
            process.wait()
        self._processes.clear()
        remove_mounts(self.settings)
        remove_groups(self.settings)
        self._ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, part: str) -> None:
        """Start a part that does not run."""
        module = MODULES[part]
        if part == "node" and self.settings.runtime == "fake":
            module = "cpuos.testing.node"
        rights = _rights_of(f"cpuos-{part}") if self._users and part != "node" else []
        with (self.settings.log_dir / f"{part}.log").open("ab") as log:
            self._processes[part] = subprocess.Popen(
                [*self._place, *rights, sys.executable, "-m", module],
                cwd="/",
                env={**_ENVIRONMENT, **self.settings.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=0o077,
                start_new_session=True,
            )

    def stop(self, part: str) -> None:
        """Ask it to end; kill it when it does not."""
        process = self._processes.pop(part, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, part: str) -> None:
        """SIGKILL, and at once a new process, as the supervisor would start it."""
        process = self._processes.pop(part)
        process.kill()
        process.wait()
        self.start(part)

    def restart(self, part: str) -> None:
        self.stop(part)
        self.start(part)

    def wait_ready(self, *, timeout_s: float = READY_S) -> None:
        """Return when all parts answer and see each other."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                name = ended[0] if ended else "instance"
                how = "ended" if ended else f"is not ready after {timeout_s:g} s"
                raise RuntimeError(f"the {name} {how}\n{self.logs()}")
            time.sleep(0.03)

    # using it

    def client(self) -> Client:
        """A client of its own; closed with the instance."""
        client = Client(self.api_url, self.api_key)
        self._clients.append(client)
        return client

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.api_url, self.api_key)

    def environment(self) -> dict[str, str]:
        """Variables with which the command line and scripts use this instance."""
        own = {"CPUOS_API_URL": self.api_url, "CPUOS_API_KEY": self.api_key}
        return {**os.environ, **self.settings.environment(), **own}

    # looking into it

    def pids(self) -> dict[str, int]:
        return {part: process.pid for part, process in self._processes.items()}

    def sandbox_process(self, sandbox_id: str) -> int:
        """The host process of a sandbox, from the node's journal."""
        path = self.settings.node_state_dir / "journal" / f"{sandbox_id}.json"
        return int(json.loads(path.read_text())["process"]["pid"])

    def kill_sandbox(self, sandbox_id: str) -> None:
        """SIGKILL to its main process."""
        os.kill(self.sandbox_process(sandbox_id), signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """What is on the host of sandboxes that the node does not know as alive."""
        _, body = ask(self.settings.node_socket, "/v1/sandboxes", timeout_s=30)
        alive = {facts["id"] for facts in body["sandboxes"] if facts["alive"]}
        _, pool = ask(self.settings.node_socket, "/v1/pool", timeout_s=30)
        alive |= {ready["id"] for ready in pool["ready"]}
        return find_traces(self.settings, node_pid=self.pids()["node"], except_for=alive)

    def logs(self, *, lines: int = 40) -> str:
        """The end of each part's log."""
        texts = []
        for path in sorted(self.settings.log_dir.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            texts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(texts)

    def _make_folders(self) -> None:
        settings = self.settings
        if settings.runtime == "fake":
            for name in ("python", "base"):
                write_fake_template(settings, name)
        if self._users:
            make_directories(settings)
            return
        for folder in (settings.log_dir, settings.gateway_run_dir, settings.server_run_dir, settings.network_run_dir):
            folder.mkdir(parents=True, exist_ok=True)
        states = (settings.gateway_state_dir, settings.server_state_dir, settings.network_state_dir)
        for folder in (settings.node_state_dir, *states):
            folder.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0:  # the network workers are another user in any case
            shutil.chown(settings.network_state_dir, _network_user())

    def _is_ready(self) -> bool:
        if not all(part_answers(part, self.settings) for part in MODULES):
            return False
        _, body = ask(self.api_url, "/v1/health")
        return isinstance(body, dict) and body.get("status") == "ok"

    def _take_key(self) -> str:
        path = self.settings.first_key_file
        key = str(json.loads(path.read_text())["api_key"])
        path.unlink()
        return key

    def _delete_sandboxes(self) -> None:
        node = self._processes.get("node")
        if node is None or node.poll() is not None:
            return
        with contextlib.suppress(OSError):
            _, body = ask(self.settings.node_socket, "/v1/sandboxes", timeout_s=30)
            for facts in (body or {}).get("sandboxes", []):
                path = f"/v1/sandboxes/{facts['id']}?generation={facts['generation']}"
                ask(self.settings.node_socket, path, method="DELETE", timeout_s=60)
        if self.settings.pool_memory_mib != 0:
            self.stop("node")  # it ends what it has ready


def _network_user() -> str:
    try:
        return pwd.getpwnam("cpuos-network").pw_name
    except KeyError:
        return "nobody"


def _daemons_can_be_other_users() -> bool:
    """Root, with set-up's users, and this Python readable for them (one below /root is not)."""
    if os.geteuid() != 0:
        return False
    tried = subprocess.run(
        [*_rights_of("cpuos-server"), sys.executable, "-B", "-c", "import cpuos.errors"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return tried.returncode == 0


def _rights_of(user: str) -> list[str]:
    return ["setpriv", "--reuid", user, "--regid", "cpuos", "--clear-groups", "--no-new-privs", "--"]
