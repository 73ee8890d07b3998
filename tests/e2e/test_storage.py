"""`cpuos df` tells what takes room, by what it is for; `cpuos prune` removes what nobody needs and nothing else."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from typing import Any

import pytest

from cpuos import CpuosError, Sandbox, Template
from cpuos.client import Client
from cpuos.testing.instance import Instance
from cpuos.types.storage import StorageKind

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(240)]
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "128MiB"}
MIB = 1 << 20


def cpuos(instance: Instance, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "cpuos.cli", *arguments]
    done = subprocess.run(command, env=instance.environment(), capture_output=True, text=True)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def test_all_that_takes_room_is_told(instance: Instance, client: Client) -> None:
    with Sandbox.create(client=client, **SHAPE) as running, Sandbox.create(client=client, **SHAPE) as one:
        running.exec("head -c 20M /dev/urandom > kept; head -c 10M /dev/urandom > ~/held; sync kept ~/held", check=True)
        one.pause()
        snap = running.snapshot()
        try:
            storage = client.storage()
            found = {(item.kind, item.name): item for item in storage.nodes[0].items}
            disk = found[StorageKind.DISK, running.id]
            assert disk.state == "running"
            assert 20 * MIB <= disk.real_bytes < 40 * MIB
            assert disk.apparent_bytes >= 128 * MIB
            assert found[StorageKind.LAYER, running.id].real_bytes >= 10 * MIB
            assert found[StorageKind.DISK, one.id].state == "paused"
            assert found[StorageKind.PAUSED, one.id].real_bytes > MIB
            assert found[StorageKind.SNAPSHOT, snap.id].real_bytes >= 30 * MIB
            kinds = {item.kind for item in storage.nodes[0].items}
            assert {StorageKind.TEMPLATE, StorageKind.RUNTIME, StorageKind.RECORDS, StorageKind.LOGS} <= kinds
            assert all(item.needed or item.why for item in storage.nodes[0].items)
            told = json.loads(cpuos(instance, "df", "--json"))
            assert told["nodes"][0]["reflink"] in (True, False)
            text = cpuos(instance, "df", "--all")
            assert running.id in text
            assert "free" in cpuos(instance, "df")
        finally:
            snap.delete()


def test_prune_takes_what_nobody_needs(instance: Instance, client: Client) -> None:
    kept = instance.settings.node_state_dir / "template-images"
    (kept / "sha256-of-nothing.erofs").write_bytes(bytes(MIB))
    with Sandbox.create(client=client, **SHAPE) as sandbox:
        planned = [item for item in client.prune().items if item.kind is StorageKind.KEPT]
        assert "sha256-of-nothing" in {item.name for item in planned}
        assert (kept / "sha256-of-nothing.erofs").exists()
        assert "sha256-of-nothing" not in {item.name for item in client.storage().nodes[0].items if item.needed}
        plan = json.loads(cpuos(instance, "prune", "--json", code=2) or "{}")
        assert "items" not in plan  # nobody could be asked
        assert sandbox.exec("true").ok
        used: set[Any] = set(kept.iterdir())
        gone = client.call("POST", "/v1/storage/prune", content=b'{"dry_run": true}')
        assert gone.status == 200
        assert set(kept.iterdir()) == used


def test_what_steps_of_builds_have_left_is_told(instance: Instance, client: Client) -> None:
    """That it goes is tested where nothing else can: a whole prune here would take the downloads of this machine."""
    recipe: dict[str, Any] = {"run": ["head -c 20M /dev/urandom > /opt/large", "false"], "cpu": 1}
    with pytest.raises(CpuosError):
        Template.build("mine", memory="256MiB", disk="128MiB", client=client, **recipe)
    (layer,) = [item for item in client.storage().nodes[0].items if item.kind is StorageKind.BUILD_LAYER]
    assert (instance.settings.node_state_dir / "snapshots" / layer.name).is_dir()
    assert layer.real_bytes >= 20 * MIB
    assert layer.needed
    assert "build_layer" in cpuos(instance, "df")
    assert layer.name not in {item.name for item in client.prune().items}
    body = b'{"dry_run": true, "layers_unused_s": 0}'
    gone = json.loads(client.call("POST", "/v1/storage/prune", content=body).body)["items"]
    assert layer.name in {item["name"] for item in gone}


def test_prune_leaves_a_set_up_that_is_at_work_alone(fake_instance: Instance) -> None:
    """Its downloads, and the root of the template that it is about to pack. This instance has folders of its own."""
    client, settings = fake_instance.client(), fake_instance.settings
    root = settings.cache_dir / "build-devbox" / "root"
    root.mkdir(parents=True)
    (root / "file").write_bytes(bytes(MIB))

    def pruned() -> list[str]:
        return [item.name for item in client.prune(dry_run=False).items if item.kind is StorageKind.CACHE]

    with (settings.data_dir / "setup.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert pruned() == []
        assert (root / "file").exists()
        (item,) = [item for item in client.storage().nodes[0].items if item.name == "build-devbox"]
        assert (item.needed, item.state) == (True, "set-up is at work")
    assert "build-devbox" in pruned()
    assert not root.exists()
