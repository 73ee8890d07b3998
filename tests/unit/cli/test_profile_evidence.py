"""Evidence: what counts as values, what a folder may replace, what kinds are believed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuos.errors import InvalidRequest
from cpuos.profiles.catalog import get_profile, list_profiles
from cpuos.profiles.evidence import describe_artifacts, describe_file, evidence_folder, read_values


def test_values_are_a_bounded_object() -> None:
    assert read_values('{"a": [1, {"b": null}]}', limit=1000) == {"a": [1, {"b": None}]}
    for wrong in ("[1]", "1", "{", '{"a": NaN}', '{"a": ' + "[" * 20 + "]" * 20 + "}", "[" * 100_000):
        with pytest.raises(ValueError):
            read_values(wrong, limit=1 << 20)
    with pytest.raises(ValueError, match="over 10 bytes"):
        read_values('{"a": "0123456789"}', limit=10)


def test_kinds_come_from_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(b"\x89PNG\r\n\x1a\n....")
    (tmp_path / "fake.png").write_bytes(b"<html><script>")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "table.csv").write_text("a,b\n")
    (tmp_path / "link").symlink_to("/etc/passwd")
    found = {artifact.name: artifact.media_type for artifact in describe_artifacts(tmp_path)}
    assert found == {
        "chart.png": "image/png",
        "fake.png": "application/octet-stream",
        "sub/table.csv": "text/csv",
    }


def test_names_that_are_not_text_are_shown(tmp_path: Path) -> None:
    Path(str(tmp_path), "caf\udce9.txt").write_text("x")
    assert [artifact.name for artifact in describe_artifacts(tmp_path)] == ["caf\\xe9.txt"]


def test_file_is_described(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    described = describe_file(tmp_path / "a")
    assert (described.name, described.size) == ("a", 3)
    assert described.sha256.startswith("ba7816bf")


def _write(folder: Path, text: str, **options: Callable[[str], None]) -> None:
    with evidence_folder(folder, **options) as draft:
        (draft / "evidence.json").write_text(json.dumps({"schema_version": "cpuos.evidence/1", "text": text}))


def test_an_earlier_evidence_is_kept_whole_with_its_time(tmp_path: Path) -> None:
    target = tmp_path / "evidence"
    told: list[str] = []
    for text in ("one", "two", "three"):
        _write(target, text, tell=told.append)
        (target / "notes.md").write_text(f"mine, of {text}")
        os.utime(target / "evidence.json", (1_700_000_000, 1_700_000_000))
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(1_700_000_000))
    kept = [f"evidence-{when}", f"evidence-{when}-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence", *kept]
    assert [(tmp_path / name / "notes.md").read_text() for name in kept] == ["mine, of one", "mine, of two"]
    assert json.loads((target / "evidence.json").read_text())["text"] == "three"
    assert told == [f"kept the earlier evidence as {name}" for name in kept]


def test_a_failure_leaves_the_earlier_one(tmp_path: Path) -> None:
    target = tmp_path / "evidence"
    _write(target, "one")
    with pytest.raises(ZeroDivisionError), evidence_folder(target) as draft:  # noqa: PT012
        (draft / "half").write_text("x")
        raise ZeroDivisionError
    assert json.loads((target / "evidence.json").read_text())["text"] == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["evidence"]


def test_other_peoples_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for name in ("precious", "file", "link"):
        with pytest.raises(InvalidRequest, match="cannot write evidence") as refused:
            _write(tmp_path / name, "one")
        assert refused.value.hint == f"--out {os.path.relpath(tmp_path / name)}-2", "beside it, from wherever it is run"
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "x"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    _write(tmp_path / "evidence", "one")
    assert (tmp_path / "evidence" / "evidence.json").exists()


def test_profiles_are_data() -> None:
    assert [profile.name for profile in list_profiles()][:1] == ["python-data"]
    assert json.loads(get_profile("python-data").model_dump_json())["limits"]["timeout_s"] == 300
    with pytest.raises(InvalidRequest, match="cannot find profile: 'nope'"):
        get_profile("nope")
