"""`sudo cpuos up` hands the key to the user behind sudo; what runs under sudo afterwards finds it."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from cpuos.client.config import CREDENTIALS_PATH, load_config


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    own, users = tmp_path / "root", tmp_path / "user"
    own.mkdir()
    (users / CREDENTIALS_PATH).parent.mkdir(parents=True)
    (users / CREDENTIALS_PATH).write_text(json.dumps({"api_url": "http://127.0.0.1:7070", "api_key": "cpk_user"}))
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    entry = pwd.struct_passwd(("someone", "x", 4242, 4242, "", str(users), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: entry)
    return own, users


def test_the_key_of_the_user_behind_sudo_is_found(homes: tuple[Path, Path]) -> None:
    assert load_config(environ={"SUDO_UID": "4242"}).api_key == "cpk_user"


def test_roots_own_key_comes_first(homes: tuple[Path, Path]) -> None:
    own, _ = homes
    (own / CREDENTIALS_PATH).parent.mkdir(parents=True)
    (own / CREDENTIALS_PATH).write_text(json.dumps({"api_url": "http://127.0.0.1:7070", "api_key": "cpk_root"}))
    assert load_config(environ={"SUDO_UID": "4242"}).api_key == "cpk_root"
