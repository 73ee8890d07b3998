"""Data packs: made of a folder in a sandbox, read only in others, shared, and kept for as long as anything has them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cpuos import Client, DataPack, Sandbox
from cpuos.errors import Conflict, InvalidRequest, LimitReached, NotFound
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "128MiB"}
AT = "/data/weather"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some of everything that a data set has."""
    data = tmp_path / "weather"
    (data / "deep" / "er").mkdir(parents=True)
    (data / "hello.txt").write_text("hello\n")
    (data / "deep" / "er" / "bytes").write_bytes(random.Random(3).randbytes(6 << 20))
    (data / "empty").touch()
    (data / "tool.sh").write_text("#!/bin/sh\necho runs\n")
    (data / "tool.sh").chmod(0o755)
    return data


def sums(folder: Path) -> str:
    command = "find . -type f -print0 | sort -z | xargs -0 sha256sum"
    return subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True
    ).stdout


def sums_in(sandbox: Sandbox) -> str:
    command = f"cd {AT} && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"
    return sandbox.exec(command, check=True, timeout="60s").stdout


def images(instance: Instance) -> list[str]:
    packs = instance.settings.node_state_dir / "packs"
    return sorted(os.listdir(packs)) if packs.exists() else []


def test_a_pack_is_had_by_many_and_written_by_none(instance: Instance, client: Client, folder: Path) -> None:
    pack = DataPack.build("weather", folder, client=client)
    assert pack.files == 4
    assert [known.name for known in DataPack.list(client=client)] == ["weather"]
    assert DataPack.get("weather", client=client) == pack
    with (
        Sandbox.create(client=client, packs={AT: "weather"}, **SHAPE) as one,
        Sandbox.create(client=client, packs={AT: "weather", "/home/user/again": "weather"}, **SHAPE) as two,
    ):
        assert one.info.packs[AT].digest == pack.digest
        for sandbox in (one, two):
            assert sums_in(sandbox) == sums(folder)
            assert sandbox.exec(f"{AT}/tool.sh", check=True).stdout == "runs\n"
            for attempt in (
                f"echo x > {AT}/hello.txt",
                f"rm {AT}/empty",
                f"touch {AT}/new",
                f"mount -o remount,rw {AT}",
                f"umount {AT}",
                f"mv {AT} /data/other",
            ):
                assert not sandbox.exec(["sudo", "bash", "-c", attempt]).ok, attempt
            assert sums_in(sandbox) == sums(folder)
        assert two.exec("cat /home/user/again/hello.txt", check=True).stdout == "hello\n"
        with pytest.raises(Conflict) as refused:
            DataPack.delete("weather", client=client)
        assert refused.value.code == "pack_in_use"
        assert sums_in(one) == sums(folder)
    wait_until(lambda: _deleted("weather", client), within_s=20)
    wait_until(lambda: images(instance) == [])
    with pytest.raises(NotFound) as missing:
        DataPack.get("weather", client=client)
    assert missing.value.code == "pack_not_found"


def _deleted(name: str, client: Client) -> bool:
    try:
        DataPack.delete(name, client=client)
    except Conflict:
        return False
    return True


def test_it_survives_pause_fork_snapshot_and_recreate(instance: Instance, client: Client, folder: Path) -> None:
    DataPack.build("weather", folder, client=client)
    with Sandbox.create(client=client, packs={AT: "weather"}, **SHAPE) as first:
        reader = f"exec 3< {AT}/deep/er/bytes; while true; do head -c 1000 <&3 | cksum; sleep 0.1; done"
        job = first.spawn(reader)
        wait_until(lambda: job.output().count(b"\n") > 2)
        first.pause()
        before = job.output().count(b"\n")
        first.resume()
        wait_until(lambda: job.output().count(b"\n") > before + 2)
        assert sums_in(first) == sums(folder)
        snap = first.snapshot()
        (clone,) = snap.fork(1)
        cold = Sandbox.create(client=client, snapshot=snap)
        for other in (clone, cold):
            assert sums_in(other) == sums(folder)
            assert other.info.packs == first.info.packs
            other.kill()
        # A name may mean another one meanwhile: what was begun with the first keeps it.
        (folder / "hello.txt").write_text("changed\n")
        DataPack.build("weather", folder, client=client)
        assert first.exec(f"cat {AT}/hello.txt", check=True).stdout == "hello\n"
        first.kill()
        wait_until(lambda: len(images(instance)) == 2)
        later = Sandbox.create(client=client, snapshot=snap)
        assert later.exec(f"cat {AT}/hello.txt", check=True).stdout == "hello\n"
        with pytest.raises(InvalidRequest):
            Sandbox.create(client=client, snapshot=snap, packs={"/data/other": "weather"})
        later.kill()
        snap.delete()
    wait_until(lambda: len(images(instance)) == 1, within_s=40)  # the first has no name and nothing has it
    wait_until(lambda: _deleted("weather", client), within_s=20)


def test_what_cannot_be_a_pack_is_refused(instance: Instance, client: Client) -> None:
    with Sandbox.create(client=client, **SHAPE) as sandbox:
        with pytest.raises(InvalidRequest) as failed:
            DataPack.of(sandbox, "none", "/nowhere")
        assert failed.value.code == "pack_failed"
        assert "no folder" in failed.value.why
        for path in ("/", "/etc", "/proc/x", "/workspace/data", "relative", "/data/../etc"):
            with pytest.raises(InvalidRequest):
                Sandbox.create(client=client, packs={path: "none"}, **SHAPE)
        with pytest.raises(NotFound) as missing:
            Sandbox.create(client=client, packs={AT: "none"}, **SHAPE)
        assert missing.value.code == "pack_not_found"
        sandbox.exec("head -c 100M /dev/zero > ~/held; head -c 60M /dev/urandom > big", check=True, timeout="60s")
        with pytest.raises((InvalidRequest, LimitReached)):
            DataPack.of(sandbox, "big")  # no room for the image
        assert images(instance) == []
        assert sandbox.exec("sudo ls /var/tmp", check=True).stdout == ""


def test_the_command_line(instance: Instance, client: Client, folder: Path) -> None:
    def cpuos(*arguments: str) -> str:
        command = [sys.executable, "-m", "cpuos.cli", *arguments]
        done = subprocess.run(command, env=instance.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    digest = cpuos("pack", "build", "weather", str(folder)).strip()
    assert digest.startswith("sha256:")
    assert "weather" in cpuos("pack", "ls")
    assert json.loads(cpuos("pack", "inspect", "weather", "--json"))["digest"] == digest
    shape = ("--template", "base", "--memory", "256MiB", "--disk", "128MiB")
    sandbox = cpuos("create", *shape, "--pack", f"{AT}=weather").strip()
    assert cpuos("exec", sandbox, "cat", f"{AT}/hello.txt") == "hello\n"
    copied = cpuos("pack", "build", "copy", AT, "--sandbox", sandbox).strip()
    assert copied == digest  # the same files, the same bytes
    cpuos("kill", sandbox)
    wait_until(lambda: _deleted("weather", client), within_s=20)
    assert cpuos("pack", "rm", "copy").strip() == "copy"
