"""With the uplink in user space: packages from this machine's own mirror, read from its configuration, while nothing of
its main network namespace changes. Skipped where package managers are told of none that sandboxes may not reach."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cpuos import Network, Sandbox
from cpuos.setup.apt_sources import distribution_sources
from cpuos.testing.instance import Instance
from cpuos.types.blocked import blocked_reason

# Slow: a mirror may be away for minutes, which no test of this repository should hang on.
pytestmark = [pytest.mark.gvisor, pytest.mark.slow, pytest.mark.timeout(600)]

_PORTS = {"http": 80, "https": 443}
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_INDEX_HOSTS = """
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
known = Configuration(isolated=False)
known.load()
index = dict(known.items()).get("global.index-url", PyPI.simple_url)
print(index)
if index == PyPI.simple_url:
    print("https://" + PyPI.file_storage_domain)
"""
_TRY = """
import json, socket, sys
for place, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((place, port), 20)
        print("reached", place, port)
    except OSError as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    exceptions: tuple[str, ...]
    addresses: frozenset[str]
    names: tuple[str, ...]


def main_namespace() -> list[str]:
    """All that an uplink could add to this machine's network; counters and life times are not of it."""
    asked = ["ip -o link", "ip -o addr", "ip rule", "ip -4 route show table all", "nft --stateless list ruleset"]
    asked.append("cat /proc/sys/net/ipv4/ip_forward")
    return [subprocess.run(words.split(), capture_output=True, text=True, check=False).stdout for words in asked]


def _urls() -> list[str]:
    python = shutil.which("python3") or sys.executable
    asked = subprocess.run([python, "-c", _INDEX_HOSTS], capture_output=True, text=True, check=False)
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    sources = distribution_sources(release.get("VERSION_CODENAME", "").strip('"'))
    return [*asked.stdout.split(), *(uri for source in sources for uri in source.uris)]


@pytest.fixture(scope="module")
def mirror() -> Mirror:
    """Whom this machine's package managers ask, as exceptions of an operator."""
    exceptions: dict[str, str] = {}
    for url in map(urlsplit, _urls()):
        try:
            address = socket.getaddrinfo(url.hostname, 0, socket.AF_INET)[0][4][0]
        except OSError:
            pytest.skip("this machine resolves no package mirror")
        port = url.port or _PORTS[url.scheme]
        if blocked_reason(IPv4Address(address), protocol="tcp", port=port):
            exceptions[f"{url.hostname}={address}:{port}"] = str(address)
    if not exceptions:
        pytest.skip("this machine has no package mirror in an always-blocked range")
    names = tuple(f"{text.split('=')[0]}:{text.rsplit(':', 1)[1]}" for text in exceptions)
    return Mirror(exceptions=tuple(exceptions), addresses=frozenset(exceptions.values()), names=names)


@pytest.fixture(scope="module")
def instance(mirror: Mirror) -> Iterator[Instance]:
    before = main_namespace()
    values = {"network_uplink": "user", "network_exceptions": list(mirror.exceptions)}
    with Instance(runtime="gvisor", max_sandboxes=2, network_pool=1, **values) as instance:
        yield instance
        assert main_namespace() == before, "while sandboxes ran"
    assert main_namespace() == before


@pytest.mark.parametrize("kind", ["internet", "allowlist"])
def test_packages_come_from_this_machines_mirror(instance, mirror, kind):
    network = "internet" if kind == "internet" else Network(allow=list(mirror.names))
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


def test_everything_else_in_special_ranges_is_refused(instance, mirror):
    own = {str(row["local"]) for row in _addresses()}
    gateways = {row["gateway"] for row in _routes() if "gateway" in row}
    near = {str(IPv4Address(address) + step) for address in mirror.addresses for step in (-1, 1)} - mirror.addresses
    places = [[address, port] for address in own | gateways | near for port in (22, 80, 443)]
    places += [[address, port] for address in mirror.addresses for port in (22, 53, 3128)]
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
