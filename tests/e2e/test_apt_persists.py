"""What `sudo apt-get install` has put into a sandbox is there after a pause, in forks, and when it is made anew."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cpuos import Client, Sandbox
from cpuos.settings import load_settings
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(240)]
CONTROL = "Package: tinydeb\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@example.com>\nDescription: says hello\n"
# By a script of its own it also makes a user and a file with a mode: what a package does beside its files.
POSTINST = "#!/bin/sh\nset -e\nadduser --system --quiet tiny\ninstall -o tiny -m 0600 /dev/null /var/lib/tinydeb\n"
SAID = "hello from a package\ninstall ok installed\ntiny 600\n"
ASK = "tinydeb; dpkg-query -W -f '${Status}\\n' tinydeb; sudo stat -c '%U %a' /var/lib/tinydeb"


def with_computer() -> list[object]:
    there = (load_settings().template_dir / "computer" / "root.erofs").exists()
    mark = pytest.mark.skipif(not there, reason="the template 'computer' is not built here; `make templates`")
    return ["base", pytest.param("computer", marks=mark)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("package") / "tinydeb"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(CONTROL)
    for path, text in {
        root / "DEBIAN" / "postinst": POSTINST,
        root / "usr" / "bin" / "tinydeb": "#!/bin/sh\necho hello from a package\n",
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    made = Path(f"{root}.deb")
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, made], check=True, capture_output=True)
    return made.read_bytes()


@pytest.mark.parametrize("template", with_computer())
def test_a_package_survives_pause_fork_and_recreate(
    instance: Instance, client: Client, package: bytes, template: str
) -> None:
    size = {"memory": "512MiB", "disk": "512MiB"}
    with Sandbox.create(template, client=client, timeout="10m", **size) as sandbox:
        sandbox.files.write("/workspace/tinydeb.deb", package)
        done = sandbox.exec("sudo apt-get install --yes -qq ./tinydeb.deb", timeout="2m")
        assert done.exit_code == 0, done.stderr
        assert sandbox.exec(ASK).stdout == SAID
        sandbox.pause()
        sandbox.resume()
        assert sandbox.exec(ASK).stdout == SAID
        for other in sandbox.fork(2):
            with other:
                assert other.exec(ASK).stdout == SAID
                # What one removes the others keep.
                assert other.exec("sudo apt-get remove --yes -qq tinydeb", timeout="2m").exit_code == 0
                assert other.exec("tinydeb").exit_code == 127
        assert sandbox.exec(ASK).stdout == SAID
        snapshot = sandbox.snapshot(memory=False)
        # Its process dies: what was installed before the last pause comes back with the rest of the root.
        instance.kill_sandbox(sandbox.id)
        wait_until(lambda: client.get_json(f"/v1/sandboxes/{sandbox.id}")["state"] == "lost", within_s=30)
        sandbox.recreate()
        assert sandbox.exec(ASK).stdout == SAID
    try:
        with Sandbox.create(client=client, snapshot=snapshot) as later:
            wait_until(lambda: later.exec(ASK).stdout == SAID)
    finally:
        snapshot.delete()
