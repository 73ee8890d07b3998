"""Whom apt and pip of a machine ask, and the exceptions that sandboxes need for them."""

from __future__ import annotations

import json
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cpuos.setup.mirrors as mirrors
from cpuos.cli.main import app
from cpuos.setup.mirrors import exceptions_setting, find_mirrors
from cpuos.types.blocked import ALWAYS_BLOCKED, BlockedRange
from cpuos.types.exceptions import parse_exceptions

ADDRESSES = {
    "apt.internal.example": IPv4Address("10.20.0.5"),
    "index.internal.example": IPv4Address("10.20.0.6"),
    "files.internal.example": IPv4Address("10.20.0.7"),
    "public.example": IPv4Address("151.101.0.223"),
}
SOURCES = """
deb http://apt.internal.example/debian bookworm main contrib
deb http://apt.internal.example/security bookworm-security main
deb https://vendor.example/apt stable main
"""
PAGE = """<!DOCTYPE html><html><body>
<a href="../../files/pip-1.0.tar.gz">pip-1.0.tar.gz</a>
<a href="https://files.internal.example/packages/pip-2.0.whl#sha256=00">pip-2.0.whl</a>
<a href="https://files.internal.example/packages/pip-3.0.whl">pip-3.0.whl</a>
<a href="javascript:alert(1)">x</a><a href="http://[bad">y</a><a href="https://files.internal.example:x/">z</a>
</body></html>"""


@pytest.fixture
def apt_folder(tmp_path: Path) -> Path:
    (tmp_path / "sources.list").write_text(SOURCES)
    return tmp_path


def find(apt_folder: Path, *, index: str = "https://index.internal.example/simple", page: str = PAGE):
    asked: list[str] = []

    def read_page(url: str) -> str:
        asked.append(url)
        return page

    found = find_mirrors(
        apt_folder=apt_folder, codename="bookworm", index=index, resolve=ADDRESSES.get, read_page=read_page
    )
    assert asked == ([index.rstrip("/") + "/pip/"] if index else [])
    return found


def test_each_service_is_found_once_with_its_reason(apt_folder: Path) -> None:
    found = find(apt_folder)
    assert [(one.used_by, one.name, one.port, str(one.address)) for one in found] == [
        ("apt", "apt.internal.example", 80, "10.20.0.5"),
        ("pip", "index.internal.example", 443, "10.20.0.6"),
        ("pip", "files.internal.example", 443, "10.20.0.7"),
    ]
    assert all("private" in one.blocked for one in found)


def test_the_setting_can_be_read_as_it_is_printed(apt_folder: Path) -> None:
    import tomllib

    present = ["other.example=10.0.0.9:443", "apt.internal.example=10.20.0.5:80"]
    line = exceptions_setting(find(apt_folder), present=present)
    texts = tomllib.loads(line)["network_exceptions"]
    assert texts == [
        *present,
        "index.internal.example=10.20.0.6:443",
        "files.internal.example=10.20.0.7:443",
    ]
    assert {rule.name for rule in parse_exceptions(texts)} == {text.split("=")[0] for text in texts}


def test_what_is_reached_as_any_other_needs_none(tmp_path: Path) -> None:
    (found,) = find(tmp_path, index="https://public.example/simple/", page="")
    assert (found.address, found.blocked) == (ADDRESSES["public.example"], None)
    assert exceptions_setting([found]) == ""


@pytest.mark.parametrize("blocked", ALWAYS_BLOCKED, ids=lambda blocked: str(blocked.network))
def test_no_index_gets_an_exception_for_this_host_or_a_clouds_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: BlockedRange
) -> None:
    """It names hosts, and whoever answers for these names says where they lie."""
    inside = {"files.index.example": blocked.network[blocked.network.num_addresses // 2]}

    def here() -> list[mirrors.Mirror]:
        page = '<a href="https://files.index.example/pip-2.0.whl">pip</a>'
        return find_mirrors(
            apt_folder=tmp_path,
            codename="x",
            index="https://public.example/simple",
            resolve=(ADDRESSES | inside).get,
            read_page=lambda url: page,
        )

    found = here()[-1]
    assert found.blocked == blocked.name
    if blocked.name in ("private", "shared", "benchmarking", "documentation", "6to4 relay", "reserved"):
        assert exceptions_setting([found]) == f'network_exceptions = ["{found.name}={found.address}:443"]'
        return
    assert exceptions_setting([found]) == ""
    monkeypatch.setattr(mirrors, "find_mirrors", here)
    ran = CliRunner().invoke(app, ["mirrors"])
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "no exception is proposed" in ran.stderr


def test_a_clouds_metadata_in_a_shared_range_is_no_mirror(tmp_path: Path) -> None:
    def resolve(name: str) -> IPv4Address:
        return IPv4Address("100.100.100.200")

    (found,) = find_mirrors(
        apt_folder=tmp_path,
        codename="x",
        index="http://index.example/simple",
        resolve=resolve,
        read_page=lambda url: "",
    )
    assert (found.blocked, exceptions_setting([found])) == ("shared", "")


def test_one_that_does_not_resolve_is_shown_and_not_excepted(tmp_path: Path) -> None:
    (found,) = find(tmp_path, index="https://away.example/simple", page="")
    assert (found.name, found.address, found.blocked) == ("away.example", None, None)
    assert exceptions_setting([found]) == ""


@pytest.mark.parametrize("error", [OSError("away"), ValueError("no page")])
def test_an_index_that_is_away_is_still_one(tmp_path: Path, error: Exception) -> None:
    def read_page(url: str) -> str:
        raise error

    index = "http://index.internal.example:8080/simple"
    (found,) = find_mirrors(
        apt_folder=tmp_path, codename="bookworm", index=index, resolve=ADDRESSES.get, read_page=read_page
    )
    assert (found.name, found.port) == ("index.internal.example", 8080)


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    assert find(tmp_path, index="") == []


@pytest.mark.parametrize("index", ["file:///etc/passwd", "ftp://index.internal.example/", "not a url"])
def test_only_the_web_is_asked(tmp_path: Path, index: str) -> None:
    assert find_mirrors(apt_folder=tmp_path, codename="x", index=index, resolve=ADDRESSES.get) == []


def test_the_command_prints_one_line_for_the_settings(apt_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "find_mirrors", lambda: find(apt_folder))
    ran = CliRunner().invoke(app, ["mirrors"])
    assert ran.exit_code == 0
    assert ran.stdout.startswith('network_exceptions = ["')
    assert ran.stdout.count("\n") == 1
    assert "apt.internal.example:80  10.20.0.5, blocked: private" in ran.stderr
    listed = json.loads(CliRunner().invoke(app, ["mirrors", "--json"]).stdout)["mirrors"]
    assert listed[0]["exception"] == "apt.internal.example=10.20.0.5:80"
