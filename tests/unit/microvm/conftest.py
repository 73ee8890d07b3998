"""A driver with Firecracker's stand-ins, a sandbox for it, and a slot."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.node.network.namespaces import in_fresh_thread, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.tap import make_tap
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.microvm.runtime import MicrovmRuntime
from firecracker_host import ID, Host, make_driver, traces


@pytest.fixture
def kvm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.runtimes.microvm.probe.os.path.exists", lambda path: True)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A slot, as far as a VMM is concerned."""
    path = tmp_path_factory.mktemp("slot") / "router"

    def make() -> None:
        os.close(new_namespace())
        keep_namespace(path)
        make_tap("lan", mac="02:00:0a:00:00:01")

    in_fresh_thread(make)
    yield path
    release_namespace(path)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "programs")


@pytest.fixture
def spec(tmp_path: Path, router: Path) -> SandboxSpec:
    image = tmp_path / "data" / "microvm"
    image.mkdir(parents=True)
    for name in ("vmlinux", "initrd"):
        (image / name).write_text(name)
    manifest = {"format": 1, "kernel": "vmlinuz-1", "vmlinux": "sha256:1", "initrd": "sha256:2"}
    (image / "manifest.json").write_text(json.dumps(manifest))
    disk, work = tmp_path / "disk", tmp_path / "work"
    for folder in (disk, work):
        folder.mkdir(mode=0o700)
    for name in ("image", "root.image"):
        (disk / name).write_bytes(bytes(4096))
        (disk / name).chmod(0o600)
    (tmp_path / "template").write_bytes(b"template")
    return SandboxSpec(
        id=ID,
        generation=1,
        hostname="box",
        cpu=2,
        memory_mib=256,
        disk_mib=64,
        max_processes=64,
        template_image=tmp_path / "template",
        workdir=work,
        disk=disk,
        netns=router,
        agent=tmp_path,
        node_public_key=bytes(32),
        own_kernel=True,
    )


@pytest.fixture
async def driver(tmp_path: Path, host: Host, spec: SandboxSpec, kvm_is_there: None) -> AsyncIterator[MicrovmRuntime]:
    made = make_driver(tmp_path, host)
    yield made
    await made.destroy(ID)
    await made.close()
    assert traces(tmp_path) == []
