"""Somebody else fills the volume of disks and images to the last block, in the middle of whatever goes on: errors are
clear, nothing is half-made, no disk sees an error, an end is still possible, and all goes on when there is room."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cpuos import Client, Sandbox, Snapshot, Template
from cpuos.errors import CpuosError, LimitReached, PlatformError
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from small_volume import disks_see_no_error, volume

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(400)]

DISK_MIB = 128
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": f"{DISK_MIB}MiB", "timeout": "1h"}
BUILD = {"disk": f"{3 * DISK_MIB}MiB", "memory": "256MiB", "cpu": 1}
# Writes and syncs a block at a time, to the workspace and to the root, and tells each number once it is safe.
WRITER = """
import errno, os, time
kept, rest = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in ("/workspace/log", "/home/user/log"))
def put(file, lines, *, may_be_refused):
    size = os.fstat(file).st_size
    while True:
        try:
            if os.write(file, lines) == len(lines):
                return
        except OSError as error:
            if error.errno != errno.ENOSPC or not may_be_refused:
                raise
        os.ftruncate(file, size)
        time.sleep(0.01)
for number in range(10**9):
    lines = b"%15d\\n" % number * 512
    put(kept, lines, may_be_refused=False)
    os.fsync(kept)
    put(rest, lines, may_be_refused=True)  # what lies outside of /workspace is not held
    print(number, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def small() -> Iterator[Instance]:
    small = Instance(runtime="gvisor", max_sandboxes=6, disk_reserve_mib=64, disk_overcommit=1, disk_hold=True)
    with volume(small.folder / "volume.img", small.state_dir, templates=["base", "python"]), small:
        yield small


@pytest.fixture(scope="module")
def own(small: Instance) -> Client:
    return small.client()


@pytest.fixture(autouse=True)
def _disks_see_no_error(small: Instance) -> Iterator[None]:
    with disks_see_no_error(small):
        yield


def is_full(own: Client) -> bool:
    return bool(own.get_json("/v1/nodes")["nodes"][0]["volume"]["full"])


def alarms(own: Client) -> list[str]:
    return [entry["result"] for entry in own.get_json("/v1/audit?action=node.volume")["entries"]]


@contextmanager
def filled(small: Instance, own: Client, *, after_s: float = 0.0) -> Iterator[None]:
    """Something takes every block of the volume, at once or a little later."""
    filler = small.state_dir / "filler"

    def fill() -> None:
        time.sleep(after_s)
        with filler.open("wb") as file:
            size, piece = 0, 64 << 20
            while piece >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size += piece
                except OSError:
                    piece //= 2

    thread = threading.Thread(target=fill)
    thread.start()
    if not after_s:
        thread.join()
        wait_until(lambda: is_full(own))
    try:
        yield
    finally:
        thread.join()
        filler.unlink()
        wait_until(lambda: not is_full(own))
        wait_until(lambda: own.get_json("/v1/capacity")["disk_mib"]["total"] > 3 * DISK_MIB)


def what_is_kept(small: Instance, own: Client) -> dict[str, Any]:
    """All that a verb could leave half-made."""
    state = small.settings.node_state_dir
    return {
        "images": sorted(os.listdir(state / "snapshots")),
        "disks": sorted(os.listdir(state / "disks")),
        "templates": sorted(os.listdir(state / "templates")) if (state / "templates").exists() else [],
        "snapshots": sorted(snap.id for snap in Snapshot.list(client=own) if snap.state != "failed"),
        "reserved": own.get_json("/v1/capacity")["disk_mib"]["reserved"],
    }


def test_a_writing_guest_stands_still_and_loses_nothing(small: Instance, own: Client) -> None:
    shape = {**SHAPE, "template": "python"}
    with Sandbox.create(client=own, **shape) as writing, Sandbox.create(client=own, **SHAPE) as other:
        writing.files.write("writer.py", WRITER)
        job = writing.spawn("python3 writer.py")
        wait_until(lambda: job.output().count(b"\n") > 20)
        with filled(small, own):
            before = job.output().count(b"\n")
            for verb in (lambda: writing.exec("true"), lambda: writing.files.write("f", b"f"), writing.pause):
                with pytest.raises(CpuosError) as refused:
                    verb()
                assert refused.value.code in ("volume_full", "capacity_exceeded"), refused.value
                assert "full" in str(refused.value)
                assert refused.value.hint
            with pytest.raises(CpuosError):
                Sandbox.create(client=own, **SHAPE)
            assert job.output().count(b"\n") - before < 20  # what was on its way
            wait_until(lambda: any("volume" in alarm for alarm in own.get_json("/v1/health")["alarms"]))
            wait_until(lambda: alarms(own) == ["error"], within_s=30)  # by then the kernel has written what it had
            assert (writing.refresh().state, is_full(own)) == ("running", True)
            other.kill()  # needs no room, and gives some
        stopped_at = job.output().count(b"\n")
        wait_until(lambda: job.output().count(b"\n") > stopped_at + 20)
        job.kill()
        told = int(job.output().split()[-1])
        last = writing.exec("tail -n 1 /workspace/log; tail -n 1 ~/log", check=True).stdout.split()
        assert [int(number) >= told for number in last] == [True, True]
        check = "awk '{ if ($1 != int((NR - 1) / 512)) { print NR; exit 1 } }'"
        assert writing.exec(f"{check} /workspace/log && {check} ~/log", timeout="60s").ok
        writing.pause()
        assert writing.exec(f"{check} /workspace/log && {check} ~/log", timeout="60s").ok
    wait_until(lambda: alarms(own) == ["error", "ok"], within_s=30)


@pytest.mark.parametrize("verb", ["pause", "snapshot", "upload", "build"])
@pytest.mark.parametrize(
    "after_s", [0.2, pytest.param(0.05, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_filled_in_the_middle_of(verb: str, after_s: float, small: Instance, own: Client) -> None:
    data = random.Random(1).randbytes(60 << 20)
    with Sandbox.create(client=own, **SHAPE) as sandbox:
        sandbox.exec("head -c 40M /dev/urandom > ~/held; head -c 20M /dev/urandom > kept; sync kept", check=True)
        sums = sandbox.exec("cat kept ~/held | sha256sum", check=True).stdout
        before = what_is_kept(small, own)
        verbs: dict[str, Callable[[], Any]] = {
            "pause": sandbox.pause,
            "snapshot": sandbox.snapshot,
            "upload": lambda: sandbox.files.write("big", data),
            "build": lambda: Template.build("filled", from_="base", run=["true"], client=own, **BUILD),
        }
        error: CpuosError | None = None
        with filled(small, own, after_s=after_s):
            try:
                made = verbs[verb]()
            except CpuosError as raised:
                error = raised
        if error is not None:
            assert isinstance(error, LimitReached | PlatformError) or error.code == "build_failed", repr(error)
            assert error.why
            # One that could not answer, because it stood still, is settled once it goes on.
            wait_until(lambda: sandbox.refresh().state == "running", within_s=60)
            wait_until(lambda: what_is_kept(small, own) == before)
        elif verb == "snapshot":
            made.delete()
        elif verb == "build":
            Template.delete("filled", client=own)
        if verb == "upload":  # whole or not there, whatever its caller was told
            told = sandbox.exec("ls; sha256sum < big", timeout="60s").stdout.split()
            assert told in (["kept"], ["big", "kept", hashlib.sha256(data).hexdigest(), "-"])
            assert error is not None or "big" in told
        assert sandbox.exec("cat kept ~/held | sha256sum", check=True, timeout="60s").stdout == sums
        sandbox.pause()  # all works again
        assert sandbox.exec("cat kept ~/held | sha256sum", check=True, timeout="60s").stdout == sums
