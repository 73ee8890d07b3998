"""The OCI spec says what the guest gets; these lines are what the threat model rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.gvisor.bundle import runsc_flags, write_bundle
from cpuos.runtimes.gvisor.probe import probe_gvisor
from cpuos.runtimes.gvisor.program import Runsc
from cpuos.runtimes.gvisor.version import RUNSC_VERSION, has_pinned_version
from cpuos.settings import RUNSC_VERSION as SETTINGS_VERSION


def spec_in(folder: Path, **changes) -> SandboxSpec:
    values = {
        "id": "a" * 20,
        "generation": 1,
        "hostname": "box",
        "cpu": 2,
        "memory_mib": 1024,
        "disk_mib": 2048,
        "max_processes": 300,
        "template_image": Path("/t/root.erofs"),
        "workdir": folder,
        "disk": Path("/d"),
        "netns": Path("/n"),
        "agent": Path("/agent"),
        "node_public_key": b"k" * 32,
    }
    return SandboxSpec(**(values | changes))


def written(folder: Path, **changes) -> dict:
    bundle = write_bundle(spec_in(folder, **changes), cgroups_path="/cpuos-x/a")
    return json.loads((bundle / "config.json").read_text())


def test_root_in_the_guest_has_no_dangerous_capability(tmp_path):
    capabilities = written(tmp_path)["process"]["capabilities"]
    for names in capabilities.values():
        refused = {
            "SYS_ADMIN",
            "SYS_RESOURCE",
            "SYS_MODULE",
            "SYS_RAWIO",
            "SYS_BOOT",
            "SYS_TIME",
            "NET_ADMIN",
            "NET_RAW",
        }
        assert not {f"CAP_{name}" for name in refused} & set(names)
        assert {"CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_SYS_CHROOT"} <= set(names)


def test_no_host_file_is_writable_but_the_workspace(tmp_path):
    mounts = written(tmp_path)["mounts"]
    binds = {mount["source"]: mount["options"] for mount in mounts if mount["type"] == "bind"}
    assert binds == {"/agent": ["ro", "rbind"], "/d/workspace": ["rw", "rbind"]}
    sizes = [option for mount in mounts if mount["type"] == "tmpfs" for option in mount["options"]]
    assert sum(option == "size=256m" for option in sizes) == 2, "memory file systems have a size"


def test_limits_and_namespaces(tmp_path):
    linux = written(tmp_path)["linux"]
    assert linux["resources"]["memory"] == {"limit": 1 << 30}
    assert linux["resources"]["cpu"]["quota"] == 200_000
    assert "cpus" not in linux["resources"]["cpu"]
    assert {"type": "network", "path": "/n"} in linux["namespaces"]
    # With one the pinned sentry crashes when its process limit is written.
    assert "cgroup" not in {namespace["type"] for namespace in linux["namespaces"]}
    assert written(tmp_path, cpu=1)["linux"]["resources"]["cpu"]["cpus"].isdigit()


def test_root_layer_is_on_disk_and_bounded(tmp_path):
    annotations = written(tmp_path)["annotations"]
    assert annotations["dev.gvisor.spec.rootfs.overlay"].startswith("dir=/")
    assert annotations["dev.gvisor.spec.rootfs.options"] == "size=2068m"
    flags = runsc_flags(root=tmp_path, overlay=Path("/d/overlay"), log=tmp_path / "l", panic_log=tmp_path / "p")
    assert "root:dir=/d/overlay" in flags
    assert "--host-uds" not in flags


def test_guest_environment_is_fixed(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "zebra")
    assert "zebra" not in json.dumps(written(tmp_path))


def test_version_is_the_one_that_setup_installs():
    assert RUNSC_VERSION == SETTINGS_VERSION


def test_version_is_read_from_the_program(tmp_path):
    program = tmp_path / "runsc"
    program.write_bytes(b"\x7fELF..." + f"dep\tgvisor.dev/gvisor\t{RUNSC_VERSION}\th1:x=\n".encode())
    assert has_pinned_version(program)
    program.write_bytes(b"\x7fELF...dep\tgvisor.dev/gvisor\tv0.0.0-20200101000000-abcdefabcdef\th1:x=\n")
    assert not has_pinned_version(program)


@pytest.mark.parametrize(("content", "word"), [(None, "not installed"), (b"another program", "is not gVisor")])
async def test_probe_names_what_is_wrong(tmp_path, monkeypatch, content, word):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    program = tmp_path / "runsc"
    if content is not None:
        program.write_bytes(content)
    probe = await probe_gvisor(Runsc(program, root=tmp_path), folder=tmp_path)
    assert not probe.available
    assert word in probe.reason
    assert "cpuos up" in probe.reason


async def test_probe_says_that_it_needs_root(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    probe = await probe_gvisor(Runsc(tmp_path / "runsc", root=tmp_path), folder=tmp_path)
    assert "need root" in probe.reason


def test_a_clone_differs_only_in_what_gvisor_lets_differ(tmp_path):
    """See gVisor's specutils/restore.go: all else in the spec of a restore must be as it was at the checkpoint."""

    def comparable(name: str, **places) -> dict:
        folder = tmp_path / name
        spec = written(folder, id=name * 20, hostname=f"box-{name}", **places)
        for mount in spec["mounts"]:
            del mount["source"]
        for namespace in spec["linux"]["namespaces"]:
            namespace.pop("path", None)
        del spec["hostname"], spec["root"]["path"], spec["process"]["env"], spec["linux"]["cgroupsPath"]
        return spec

    first = comparable("a", netns=Path("/n1"), disk=Path("/d1"), generation=1)
    second = comparable("b", netns=Path("/n2"), disk=Path("/d2"), generation=7)
    assert first == second
    assert comparable("c", max_processes=301) != first
