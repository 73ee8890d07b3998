"""`sudo cpuos up` hands the key to the user behind sudo; what runs under sudo afterwards finds it."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from cpuos.client.config import load_config
from cpuos.errors import AuthenticationError
from cpuos.key_file import calling_user, key_file, key_file_below
from cpuos.services.credentials import credentials_path
from cpuos.settings import load_settings


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    own, users = tmp_path / "root", tmp_path / "user"
    own.mkdir()
    key_file_below(users).parent.mkdir(parents=True)
    key_file_below(users).write_text(json.dumps({"api_url": "http://127.0.0.1:7070", "api_key": "cpk_user"}))
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    entry = pwd.struct_passwd(("someone", "x", 4242, 4242, "", str(users), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: entry)
    return own, users


def test_the_key_of_the_user_behind_sudo_is_found(homes: tuple[Path, Path]) -> None:
    assert load_config(environ={"SUDO_UID": "4242"}).api_key == "cpk_user"


def test_roots_own_key_serves_a_user_who_has_none(homes: tuple[Path, Path]) -> None:
    own, users = homes
    key_file_below(own).parent.mkdir(parents=True)
    key_file_below(own).write_text(json.dumps({"api_url": "http://127.0.0.1:7070", "api_key": "cpk_root"}))
    assert load_config(environ={"SUDO_UID": "4242"}).api_key == "cpk_user"
    key_file_below(users).unlink()
    assert load_config(environ={"SUDO_UID": "4242"}).api_key == "cpk_root"


@pytest.mark.parametrize(
    ("environ", "below"),
    [
        ({"HOME": "/elsewhere"}, "/elsewhere/.config/cpuos"),
        ({"HOME": "/elsewhere", "SUDO_UID": "4242"}, "USERS/.config/cpuos"),
        ({"HOME": "/elsewhere", "SUDO_UID": "0"}, "/elsewhere/.config/cpuos"),
        ({"HOME": "/elsewhere", "SUDO_UID": "4242", "CPUOS_RUN_DIR": "/run/second"}, "/run/second"),
        ({"HOME": "/elsewhere", "CPUOS_RUN_DIR": "/run/cpuos"}, "/elsewhere/.config/cpuos"),
    ],
)
def test_up_writes_where_the_client_looks(
    homes: tuple[Path, Path], environ: dict[str, str], below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place for both: what `up` chooses, from settings, and what a client chooses, from the environment."""
    for name in ("SUDO_UID", "CPUOS_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = Path(below.replace("USERS", str(homes[1]))) / "credentials.json"
    assert credentials_path(load_settings(), uid=calling_user()) == place
    assert key_file() == place
    with pytest.raises(AuthenticationError) as missing:
        load_config("http://127.0.0.1:9")
    assert str(place) in missing.value.why
