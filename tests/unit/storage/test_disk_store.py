"""Disks on this host: made, mounted as the threat model says, removed by handles, and safe to repeat."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cpuos.errors import NotFound, PlatformError
from cpuos.node.storage import DiskStore
from cpuos.node.storage.loop import loops_below

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs root and loop devices"
)
ID = "a" * 20


def mount_options(path: Path) -> set[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(path):
            return set(fields[5].split(",")) | set(fields[-1].split(","))
    return set()


@pytest.fixture
async def disks(tmp_path):
    store = DiskStore(tmp_path / "disks")
    yield store
    for sandbox_id in await store.leftovers():
        await store.remove(sandbox_id)
    assert not loops_below(tmp_path)


async def test_disk_is_made_mounted_and_removed(disks, tmp_path):
    folder = await disks.create(ID, size_mib=64)
    assert folder == disks.path(ID)
    workspace, overlay = folder / "workspace", folder / "overlay"
    assert {"nosuid", "nodev", "nosymfollow", "noatime", "errors=remount-ro"} <= mount_options(workspace)
    assert (workspace.stat().st_uid, workspace.stat().st_gid) == (1000, 1000)
    assert (overlay.stat().st_uid, overlay.stat().st_mode & 0o777) == (0, 0o700)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.listdir(workspace) == []
    assert json.loads((folder / "disk.json").read_text())["written_by"] == "host"
    before = await disks.used_bytes(ID)
    (workspace / "file").write_bytes(b"x" * (1 << 20))
    os.sync()
    assert await disks.used_bytes(ID) - before >= 1 << 20
    assert await disks.leftovers() == [ID]
    await disks.remove(ID)
    assert await disks.leftovers() == []
    assert mount_options(workspace) == set()


async def test_every_verb_may_be_repeated(disks):
    await disks.create(ID, size_mib=64)
    (disks.path(ID) / "workspace" / "kept").write_text("x")
    await disks.create(ID, size_mib=64)
    await disks.detach(ID)
    with pytest.raises(NotFound, match="not mounted"):
        await disks.used_bytes(ID)
    await disks.attach(ID)
    assert (disks.path(ID) / "workspace" / "kept").read_text() == "x"
    await disks.remove(ID)
    await disks.remove(ID)
    with pytest.raises(NotFound):
        await disks.attach(ID)
    with pytest.raises(NotFound):
        await disks.used_bytes(ID)


async def test_half_made_disk_is_made_anew(disks):
    folder = disks.path(ID)
    (folder / "overlay").mkdir(parents=True)
    (folder / "image").write_bytes(b"half")
    (folder / "overlay" / "runsc-filestore-1").write_bytes(b"stray")
    assert await disks.leftovers() == [ID]
    await disks.create(ID, size_mib=64)
    await disks.remove(ID)
    assert not folder.exists()


async def test_disk_written_by_a_guest_kernel_is_never_mounted(disks):
    await disks.create(ID, size_mib=64)
    await disks.detach(ID)
    record = disks.path(ID) / "disk.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "written_by": "guest"}))
    with pytest.raises(PlatformError, match="cannot mount the disk"):
        await disks.attach(ID)
    record.write_text("{}")
    with pytest.raises(PlatformError, match="cannot mount the disk"):
        await disks.attach(ID)


async def test_planted_links_lead_nowhere(disks, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = await disks.create(ID, size_mib=64)
    (folder / "workspace" / "link").symlink_to(outside)
    (folder / "overlay" / "link").symlink_to(outside / "precious")
    await disks.remove(ID)
    assert (outside / "precious").read_text() == "x"


async def test_parallel_disks_have_their_own_identity(disks):
    ids = [letter * 20 for letter in "bcdefg"]
    await asyncio.gather(*(disks.create(sandbox_id, size_mib=64) for sandbox_id in ids))
    uuids = {json.loads((disks.path(sandbox_id) / "disk.json").read_text())["uuid"] for sandbox_id in ids}
    assert len(uuids) == len(ids)
    assert len(loops_below(disks.path("x").parent)) == len(ids)


def test_mount_namespace_is_kept_found_again_and_given_up(tmp_path):
    """Each step is a process: a daemon that ends, and the next one that finds its mounts."""
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from cpuos.node import syscalls
        from cpuos.node.storage import enter_mount_namespace, release_mount_namespace
        step, folder = sys.argv[1], Path(sys.argv[2])
        kept = folder / "run" / "mnt"
        if step == "release":
            release_mount_namespace(kept)
            release_mount_namespace(kept)
            sys.exit()
        if step == "elsewhere":  # as a service manager starts it, which gives it mounts of its own
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
        enter_mount_namespace(kept)
        if step == "first":
            syscalls.mount("none", str(folder / "place"), kind="tmpfs")
        print(os.path.ismount(folder / "place"))
    """)
    (tmp_path / "place").mkdir()

    def run(step: str) -> str:
        command = [sys.executable, "-c", script, step, str(tmp_path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert run("first") == "True"
    assert not os.path.ismount(tmp_path / "place"), "the host does not see it"
    assert run("second") == "True"
    if os.access("/proc/1/root/", os.X_OK):  # not where the first process is out of reach, as in some containers
        assert run("elsewhere") == "True"
    run("release")
    assert not os.path.ismount(tmp_path / "run")
    assert run("third") == "False"
    run("release")


@pytest.mark.parametrize("outer", sorted(os.sched_getaffinity(0)))
@pytest.mark.parametrize("inner", sorted(os.sched_getaffinity(0)))
def test_mount_namespace_is_made_inside_another(tmp_path, outer, inner):
    """In a container, whichever processors the two are made on: some kernels number them apart."""
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from cpuos.node import syscalls
        from cpuos.node.storage import enter_mount_namespace, release_mount_namespace
        os.sched_setaffinity(0, {int(sys.argv[2])})
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
        os.sched_setaffinity(0, {int(sys.argv[3])})
        enter_mount_namespace(Path(sys.argv[1]))
        assert os.sched_getaffinity(0) == {int(sys.argv[3])}
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "run" / "mnt"), str(outer), str(inner)]
    subprocess.run(command, check=True)
