"""Whom this machine's own package managers ask, and which of them sandboxes reach by an exception only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from cpuos.setup.apt_sources import distribution_sources
from cpuos.types.blocked import blocked_reason

__all__ = ["Mirror", "exceptions_setting", "find_mirrors"]

_PORTS = {"http": 80, "https": 443}
_TIMEOUT_S = 20.0
_PAGE_BYTES = 4 << 20
# An index names the hosts that hold its files in the links of a project's page.
_PROJECT = "pip/"
_LINK = re.compile(r'href="([^"]+)"')
_ASK_PIP = """
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
known = Configuration(isolated=False)
known.load()
print(dict(known.items()).get("global.index-url", PyPI.simple_url))
"""

# Where no mirror lies, but this host, its neighbours or a cloud's credentials. Who names hosts here may be an index
# that is not to be trusted so far, or whoever answers for its names.
_NEVER = frozenset({"this network", "loopback", "cloud platform", "link-local", "protocol assignments", "multicast"})
_METADATA = frozenset({IPv4Address("100.100.100.200")})

Resolve = Callable[[str], IPv4Address | None]
ReadPage = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """One service that a package manager of this machine asks."""

    used_by: str
    """apt or pip."""
    name: str
    port: int
    address: IPv4Address | None
    """None: this machine does not resolve the name now."""
    blocked: str | None
    """Why no sandbox reaches it without an exception; None: sandboxes whose policy allows the name do."""

    @property
    def exception(self) -> str | None:
        """As it is written in the setting `network_exceptions`; None: none is needed, or none is proposed."""
        if self.blocked is None or self.blocked in _NEVER or self.address in _METADATA:
            return None
        return f"{self.name}={self.address}:{self.port}"


def find_mirrors(
    *,
    apt_folder: Path = Path("/etc/apt"),
    codename: str | None = None,
    index: str | None = None,
    resolve: Resolve | None = None,
    read_page: ReadPage | None = None,
) -> list[Mirror]:
    """Asks pip and apt how they are set, the index where its files lie, and the resolver for addresses.

    The parameters stand for what is read from the machine: the release's code name, pip's index URL.
    """
    release = _codename() if codename is None else codename
    index = _pip_index() if index is None else index
    asked = [("apt", uri) for source in distribution_sources(release, etc=apt_folder) for uri in source.uris]
    asked += [("pip", url) for url in _index_urls(index, read_page or _read_page)]
    found: dict[tuple[str, int], Mirror] = {}
    for used_by, url in asked:
        parts = urlsplit(url)
        port = _port(url)
        if parts.hostname is None or port is None or (parts.hostname, port) in found:
            continue
        address = (resolve or _resolve)(parts.hostname)
        reason = None if address is None else blocked_reason(address, protocol="tcp", port=port)
        found[parts.hostname, port] = Mirror(
            used_by=used_by, name=parts.hostname, port=port, address=address, blocked=reason
        )
    return list(found.values())


def exceptions_setting(mirrors: Iterable[Mirror], *, present: Sequence[str] = ()) -> str:
    """The line of `config.toml` that lets sandboxes reach these and the `present` ones; empty: none is needed."""
    needed = [mirror.exception for mirror in mirrors if mirror.exception is not None]
    if not needed:
        return ""
    listed = ", ".join(f'"{text}"' for text in dict.fromkeys([*present, *needed]))
    return f"network_exceptions = [{listed}]"


def _index_urls(index: str, read_page: ReadPage) -> list[str]:
    """The index, and one link of each other service that it sends pip to."""
    if not index:
        return []
    page = urljoin(index.rstrip("/") + "/", _PROJECT)
    try:
        text = read_page(page)
    except (OSError, ValueError):
        return [index]  # it is away for now; what it would have said is not known
    links = []
    for link in _LINK.findall(text):
        with contextlib.suppress(ValueError):  # no URL
            links.append(urljoin(page, link))
    return [index, *links]


def _read_page(url: str) -> str:
    if urlsplit(url).scheme not in _PORTS:
        raise ValueError(f"not a web address: {url}")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return answer.read(_PAGE_BYTES).decode(errors="replace")


def _pip_index() -> str:
    """Of the machine's own Python; empty where it has no pip."""
    told = os.environ.get("PIP_INDEX_URL", "")
    # A virtual environment's Python may come without pip.
    python = shutil.which("python3", path=os.defpath)
    if told or python is None:
        return told
    asked = subprocess.run([python, "-c", _ASK_PIP], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return asked.stdout.strip()


def _port(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        return parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def _resolve(name: str) -> IPv4Address | None:
    try:
        return IPv4Address(socket.getaddrinfo(name, 0, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def _codename() -> str:
    text = Path("/etc/os-release").read_text(errors="replace")
    match = re.search(r'(?m)^VERSION_CODENAME="?([a-z]+)', text)
    return match[1] if match else ""
