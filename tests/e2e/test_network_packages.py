"""`pip install` and `sudo apt-get install` in a sandbox, from a mirror in the operator's private network."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

MIRROR = "mirror.example"
PIP = f"pip install --quiet --retries 0 --timeout 3 --trusted-host {MIRROR} -i http://{MIRROR}:8080/simple/ tinypackage"
SOURCES = f"deb [trusted=yes] http://{MIRROR}:8080/debian ./"
APT = "sudo apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=3"


@pytest.fixture(scope="module")
def mirror(sealed: SealedWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python index and an apt repository of one package each, served at every address."""
    folder = tmp_path_factory.mktemp("mirror")
    _write_index(folder / "simple" / "tinypackage")
    _write_repository(folder / "debian")
    sealed.serve_folder(folder)
    yield folder
    sealed.serve_folder(None)


@pytest.fixture(scope="module")
def instance(sealed: SealedWorld, mirror: Path) -> Iterator[SealedInstance]:
    exceptions = [f"{MIRROR}={addresses.MIRROR}:8080"]
    with sealed.instance(max_sandboxes=4, network_pool=1, network_exceptions=exceptions) as instance:
        yield instance


@pytest.mark.parametrize("network", ["internet", Network(allow=[f"{MIRROR}:8080"])], ids=["internet", "allowlist"])
def test_packages_come_from_the_mirror(sealed, instance, network):
    sealed.clear()
    with Sandbox.create(client=instance.client(), template="python", network=network) as sandbox:
        done = sandbox.exec(f"{PIP} && python3 -c 'import tinypackage; print(tinypackage.WORD)'", timeout="1m")
        assert (done.stdout, done.exit_code) == ("hello from a wheel\n", 0), done.stderr
        sandbox.exec(
            f"sudo sh -c \"rm -rf /etc/apt/sources.list*; echo '{SOURCES}' > /etc/apt/sources.list\"", check=True
        )
        done = sandbox.exec(f"{APT} update -qq && {APT} install --yes -qq tinydeb && tinydeb", timeout="1m")
        assert done.exit_code == 0, done.stderr
        assert done.stdout.endswith("hello from a package\n")
    assert {seen.server for seen in sealed.connections() if seen.protocol == "http"} == {addresses.MIRROR}


def test_without_the_policys_leave_the_mirror_is_refused_at_once(instance):
    with Sandbox.create(
        client=instance.client(), template="python", network=Network(allow=["other.example"])
    ) as sandbox:
        done = sandbox.exec(PIP, timeout="30s")
        assert done.status == "exited"
        assert done.exit_code != 0


def _write_index(folder: Path) -> None:
    folder.mkdir(parents=True)
    files = {
        "tinypackage/__init__.py": 'WORD = "hello from a wheel"\n',
        "tinypackage-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinypackage\nVersion: 1.0\n",
        "tinypackage-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_record_hash(text)},{len(text)}\n" for name, text in files.items())
    files["tinypackage-1.0.dist-info/RECORD"] = record + "tinypackage-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / "tinypackage-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _write_repository(folder: Path) -> None:
    root = folder.parent / "tinydeb"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr" / "bin").mkdir(parents=True)
    control = (
        "Package: tinydeb\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@example.com>\nDescription: says hello\n"
    )
    (root / "DEBIAN" / "control").write_text(control)
    program = root / "usr" / "bin" / "tinydeb"
    program.write_text("#!/bin/sh\necho hello from a package\n")
    program.chmod(0o755)
    folder.mkdir()
    package = folder / "tinydeb_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, package], check=True, capture_output=True)
    data = package.read_bytes()
    listing = f"{control}Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    (folder / "Packages").write_text(listing)
    digest = hashlib.sha256(listing.encode()).hexdigest()
    (folder / "Release").write_text(f"Suite: stable\nSHA256:\n {digest} {len(listing)} Packages\n")
