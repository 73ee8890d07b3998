"""The volume of disks and images has no room: what needs some is refused before it begins, sandboxes keep what they
were promised, and no disk sees an error."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cpuos import Client, Sandbox, Snapshot
from cpuos.errors import CapacityExceeded, LimitReached, Unavailable
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from small_volume import disks_see_no_error, volume

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(400)]
DISK_MIB = 128
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": f"{DISK_MIB}MiB", "timeout": "1h"}


@pytest.fixture(scope="module")
def small() -> Iterator[Instance]:
    small = Instance(runtime="gvisor", max_sandboxes=6, disk_reserve_mib=64, disk_overcommit=1)
    with volume(small.folder / "volume.img", small.state_dir, templates=["base"]), small:
        yield small


@pytest.fixture(scope="module")
def own(small: Instance) -> Client:
    return small.client()


@contextmanager
def filled(small: Instance, *, leave_mib: int) -> Iterator[None]:
    """Something else takes all but so much of the volume."""
    filler = small.state_dir / "filler"
    status = os.statvfs(small.state_dir)
    size, left, piece = 0, status.f_bavail * status.f_frsize - (leave_mib << 20), 64 << 20
    with filler.open("wb") as file:
        while left - size >= piece >= 4096:  # blocks that say where others are take some too
            try:
                os.posix_fallocate(file.fileno(), size, piece)
                size += piece
            except OSError:
                piece //= 2
            piece = min(piece, max(4096, left - size))
    try:
        yield
    finally:
        filler.unlink()
        own = small.client()  # the server has asked the node anew
        wait_until(lambda: not own.get_json("/v1/nodes")["nodes"][0]["volume"]["full"])
        wait_until(lambda: own.get_json("/v1/capacity")["disk_mib"]["total"] > 3 * DISK_MIB)


@pytest.fixture(name="disks_see_no_error")
def _disks_see_no_error(small: Instance) -> Iterator[None]:
    with disks_see_no_error(small):
        yield


def fill_root(sandbox: Sandbox) -> None:
    """So that its image is large."""
    sandbox.exec("head -c 50M /dev/urandom > ~/held; head -c 20M /dev/urandom > kept; sync kept", check=True)


def sums(sandbox: Sandbox) -> str:
    return sandbox.exec("cat kept ~/held | sha256sum", check=True, timeout="120s").stdout


def images(small: Instance) -> list[str]:
    return sorted(os.listdir(small.settings.node_state_dir / "snapshots"))


@pytest.mark.usefixtures("disks_see_no_error")
def test_saving_is_refused_and_others_have_what_was_promised(small: Instance, own: Client) -> None:
    with Sandbox.create(client=own, **SHAPE) as saved, Sandbox.create(client=own, **SHAPE) as other:
        fill_root(saved)
        before, capacity = sums(saved), own.get_json("/v1/capacity")
        # Room for what is to be saved, but that is promised to the disks.
        with filled(small, leave_mib=2 * DISK_MIB + 20):
            for verb in (saved.pause, saved.snapshot, lambda: saved.fork(1)):
                with pytest.raises(CapacityExceeded) as refused:
                    verb()
                assert "room" in str(refused.value)
                assert saved.refresh().state == "running"
                assert sums(saved) == before
                assert images(small) == []
            wait_until(lambda: own.get_json("/v1/capacity")["disk_mib"]["total"] < 3 * DISK_MIB)
            with pytest.raises(CapacityExceeded):
                Sandbox.create(client=own, **SHAPE)
            wrote = other.exec("head -c 100M /dev/urandom > big && sync big && sha256sum < big", timeout="200s")
            assert wrote.ok, wrote
            assert other.exec("sha256sum < big", timeout="120s").stdout == wrote.stdout
        assert [snap.state for snap in Snapshot.list(client=own) if snap.state != "failed"] == []
        assert own.get_json("/v1/capacity")["disk_mib"]["reserved"] == capacity["disk_mib"]["reserved"]
        saved.pause()
        assert sums(saved) == before


@pytest.mark.usefixtures("disks_see_no_error")
def test_one_that_is_paused_stays_so(small: Instance, own: Client) -> None:
    with Sandbox.create(client=own, **SHAPE) as sandbox:
        job = sandbox.spawn("sleep 1000")
        fill_root(sandbox)
        before = sums(sandbox)
        sandbox.pause()
        held = images(small)
        with filled(small, leave_mib=40):
            for verb in (sandbox.snapshot, sandbox.resume):
                with pytest.raises(CapacityExceeded):
                    verb()
                assert sandbox.refresh().state == "paused"
                assert images(small) == held
        sandbox.resume()
        with filled(small, leave_mib=40):
            assert sandbox.exec("echo small > note && sync note").ok
            with pytest.raises(CapacityExceeded):
                sandbox.pause()
            assert sandbox.refresh().state == "running"
            assert sums(sandbox) == before
        sandbox.pause()
        assert sums(sandbox) == before
        assert job.refresh().status == "running"


@pytest.mark.slow
def test_no_room_at_all_is_said_and_nothing_changes(small: Instance, own: Client) -> None:
    """Something else has taken even what was promised. Sparse disks may see errors in the first moment (see
    test_volume_filled.py for held ones)."""
    with Sandbox.create(client=own, **SHAPE) as sandbox:
        fill_root(sandbox)
        before = sums(sandbox)
        with filled(small, leave_mib=0):
            wait_until(lambda: own.get_json("/v1/nodes")["nodes"][0]["volume"]["full"])
            for verb in (lambda: sandbox.exec("true"), lambda: sandbox.files.write("f", b"f"), sandbox.pause):
                with pytest.raises(Unavailable) as refused:
                    verb()
                assert re.search("no space left|disk is full|volume is full", refused.value.why)
            assert sandbox.refresh().state == "running"
        sandbox.pause()
        assert sums(sandbox) == before
        assert sandbox.exec("ls -A").stdout == "kept\n"


@pytest.mark.usefixtures("disks_see_no_error")
def test_an_upload_that_the_disk_has_no_room_for(small: Instance, own: Client) -> None:
    data = random.Random(1).randbytes((DISK_MIB + 20) << 20)
    with Sandbox.create(client=own, **SHAPE) as sandbox:
        used = sandbox.exec("df --output=used /workspace | tail -1", check=True).stdout
        with pytest.raises(LimitReached) as refused:
            sandbox.files.write("big", data)
        assert refused.value.code == "disk_full"
        assert sandbox.exec("ls -A").stdout == ""
        assert sandbox.exec("df --output=used /workspace | tail -1", check=True).stdout == used
        fits = data[: 60 << 20]
        sandbox.files.write("fits", fits)
        sandbox.pause()
        told = sandbox.exec("sha256sum < fits", check=True).stdout.split()[0]
        assert told == hashlib.sha256(fits).hexdigest()
