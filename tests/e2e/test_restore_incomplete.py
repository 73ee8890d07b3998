"""What a paused sandbox was is held against what comes back: it goes on whole, or stays paused and says what lacks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import Conflict
from cpuos.runtimes.gvisor.urpc import ControlSocket
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import SandboxState

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

SMALL = {"template": "python", "memory": "256MiB", "disk": "64MiB", "cpu": 1, "timeout": "20m"}
CHANGED = "/workspace as it was: its disk was changed while it was paused"


@pytest.fixture
def box(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, **SMALL) as sandbox:
        yield sandbox


def test_what_dies_in_the_checkpoint_is_told_and_nothing_goes_on(instance: Instance, box: Sandbox) -> None:
    server = box.spawn("exec python3 -m http.server 8000 --bind 127.0.0.1")
    ticks = box.spawn("while :; do echo x >> /workspace/ticks; sleep 0.05; done")
    wait_until(lambda: box.exec("exec 3<>/dev/tcp/127.0.0.1/8000").ok)
    pid = int(box.exec("pgrep -f http.server", check=True).stdout)
    with paused_meanwhile(instance, box):
        asyncio.run(control_socket(instance, box.id).kill(pid))
    with pytest.raises(Conflict) as caught:
        box.resume()
    error = caught.value
    expected = [f"process {pid} (python3)", f"command {server.id}", "listener on 127.0.0.1:8000"]
    assert (error.code, error.details["missing"]) == ("restore_incomplete", expected), error
    assert "cpuos resume --incomplete" in error.hint
    info = box.refresh()
    assert (info.state, info.restore_incomplete) == (SandboxState.PAUSED, expected)
    assert str(pid) in info.reason
    with pytest.raises(Conflict):  # what was saved is there, and good, however often it is tried
        box.resume()
    box.resume(incomplete=True)
    info = box.refresh()
    assert (info.state, info.resumed_from, info.restore_incomplete) == (SandboxState.RUNNING, "memory", expected)
    count = int(box.exec("wc -l < /workspace/ticks", check=True).stdout)
    wait_until(lambda: int(box.exec("wc -l < /workspace/ticks", check=True).stdout) > count)
    assert ticks.refresh().status == "running"
    assert server.wait(timeout=30).signal == signal.SIGKILL
    box.pause()
    box.resume()
    assert box.refresh().restore_incomplete == []


def test_a_disk_that_was_changed_while_it_was_paused(instance: Instance, client: Client, box: Sandbox) -> None:
    box.exec("yes kept | head -c 3000000 > kept; sync", check=True)
    box.pause()
    image = instance.settings.node_state_dir / "disks" / box.id / "image"
    noted = instance.settings.node_state_dir / "snapshots" / f"pause-{box.id}" / "workspace.note"
    wait_until(noted.exists)
    times = image.stat()
    byte = flip_first(image, b"kept\n")
    os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(Conflict) as caught:
        box.resume()
    assert (caught.value.code, caught.value.details["missing"]) == ("restore_incomplete", [CHANGED])
    assert box.refresh().state is SandboxState.PAUSED
    audit = client.get_json(f"/v1/audit?sandbox={box.id}")["entries"]
    (told,) = [entry for entry in audit if entry["action"] == "sandbox.restore_incomplete"]
    assert told["detail"]["missing"] == [CHANGED]
    flip_back(image, byte)  # as somebody mends it from a backup
    moved = image.with_name("moved")
    shutil.copy(image, moved)
    moved.replace(image)
    box.resume()
    assert box.refresh().restore_incomplete == []
    assert box.exec("uniq -c kept", check=True).stdout.split() == ["600000", "kept"]


def control_socket(instance: Instance, sandbox_id: str) -> ControlSocket:
    (path,) = instance.settings.run_dir.rglob(f"runsc-{sandbox_id}.sock")
    return ControlSocket(path, sandbox_id=sandbox_id)


def flip_first(image: Path, found: bytes) -> int:
    at = image.read_bytes().index(found * 100)
    with image.open("r+b") as file:
        file.seek(at)
        file.write(b"K")
    return at


def flip_back(image: Path, at: int) -> None:
    with image.open("r+b") as file:
        file.seek(at)
        file.write(b"k")


@contextmanager
def paused_meanwhile(instance: Instance, box: Sandbox) -> Iterator[None]:
    """Its guest is frozen within the block and saved after it: its node stands still meanwhile."""
    faults: list[BaseException] = []

    def pause() -> None:
        try:
            box.pause()
        except BaseException as error:
            faults.append(error)

    node = instance.pids()["node"]
    os.kill(node, signal.SIGSTOP)
    pausing = threading.Thread(target=pause)
    try:
        pausing.start()
        (told,) = instance.settings.gateway_state_dir.rglob(f"{box.id}/sandbox.json")
        wait_until(lambda: json.loads(told.read_bytes())["suspension"])
        yield
    finally:
        os.kill(node, signal.SIGCONT)
        pausing.join()
    assert not faults, faults
