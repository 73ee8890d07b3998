from __future__ import annotations

import os
import stat
from datetime import UTC, datetime

import pytest

from cpuos.node.journal import Journal, Record, Stage
from cpuos.node.recovery import Recovery, decide
from cpuos.runtimes.base import Process
from cpuos.types.sandbox import Isolation

A = "a" * 20


@pytest.fixture
def record(asking) -> Record:
    return Record(
        request=asking(),
        stage=Stage.CREATING,
        boot_id="boot",
        changed_at=datetime(2026, 1, 1, tzinfo=UTC),
        session_key="ab" * 32,
        isolation=Isolation.GVISOR,
    )


def test_a_record_is_read_back_as_it_was(tmp_path, record):
    running = record.becomes(Stage.RUNNING, process=Process(pid=7, start_time=99), started_at=record.changed_at)
    Journal(tmp_path / "journal").write(running)
    assert Journal(tmp_path / "journal").load().records == [running]


def test_records_are_private(tmp_path, record):
    journal = Journal(tmp_path / "journal")
    journal.write(record)
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "journal" / f"{A}.json").stat().st_mode) == 0o600
    assert "abab" not in repr(record)


def test_a_crash_while_writing_keeps_the_earlier_record(tmp_path, record, monkeypatch):
    journal = Journal(tmp_path)
    journal.write(record)

    def crash(source: object, target: object) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", crash)
        with pytest.raises(OSError, match="no more"):
            journal.write(record.becomes(Stage.DEAD))
    loaded = Journal(tmp_path).load()
    assert (loaded.records, loaded.unreadable) == ([record], [])
    assert [path.name for path in tmp_path.iterdir()] == [f"{A}.json"]


@pytest.mark.parametrize("size", [0, 1, 50, 200])
def test_a_short_file_is_set_aside(tmp_path, record, size):
    journal = Journal(tmp_path)
    journal.write(record)
    path = tmp_path / f"{A}.json"
    path.write_bytes(path.read_bytes()[:size])
    loaded = journal.load()
    assert (loaded.records, loaded.unreadable) == ([], [A])
    assert journal.load().unreadable == []


def test_a_file_of_another_name_is_set_aside(tmp_path, record):
    journal = Journal(tmp_path)
    journal.write(record)
    (tmp_path / f"{A}.json").rename(tmp_path / f"{'b' * 20}.json")
    assert journal.load().unreadable == ["b" * 20]


@pytest.mark.parametrize("sandbox_id", ["../escape", "a" * 19, "A" * 20, "a" * 20 + "\n", ""])
def test_only_ids_become_paths(tmp_path, sandbox_id):
    with pytest.raises(ValueError, match="not a sandbox id"):
        Journal(tmp_path).remove(sandbox_id)


@pytest.mark.parametrize(
    ("stage", "boot_id", "expected"),
    [
        (Stage.CREATING, "boot", Recovery.UNDO),
        (Stage.CREATING, "earlier", Recovery.UNDO),
        (Stage.RUNNING, "boot", Recovery.ADOPT),
        (Stage.RUNNING, "earlier", Recovery.END),
        (Stage.DEAD, "boot", Recovery.END),
        (Stage.DELETING, "earlier", Recovery.DELETE),
        (Stage.GONE, "earlier", Recovery.KEEP),
    ],
)
def test_what_a_restarted_daemon_does(record, stage, boot_id, expected):
    assert decide(record.becomes(stage, boot_id=boot_id), boot_id="boot") is expected


@pytest.mark.parametrize(
    ("stage", "changes", "has_image", "expected"),
    [
        (Stage.SAVING, {}, False, Recovery.REVERT),
        (Stage.PAUSING, {}, False, Recovery.REVERT),
        (Stage.PAUSING, {}, True, Recovery.REVERT),
        (Stage.PAUSED, {}, True, Recovery.PARK),
        (Stage.PAUSED, {"parked": True}, True, Recovery.KEEP),
        (Stage.RESUMING, {}, True, Recovery.PARK),
        (Stage.RUNNING, {"unsettled": True}, True, Recovery.ADOPT),
        # after the host's restart
        (Stage.SAVING, {"boot_id": "before"}, False, Recovery.END),
        (Stage.PAUSING, {"boot_id": "before"}, False, Recovery.END),
        (Stage.PAUSING, {"boot_id": "before"}, True, Recovery.PARK),
        (Stage.PAUSED, {"boot_id": "before", "parked": True}, True, Recovery.KEEP),
        (Stage.RESUMING, {"boot_id": "before"}, True, Recovery.PARK),
        (Stage.RUNNING, {"boot_id": "before", "unsettled": True}, True, Recovery.PARK),
        (Stage.RUNNING, {"boot_id": "before", "unsettled": True}, False, Recovery.END),
        (Stage.RUNNING, {"boot_id": "before"}, True, Recovery.END),
    ],
)
def test_what_is_done_with_each_record_of_a_pause(record, stage, changes, has_image, expected):
    assert decide(record.becomes(stage, **changes), boot_id="boot", has_image=has_image) is expected
