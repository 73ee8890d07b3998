"""On a volume whose copies share blocks, snapshots and forks cost what was changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from cpuos import Sandbox
from cpuos.testing.instance import Instance
from cpuos.types.storage import StorageKind
from small_volume import volume

XFS = ("mkfs.xfs", "-q", "-f", "-m", "reflink=1")
MIB = 1 << 20
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "1GiB", "timeout": "1h"}

pytestmark = [
    pytest.mark.gvisor,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="no mkfs.xfs: apt-get install xfsprogs"),
]


@pytest.fixture(scope="module")
def sharing() -> Iterator[Instance]:
    with open("/proc/filesystems") as file:
        if "xfs" not in file.read() and subprocess.run(["modprobe", "xfs"]).returncode:
            pytest.skip("this kernel has no XFS")
    sharing = Instance(runtime="gvisor", max_sandboxes=4, disk_reserve_mib=64, disk_overcommit=1)
    with volume(sharing.folder / "volume.img", sharing.state_dir, mib=8192, mkfs=XFS), sharing:
        yield sharing


def used(instance: Instance) -> int:
    os.sync()
    status = os.statvfs(instance.state_dir)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_ten_snapshots_cost_what_was_changed(sharing: Instance) -> None:
    client = sharing.client()
    with Sandbox.create(client=client, **SHAPE) as sandbox:
        before = used(sharing)
        sandbox.exec("head -c 900M /dev/urandom > data; sync data", check=True, timeout="200s")
        snaps = []
        for number in range(10):
            at = 60 * number
            change = f"dd if=/dev/urandom of=data bs=1M count=10 seek={at} conv=notrunc status=none; sync data"
            sandbox.exec(f"{change}; echo {number} > number", check=True, timeout="60s")
            snaps.append(sandbox.snapshot(memory=False))
        taken = used(sharing) - before
        print(
            f"ten snapshots of a 1 GiB disk with 10 MiB changed each: {taken / (1 << 30):.2f} GiB with the disk itself"
        )
        assert taken < 1536 * MIB
        storage = client.storage().nodes[0]
        assert storage.reflink
        items = [item for item in storage.items if item.kind is StorageKind.SNAPSHOT]
        assert len(items) == 10
        assert all(item.shared_bytes > 800 * MIB for item in items)
        with Sandbox.create(client=client, snapshot=snaps[3]) as third:
            assert third.exec("cat number", check=True).stdout == "3\n"
            third.exec("echo own > number", check=True)
        assert sandbox.exec("cat number", check=True).stdout == "9\n"
        for snap in snaps:
            snap.delete()
