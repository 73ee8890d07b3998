"""With the uplink in user space: packages from this machine's own mirror, read from its configuration, while nothing of
its main network namespace changes. Skipped where package managers are told of none that sandboxes may not reach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cpuos import Network, Sandbox
from cpuos.setup.mirrors import Mirror, find_mirrors
from cpuos.testing.instance import Instance

# Slow: a mirror may be away for minutes, which no test of this repository should hang on.
pytestmark = [pytest.mark.gvisor, pytest.mark.slow, pytest.mark.timeout(600)]

_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_TUTORIAL = Path(__file__).parents[2] / "docs/tutorial/packages-from-a-mirror.md"
_SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TRY = """
import json, socket, sys
for place, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((place, port), 20)
        print("reached", place, port)
    except OSError as error:
        print(type(error).__name__)
"""


def main_namespace() -> list[str]:
    """All that an uplink could add to this machine's network; counters and life times are not of it."""
    asked = ["ip -o link", "ip -o addr", "ip rule", "ip -4 route show table all", "nft --stateless list ruleset"]
    asked.append("cat /proc/sys/net/ipv4/ip_forward")
    return [subprocess.run(words.split(), capture_output=True, text=True, check=False).stdout for words in asked]


@pytest.fixture(scope="module")
def mirrors() -> list[Mirror]:
    """Those of this machine's package managers that sandboxes reach by an exception only."""
    blocked = [one for one in find_mirrors() if one.blocked is not None]
    if not blocked:
        pytest.skip("this machine has no package mirror in an always-blocked range, or resolves none")
    return blocked


@pytest.fixture(scope="module")
def instance(mirrors: list[Mirror]) -> Iterator[Instance]:
    before = main_namespace()
    values = {"network_uplink": "user", "network_exceptions": [one.exception for one in mirrors]}
    with Instance(runtime="gvisor", max_sandboxes=2, network_pool=1, **values) as instance:
        yield instance
        assert main_namespace() == before, "while sandboxes ran"
    assert main_namespace() == before


@pytest.mark.parametrize("kind", ["internet", "allowlist"])
def test_packages_come_from_this_machines_mirror(instance, mirrors, kind):
    network = "internet" if kind == "internet" else Network(allow=[f"{one.name}:{one.port}" for one in mirrors])
    with Sandbox.create(client=instance.client(), template="python", network=network) as sandbox:
        sandbox.files.write("/tmp/bundle.crt", _BUNDLE.read_bytes())
        done = sandbox.exec(
            "pip install --quiet --retries 3 --cert /tmp/bundle.crt iniconfig && "
            "python3 -c 'import iniconfig; print(iniconfig.__name__)'",
            timeout="3m",
        )
        assert (done.stdout, done.exit_code) == ("iniconfig\n", 0), done.stderr
        apt = "sudo apt-get -o Acquire::Retries=3 -qq"
        done = sandbox.exec(f"{apt} update && {apt} install --yes hello && hello", timeout="5m")
        assert done.exit_code == 0, done.stderr
        assert "Hello, world!" in done.stdout


def test_the_tutorial_runs(instance, tmp_path):
    """As it is written, but for the step that changes the settings of the machine."""
    blocks = [text for text in _SHELL_BLOCK.findall(_TUTORIAL.read_text()) if "cpuos down" not in text]
    assert len(blocks) == 3
    environment = instance.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    script = "\n".join(blocks)
    ran = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(ran, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("network_exceptions = [")
    assert "\niniconfig\n" in done.stdout
    assert "Hello, world!" in done.stdout
    assert "always blocked" in done.stdout


def test_everything_else_in_special_ranges_is_refused(instance, mirrors):
    addresses = {str(one.address) for one in mirrors}
    own = {str(row["local"]) for row in _addresses()}
    gateways = {row["gateway"] for row in _routes() if "gateway" in row}
    near = {str(IPv4Address(address) + step) for address in addresses for step in (-1, 1)} - addresses
    places = [[address, port] for address in own | gateways | near for port in (22, 80, 443)]
    places += [[address, port] for address in addresses for port in (22, 53, 3128)]
    places += [[address, instance.settings.api_port] for address in own | {"127.0.0.1", "0.0.0.0"}]
    places += [["169.254.169.254", 80], ["10.0.0.1", 80]]
    with Sandbox.create(client=instance.client(), template="python", network="internet") as sandbox:
        # Loopback is the sandbox's own, where nobody listens.
        tried = sandbox.exec(["python3", "-c", _TRY, json.dumps(places)], timeout="3m").stdout.split("\n")[:-1]
        assert tried == ["ConnectionRefusedError"] * len(places)


def _addresses() -> list[dict[str, str]]:
    listing = subprocess.run(["ip", "-4", "-j", "addr"], capture_output=True, text=True, check=True).stdout
    return [entry for device in json.loads(listing) for entry in device["addr_info"]]


def _routes() -> list[dict[str, str]]:
    listing = subprocess.run(["ip", "-4", "-j", "route"], capture_output=True, text=True, check=True).stdout
    return list(json.loads(listing))
