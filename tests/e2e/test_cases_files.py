"""Failures that people report of sandbox products, as checks on real sandboxes: files (C18, C19, C22, C23)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from cpuos import AsyncSandbox, Client, Sandbox
from cpuos.errors import LimitReached, PermissionDenied
from cpuos.testing.conformance import ODD_NAMES

pytestmark = pytest.mark.gvisor
SIZES = [0, 1, 4095, 4096, 16383, 18 * 1024, 65535, 65536, 1 << 20, 100 << 20]


@pytest.fixture(scope="module")
def sandbox(client: Client):
    with Sandbox.create(client=client, memory="2GiB", disk="4GiB", timeout="20m") as sandbox:
        yield sandbox


def cpuos(instance, *words: str, **options) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "cpuos.cli", *words],
        env=instance.environment(),
        capture_output=True,
        timeout=120,
        **options,
    )


# C18: names.


@pytest.mark.parametrize("name", ODD_NAMES, ids=[f"name{number}" for number in range(len(ODD_NAMES))])
def test_c18_links_and_the_command_line_take_any_name(sandbox: Sandbox, instance, tmp_path: Path, name: str) -> None:
    path, data = f"/workspace/c18/{name}", os.urandom(64)
    sandbox.files.write(path, data)
    with urllib.request.urlopen(sandbox.files.url(path, expires="2m")) as answer:
        assert answer.read() == data
    local = tmp_path / "local"
    assert cpuos(instance, "cp", f"{sandbox.id}:{path}", str(local)).returncode == 0
    assert local.read_bytes() == data
    sandbox.files.download(path, tmp_path / "downloaded")
    assert (tmp_path / "downloaded").read_bytes() == data


def test_c18_sandbox_names(client: Client) -> None:
    for bad in ("a.b", "Upper", "x" * 200, "-a", "a_b", "", "é"):
        with pytest.raises(Exception, match="name"):
            Sandbox.create(client=client, name=bad)
    with Sandbox.create(client=client, name="good-name-1", memory="512MiB", disk="512MiB") as sandbox:
        assert Sandbox.connect("good-name-1", client=client).id == sandbox.id
        assert sandbox.exec("hostname").stdout == "good-name-1\n"


# C19: bytes, by every door.


@pytest.mark.parametrize("size", SIZES)
def test_c19_sync(sandbox: Sandbox, size: int) -> None:
    data = os.urandom(size)
    sandbox.files.write("c19.bin", data)
    assert sandbox.exec("sha256sum < c19.bin", check=True).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    assert sandbox.files.read("c19.bin") == data
    with urllib.request.urlopen(sandbox.files.url("c19.bin", expires="2m")) as answer:
        assert answer.read() == data


@pytest.mark.parametrize("size", SIZES)
async def test_c19_async(async_client, sandbox: Sandbox, size: int) -> None:
    box = await AsyncSandbox.connect(sandbox.id, client=async_client)
    data = os.urandom(size)
    await box.files.write("c19-async.bin", data)
    assert await box.files.read("c19-async.bin") == data


@pytest.mark.parametrize("size", SIZES)
def test_c19_command_line(sandbox: Sandbox, instance, tmp_path: Path, size: int) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(size))
    assert cpuos(instance, "cp", str(source), f"{sandbox.id}:/workspace/c19-cli.bin").returncode == 0
    assert cpuos(instance, "cp", f"{sandbox.id}:/workspace/c19-cli.bin", str(back)).returncode == 0
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_c19_over_four_gib(client: Client, tmp_path: Path) -> None:
    size, block = (4 << 30) + 1, os.urandom(1 << 20)
    source, digest = tmp_path / "big", hashlib.sha256()
    with source.open("wb") as file:
        left = size
        while left:
            piece = block[: min(left, len(block))]
            file.write(piece)
            digest.update(piece)
            left -= len(piece)
    with Sandbox.create(client=client, disk="10GiB", timeout="30m") as sandbox:
        sandbox.files.upload(source, "/workspace/big")
        source.unlink()
        inside = sandbox.exec("stat -c %s big; sha256sum < big", timeout="10m", check=True).stdout.split()
        assert inside[:2] == [str(size), digest.hexdigest()]
        back = hashlib.sha256()
        for chunk in sandbox.files.open_read("big"):
            back.update(chunk)
        assert back.hexdigest() == digest.hexdigest()


# C22: overwrite rules.


def test_c22_overwrite_rules(sandbox: Sandbox) -> None:
    setup = """
    rm -rf /workspace/c22; mkdir /workspace/c22; cd /workspace/c22
    useradd -m app 2>/dev/null || true
    echo old > owned; chmod 0640 owned; chown app:user owned; chmod g+w owned
    ln owned other-link; ln -s owned through
    printf '#!/bin/sh\\necho run\\n' > tool; chmod 0755 tool; chown -h user:user tool through
    mkdir closed; chmod 0555 closed; chown user:user . ; chown root:root closed
    """
    sandbox.exec(setup, user="root", check=True)
    sandbox.files.write("c22/through", b"new\n")
    sandbox.files.write("c22/tool", b"#!/bin/sh\necho changed\n")
    seen = sandbox.exec(
        "cd c22; cat owned; stat -c '%a %U:%G' owned; readlink through; cat other-link; ./tool", user="root"
    )
    assert seen.stdout.splitlines() == ["new", "660 app:user", "owned", "old", "changed"]
    with pytest.raises(PermissionDenied):
        sandbox.files.write("c22/closed/file", b"x")
    sandbox.files.write("c22/made/as/needed", b"x")
    assert sandbox.exec("stat -c %U c22/made/as", check=True).stdout == "user\n"
    assert not [entry.name for entry in sandbox.files.list("/workspace/c22") if entry.name.startswith(".cpuos")]


# C23: disk full.


@pytest.mark.parametrize(("where", "gib", "one"), [("/workspace", 2, 1_500_000_000), ("/home/user", 1, 700_000_000)])
def test_c23_disk_full(client: Client, sandbox: Sandbox, where: str, gib: int, one: int) -> None:
    limit = gib << 30
    with Sandbox.create(client=client, memory="1GiB", disk=f"{gib}GiB", timeout="15m") as full:
        one_file = full.exec(f"head -c {one} /dev/zero > {where}/one && stat -c %s {where}/one", timeout="2m")
        assert one_file.stdout == f"{one}\n", one_file
        full.exec(f"cat /dev/zero > {where}/rest", timeout="3m")
        used = int(full.exec(f"cat {where}/one {where}/rest | wc -c", timeout="2m", check=True).stdout)
        assert limit <= used <= limit * 1.05
        assert full.exec(f"head -c 4000000 /dev/zero > {where}/more").exit_code != 0
        with pytest.raises(LimitReached) as caught:
            full.files.write(f"{where}/upload", b"x" * (8 << 20))
        assert caught.value.code == "disk_full"
        assert full.exec("echo still here", check=True).stdout == "still here\n"
        assert "one" in [entry.name for entry in full.files.list(where)]
        assert "upload" not in [entry.name for entry in full.files.list(where)]
        assert sandbox.exec("head -c 100000000 /dev/zero > n && rm n && echo fine").stdout == "fine\n"
        full.files.remove(f"{where}/rest")
        full.files.remove(f"{where}/one")
        full.files.write(f"{where}/again", b"y" * (64 << 20))
        assert full.exec(f"wc -c < {where}/again", check=True).stdout == f"{64 << 20}\n"
