"""The key that `up` hands over: mended where it lacks, and never at the cost of another installation's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cpuos.client.config import load_config
from cpuos.key_file import key_file
from cpuos.services import credentials
from cpuos.services.credentials import forget_keys, hand_over_key
from cpuos.settings import Settings, load_settings
from cpuos.setup import doctor
from cpuos.setup.checks import CheckState

URL = "http://127.0.0.1:7070"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Keys that the server knows; `make_key` adds one. HOME is a folder of this test's."""
    keys: set[str] = set()

    def make_key(settings: Settings, *, python: Path, name: str) -> str:
        keys.add(key := f"cpk_{settings.data_dir.name}_{len(keys)}")
        return key

    def ask(url: str, path: str, *, key: str) -> tuple[int, None]:
        return (200 if key in keys else 401), None

    monkeypatch.setattr(credentials, "make_key", make_key)
    monkeypatch.setattr(credentials, "ask", ask)
    monkeypatch.setattr("cpuos.services.health.ask", ask)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SUDO_UID", "CPUOS_RUN_DIR", "CPUOS_API_KEY", "CPUOS_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return keys


def settings_of(folder: Path) -> Settings:
    (folder / "state").mkdir(parents=True)
    return load_settings(data_dir=folder)


def hand_over(settings: Settings) -> list[str]:
    told: list[str] = []
    hand_over_key(settings, python=Path("python"), api_url=URL, uid=os.geteuid(), tell=told.append)
    return told


def test_up_mends_a_key_that_is_missing_or_not_known(known: set[str], tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "one")
    assert hand_over(settings) == []
    first = load_config().api_key
    assert first in known
    hand_over(settings)
    assert load_config().api_key == first, "one that works stays"
    key_file().unlink()
    assert hand_over(settings) == []
    assert load_config().api_key in known - {first}
    known.clear()
    assert hand_over(settings) == [], "its own lost key is no other installation's"
    assert load_config().api_key in known


def test_another_home_gets_a_key_of_its_own(known: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path / "one")
    hand_over(settings)
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    hand_over(settings)
    assert load_config().api_key in known
    assert len(forget_keys(settings)) == 2
    assert not (tmp_path / "home" / ".config" / "cpuos").exists()
    assert not (tmp_path / "other" / ".config" / "cpuos").exists()


def test_the_key_of_another_installation_is_kept_and_comes_back(known: set[str], tmp_path: Path) -> None:
    one, two = settings_of(tmp_path / "one"), settings_of(tmp_path / "two")
    hand_over(one)
    before = key_file().read_text()
    known.clear()
    (told,) = hand_over(two)
    kept = key_file().with_name("credentials.kept.json")
    assert str(kept) in told
    assert kept.read_text() == before
    assert load_config().api_key in known
    assert forget_keys(one) == [], "the file has the key of the second one"
    assert forget_keys(two) == [str(key_file())]
    assert key_file().read_text() == before
    assert not kept.exists()


def test_what_else_a_file_or_folder_holds_stays(known: set[str], tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "one")
    hand_over(settings)
    path = key_file()
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": "mine"}))
    hand_over(settings)
    forget_keys(settings)
    assert json.loads(path.read_text()) == {"note": "mine"}
    hand_over(settings)
    path.write_text(json.dumps({"api_url": URL, "api_key": "cpk_by_hand"}))
    assert forget_keys(settings) == []
    assert json.loads(path.read_text())["api_key"] == "cpk_by_hand"


def test_the_doctor_tells_of_a_missing_key(known: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path / "one")
    check = doctor._look_at_key(settings, api_url=None)
    assert check.state is CheckState.WARNING
    assert (str(key_file()) in check.evidence, check.fix) == (True, "sudo cpuos up")
    hand_over(settings)
    assert doctor._look_at_key(settings, api_url=URL).state is CheckState.OK
    known.clear()
    assert doctor._look_at_key(settings, api_url=URL).fix == "sudo cpuos up"
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_wrong")
    assert doctor._look_at_key(settings, api_url=URL).fix == "unset CPUOS_API_KEY"
